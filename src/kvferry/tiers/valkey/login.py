"""The first words on a connection: the password, a name, and whether the server will have us."""

import ssl
from collections.abc import Sequence

from kvferry.addresses import Address
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.tiers.valkey.resp import Reply, ServerError, command
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import DroppedError
from kvferry.tiers.valkey.tls import Tls
from kvferry.tiers.valkey.url import ValkeyUrl

_PASSWORD = "KVFERRY_VALKEY_PASSWORD or --valkey-password-file"
_TLS_ALERT = b"\x15\x03"


def first_commands(settings: ValkeySettings) -> list[bytes]:
    """What a connection begins with. The last one asks for an answer of one who may be here."""
    url = settings.url
    commands = [command(b"CLIENT", b"SETNAME", settings.client_name.encode()), command(b"PING")]
    if settings.no_touch:
        commands.insert(1, command(b"CLIENT", b"NO-TOUCH", b"ON"))  # an older server says no: so be it
    if _authenticates(url):
        names = [url.user.encode()] if url.user else []
        commands.insert(0, command(b"AUTH", *names, (url.password or "").encode()))
    return commands


def check_replies(address: Address, url: ValkeyUrl, replies: Sequence[Reply]) -> None:
    """Replies to ``first_commands``, as far as they came. Raises MisconfiguredError; shows no password.

    That this user may not name the connection or ask for an answer is none of its concern: an error is an
    answer too.
    """
    errors = [reply for reply in replies if isinstance(reply, ServerError)]
    if errors and errors[0].code == "DENIED":
        raise MisconfiguredError(f"{address}: the server is in protected mode: give it a password there")
    if _authenticates(url) and replies and isinstance(replies[0], ServerError):
        raise MisconfiguredError(f"{address}: {_refused_login(url, replies[0])}")
    last = replies[-1] if replies else None
    if isinstance(last, ServerError) and last.code == "NOAUTH":
        raise MisconfiguredError(f"{address}: the server wants a password: give one with {_PASSWORD}")


def whose(url: ValkeyUrl) -> str:
    """The user as the server knows it."""
    return f"user {url.user!r}" if url.user else "the default user"


def why_lost(
    address: Address, error: DroppedError, *, tls: Tls | None, unread: bytes
) -> MisconfiguredError | None:
    """A connection that ended before it was greeted: what that tells, if it is for a person to mend."""
    cause = error.__cause__
    if tls is not None and isinstance(cause, ssl.SSLError):
        complaint = tls.client_refused(cause, address)
        return MisconfiguredError(complaint) if complaint else None
    if tls is None and unread.startswith(_TLS_ALERT):
        return MisconfiguredError(f"{address}: speaks TLS on this port: use the scheme valkeys://")
    return None


def _authenticates(url: ValkeyUrl) -> bool:
    return url.password is not None or url.user is not None


def _refused_login(url: ValkeyUrl, error: KvferryError) -> str:
    if "without any password configured" in str(error):
        return "a password was given, but the default user has none there: leave it out, or name a user"
    if not url.password:
        return f"the server refuses {whose(url)} without a password: give one with {_PASSWORD}"
    return (
        f"the server refuses {whose(url)} with the password given ({getattr(error, 'code', 'error')}): "
        f"check the user in the URL and the password in {_PASSWORD}"
    )
