"""The ACL user that a node needs: the keys of one trust domain, and the commands that are sent.

``docs/spec/valkey-keys.md`` says what each command is for; tests take them away one by one.
"""

from collections.abc import Sequence

from kvferry.errors import BrokenError
from kvferry.identity.names import DOMAIN_TAG_BYTES

KEY_PREFIX = "kvf1:"
COMMANDS = (
    *("get", "set", "touch", "unlink", "psetex", "pexpire"),
    *("ping", "info", "client|setname", "cluster|slots", "asking"),
)

KEEPER_COMMANDS = (*COMMANDS, "scan", "object|idletime", "object|freq", "getrange", "client|no-touch")
"""A keeper also looks through the keys, and leaves no trace of that."""


def key_pattern(tag: bytes) -> str:
    """The keys of a domain: those of namespaces that begin with its tag. Empty: of every domain."""
    if len(tag) not in (0, DOMAIN_TAG_BYTES):
        raise BrokenError(f"a domain's tag has {DOMAIN_TAG_BYTES} bytes, not {len(tag)}")
    return f"{KEY_PREFIX}{tag.hex()}*"


def setuser(user: str, tag: bytes, *, password: str = "PASSWORD", commands: Sequence[str] = COMMANDS) -> str:
    """The ``ACL SETUSER`` line, to be pasted into valkey-cli. ``reset``: what the user had before is gone.

    password: the default is a placeholder. commands: all that the user may send.
    """
    permitted = " ".join(f"+{command}" for command in commands)
    return f"ACL SETUSER {user} reset on >{password} ~{key_pattern(tag)} {permitted}"
