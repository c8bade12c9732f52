"""All keys of a Valkey, a page at a time: their names, how long ago each was used, what they hold, removal.

For one thread that has time: it blocks, on a connection of its own. Nothing here makes a value look used, at
servers that know CLIENT NO-TOUCH.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.addresses import Address
from kvferry.errors import CorruptError, RefusedError
from kvferry.identity.header import HEADER_BYTES, named_part
from kvferry.identity.names import PartKey, PartRef
from kvferry.tiers.valkey.acl import KEY_PREFIX
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import ProtocolError, Reply, ServerError, command
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.tls import Tls

_KEY = re.compile(rb"kvf1:([0-9a-f]{32}):([0-9a-f]{64}):([0-9]{1,4}):([0-9]{1,4})(?::([0-9a-f]{8}))?")
_KEEPER = f"{KEY_PREFIX}keeper:"
_NO_SUCH_KEY = "no such key"
_LFU = "LFU"


class NoIdleTimesError(RefusedError):
    """The server's policy is one of least frequent use: it knows frequencies in place of idle times."""


class StoredKey(NamedTuple):
    """What a key's name says. key_id: of the encryption key; empty: not encrypted."""

    name: bytes
    part: PartKey
    stripe: int
    key_id: bytes


def parse_key(name: bytes) -> StoredKey | None:
    """None for a key that is none of ours (docs/spec/valkey-keys.md)."""
    match = _KEY.fullmatch(name)
    if match is None:
        return None
    namespace, chunk, part, stripe, key_id = match.groups(b"")
    key = PartKey(bytes.fromhex(namespace.decode()), bytes.fromhex(chunk.decode()), int(part))
    return StoredKey(name, key, int(stripe), bytes.fromhex(key_id.decode()))


def keeper_key(name: str) -> bytes:
    """The key that says that a keeper of that name looks through this Valkey."""
    return f"{_KEEPER}{name.encode().hex()}".encode()


def parse_keeper(name: bytes) -> str | None:
    """Whose that key is; None for any other."""
    prefix = _KEEPER.encode()
    try:
        return bytes.fromhex(name[len(prefix) :].decode()).decode() if name.startswith(prefix) else None
    except ValueError:
        return None


class Shelf:
    """One server's keys. Methods raise KvferryError when the server does not answer or does not permit it."""

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        connection.request(b"CLIENT", b"NO-TOUCH", b"ON", patience=self._until())  # older ones say no

    def page(self, cursor: bytes, *, count: int, namespace: bytes | None = None) -> tuple[bytes, list[bytes]]:
        """The next cursor, ``b"0"`` at the end, and some names. namespace: of these only."""
        space = namespace.hex() + ":" if namespace is not None else ""
        match = f"{KEY_PREFIX}{space}*".encode()
        reply = self._ask(b"SCAN", cursor, b"MATCH", match, b"COUNT", b"%d" % count)
        match reply:
            case [bytes() as following, list() as names]:
                return following, [name for name in names if isinstance(name, bytes)]
        raise ProtocolError(f"unexpected reply to SCAN: {str(reply)[:60]}")

    def idle_s(self, names: Sequence[bytes]) -> list[int | None]:
        """For how many seconds each was not used; None for one that is gone or not for us.

        Raises NoIdleTimesError.
        """
        try:
            return self._object(b"IDLETIME", names)
        except RefusedError as error:
            if _LFU in str(error):
                raise NoIdleTimesError(str(error)) from error
            raise

    def frequencies(self, names: Sequence[bytes]) -> list[int | None]:
        """How often each was used: a counter that begins at 5, rises ever more rarely and falls with time."""
        return self._object(b"FREQ", names)

    def is_here(self, keeper: str, *, life_s: float) -> None:
        """Say so for so long, if this server holds that key and permits it."""
        words = (b"SET", keeper_key(keeper), b"1", b"PX", b"%d" % max(1, int(1000 * life_s)))
        self._connection.request(*words, patience=self._until())

    def _object(self, what: bytes, names: Sequence[bytes]) -> list[int | None]:
        replies = self._each([(b"OBJECT", what, name) for name in names])
        return [reply if isinstance(reply, int) else None for reply in replies]

    def parts(self, names: Sequence[bytes]) -> list[PartRef | None]:
        """The part that each value belongs to, as its header says; None for one that is gone or damaged."""
        last = b"%d" % (HEADER_BYTES - 1)
        heads = self._each([(b"GETRANGE", name, b"0", last) for name in names])
        return [_part(head) for head in heads]

    def unlink(self, names: Sequence[bytes]) -> int:
        """How many of them there were. One command each: in a Cluster they are of many slots."""
        gone = self._each([(b"UNLINK", name) for name in names])
        return sum(reply for reply in gone if isinstance(reply, int))

    def abort(self) -> None:
        """From another thread: give up waiting."""
        self._connection.abort()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _until(self) -> Until:
        self._connection.rest()
        return Until(time.monotonic() + self._patience_s)

    def _ask(self, *words: bytes) -> Reply:
        reply = self._connection.request(*words, patience=self._until())
        if isinstance(reply, ServerError):
            raise RefusedError(str(reply)) from reply
        return reply

    def _each(self, commands: Sequence[tuple[bytes, ...]]) -> list[Reply]:
        """Replies to all. Raises RefusedError if not one of them is permitted."""
        if not commands:
            return []
        patience = self._until()
        self._connection.send_commands(b"".join([command(*words) for words in commands]), patience)
        replies = [self._connection.reply(patience) for _ in commands]
        errors = [r for r in replies if isinstance(r, ServerError) and _NO_SUCH_KEY not in str(r)]
        if errors and len(errors) == len(replies):
            raise RefusedError(str(errors[0])) from errors[0]
        return replies


class Keyspace:
    """servers: those that hold keys at present, all of a Cluster's primaries."""

    def __init__(
        self,
        settings: ValkeySettings,
        servers: Callable[[], Sequence[Address]],
        *,
        patience_s: float = 5.0,
    ) -> None:
        self._settings = settings
        self._tls = Tls(settings.url.tls) if settings.url.tls is not None else None
        self._patience_s = patience_s
        self.servers = servers

    def open(self, server: Address) -> Shelf:
        """Connect. Raises KvferryError."""
        deadline = time.monotonic() + self._patience_s
        connection = Connection.open(server, self._settings, tls=self._tls, deadline=deadline)
        try:
            return Shelf(connection, self._patience_s)
        except BaseException:
            connection.close()
            raise


def _part(head: Reply) -> PartRef | None:
    if not isinstance(head, bytes) or len(head) < HEADER_BYTES:
        return None
    try:
        return named_part(head)
    except CorruptError:
        return None
