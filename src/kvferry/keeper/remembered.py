"""What was used lately, in a file from one run of a keeper to the next, so that ``warm`` knows it then.

It is a help and no more: a file that is not there, or damaged, is an empty one.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.identity.names import (
    DIGEST_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    NAMESPACE_BYTES,
    PartKey,
    PartRef,
)
from kvferry.keeper.reuse import Use

MAX_FILE_BYTES = 16 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("kvferry.keeper")


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
    chunk: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]
    weight: Annotated[float, Meta(ge=0, le=1e9)]
    age_s: Annotated[float, Meta(ge=0, le=1e9)]


class _Uses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """boot, at: when it was written, monotonic; so that the time in between counts, but for a reboot's."""

    boot: str
    at: float
    entries: list[_Entry]


def save(path: Path, uses: Sequence[Use], now: float) -> None:
    """In place of what was there. An error is logged."""
    entries = [_Entry(*use.ref.key, use.ref.nbytes, use.weight, max(0.0, now - use.at)) for use in uses]
    data = msgspec.msgpack.encode(_Uses(_boot(), now, entries))
    fresh = path.with_name(path.name + ".new")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(file, "wb") as target:
            target.write(data)
        os.replace(fresh, path)
    except OSError as error:
        log.warning("what was used lately could not be written to %s: %s", path, error.strerror)


def load(path: Path, now: float) -> list[Use]:
    """What was saved, the least recent first. An error is logged, and nothing remembered."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too large")
        found = msgspec.msgpack.decode(path.read_bytes(), type=_Uses)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.warning("what was used lately is forgotten: %s: %s", path, error)
        return []
    passed_s = max(0.0, now - found.at) if found.boot == _boot() else 0.0
    return [
        Use(PartRef(PartKey(e.namespace, e.chunk, e.part), e.nbytes), e.weight, now - e.age_s - passed_s)
        for e in found.entries
    ]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""
