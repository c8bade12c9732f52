"""Block keys from content. Only full blocks get one: engines reuse no others."""

from array import array
from collections.abc import Sequence
from typing import cast

import xxhash

from kvferry.traces.request import MalformedError

_SIGNED = range(-(1 << 63), 1 << 63)


def of_ids(ids: Sequence[int | str]) -> bytes:
    """From identifiers that name blocks. Texts and numbers beyond 64 bits are hashed."""
    try:
        return array("q", cast(Sequence[int], ids)).tobytes()
    except (TypeError, OverflowError):
        return b"".join(map(_key, ids))


def of_tokens(ids: Sequence[int], block_tokens: int, *, seed: int = 0) -> bytes:
    """From token ids. seed: tells apart what must not be shared, like models. Raises MalformedError."""
    try:
        tokens = array("q", ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise MalformedError("token ids are not whole numbers") from error
    return of_bytes(tokens, 8 * block_tokens, seed=seed)


def of_bytes(content: bytes, block_bytes: int, *, seed: int = 0) -> bytes:
    """From text or any other content."""
    digest = xxhash.xxh3_64_digest
    last = len(content) - block_bytes
    return b"".join(digest(content[at : at + block_bytes], seed) for at in range(0, last + 1, block_bytes))


def seed_of(*names: str) -> int:
    """A seed for content that only requests of the same names share."""
    return xxhash.xxh3_64_intdigest("\0".join(names).encode())


def _key(name: int | str) -> bytes:
    if isinstance(name, str):
        return xxhash.xxh3_64_digest(b"text " + name.encode())
    return name.to_bytes(8, "little", signed=True) if name in _SIGNED else _key(f"number {name}")
