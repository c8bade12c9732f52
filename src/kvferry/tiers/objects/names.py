"""What objects are called. Pure. ``docs/spec/objects.md`` is the specification.

    v1/NAMESPACE/packs/ID       parts
    v1/NAMESPACE/manifests/ID   what is in several packs: a cache of their indexes
    v1/NAMESPACE/removed/ID     what of the packs does not count any more
    v1/trials/ID                written, listed, read and deleted at each start

An ID is 32 hexadecimal digits: milliseconds since 1970 by the store's clock (12), then random ones.
"""

import enum
import re
import secrets
from typing import NamedTuple

ROOT = "v1"
TRIALS = f"{ROOT}/trials"
ID_BYTES = 16
_TIME_BYTES = 6
_NAME = re.compile(r"v1/([0-9a-f]{32})/(packs|manifests|removed)/([0-9a-f]{32})")
_TRIAL = re.compile(r"v1/trials/([0-9a-f]{32})")


class Kind(enum.Enum):
    """Of object, as its path names it."""

    PACK = "packs"
    MANIFEST = "manifests"
    REMOVED = "removed"
    TRIAL = "trials"


class Name(NamedTuple):
    """A path taken apart. namespace: 16 bytes, none of a trial. ident: ID_BYTES bytes."""

    kind: Kind
    namespace: bytes
    ident: bytes

    @property
    def path(self) -> str:
        """Below the tier's prefix."""
        if self.kind is Kind.TRIAL:
            return f"{TRIALS}/{self.ident.hex()}"
        return f"{ROOT}/{self.namespace.hex()}/{self.kind.value}/{self.ident.hex()}"


def read_name(path: str) -> Name | None:
    """None for what is no object of this tier."""
    match = _NAME.fullmatch(path)
    if match is not None:
        return Name(Kind(match[2]), bytes.fromhex(match[1]), bytes.fromhex(match[3]))
    match = _TRIAL.fullmatch(path)
    return Name(Kind.TRIAL, b"", bytes.fromhex(match[1])) if match is not None else None


def prefix_of(namespace: bytes | None) -> str:
    """Of everything that belongs to a namespace, or to any."""
    return f"{ROOT}/{namespace.hex()}/" if namespace is not None else f"{ROOT}/"


def new_id(now_s: float) -> bytes:
    """now_s: seconds since 1970 by the store's clock."""
    stamp = max(0, min(int(now_s * 1000), (1 << 8 * _TIME_BYTES) - 1))
    return stamp.to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(ID_BYTES - _TIME_BYTES)


def time_of(ident: bytes) -> float:
    """Seconds since 1970 by the store's clock at which it was named."""
    return int.from_bytes(ident[:_TIME_BYTES], "big") / 1000
