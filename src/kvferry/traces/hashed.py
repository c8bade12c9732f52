"""Traces of hashed blocks: Mooncake's, and Qwen-Bailian's, which adds chats.

One JSON object a line: ``{"timestamp": 0, "input_length": 675, "output_length": 50, "hash_ids": [0, 1]}``.
Mooncake counts milliseconds and 512 tokens a block, Bailian seconds and 16 tokens, and has ``chat_id`` and
``parent_chat_id`` (-1: none). A ``block_size`` in the records says so outright, as kvcache-simulator's do.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
import xxhash

from kvferry.traces.formats import MAX_BLOCK_TOKENS, objects
from kvferry.traces.request import MalformedError, Request

_MOST_SIZES = tuple(1 << power for power in range(2, 14))  # tried where no record says it
_MAX_CHATS = 1 << 22


class _Line(msgspec.Struct):
    input_length: int
    hash_ids: list[int | str]
    output_length: int | None = None
    timestamp: float | str | None = None
    block_size: int | None = None
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None
    session_id: int | str | None = None


class HashedBlocks:
    """Mooncake and Bailian lines."""

    def __init__(self, *, format: str, block_tokens: int, ticks_per_s: float) -> None:  # noqa: A002
        self.format = format
        self.block_tokens: int | None = block_tokens
        self._size = block_tokens
        self._ticks_per_s = ticks_per_s
        self._decoder = msgspec.json.Decoder(_Line)
        self._roots: dict[int | str, str] = {}  # chat -> the chat it began as

    @classmethod
    def of(cls, sample: Sequence[bytes]) -> "HashedBlocks | None":
        """A reader, if the file's first objects have ``hash_ids`` in a list."""
        found = [line for line in objects(sample) if isinstance(line.get("hash_ids"), list)]
        if not found or "input_length" not in found[0]:
            return None
        chats = "chat_id" in found[0]
        size = _block_tokens(found)
        if size is None:
            return None
        return cls(
            format="qwen-bailian" if chats else "mooncake",
            block_tokens=size,
            ticks_per_s=1.0 if chats else 1000.0,
        )

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request. Raises MalformedError."""
        try:
            record = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedError(reason(error)) from error
        if record.input_length < 1:
            raise MalformedError("input_length is below 1")
        if record.block_size not in (None, self._size):
            raise MalformedError("block_size is not that of the lines before")
        if len(record.hash_ids) > -(-record.input_length // self._size):
            raise MalformedError("more hash_ids than input_length has blocks")
        return [
            Request(
                time_s=_seconds(record.timestamp, self._ticks_per_s),
                input_tokens=record.input_length,
                output_tokens=record.output_length,
                blocks=keys(record.hash_ids),
                session=self._session(record),
            )
        ]

    def _session(self, record: _Line) -> str | None:
        if record.session_id is not None:
            return str(record.session_id)
        if record.chat_id is None:
            return None
        parent = record.parent_chat_id
        root = str(record.chat_id) if parent in (None, -1, "-1") else self._roots.get(parent, str(parent))
        if len(self._roots) < _MAX_CHATS:
            self._roots[record.chat_id] = root
        return root


def keys(ids: Sequence[int | str]) -> bytes:
    """Block keys from identifiers of any kind. Texts and numbers beyond 64 bits are hashed."""
    try:
        return array("q", cast(Sequence[int], ids)).tobytes()
    except (TypeError, OverflowError):
        return b"".join(
            xxhash.xxh3_64_digest(f"{type(name).__name__[0]}{name}".encode())
            if isinstance(name, str) or not -(1 << 63) <= name < 1 << 63
            else name.to_bytes(8, "little", signed=True)
            for name in ids
        )


def reason(error: Exception) -> str:
    """A decoder's words without places, so that equal mistakes count as one."""
    if not isinstance(error, msgspec.ValidationError):
        return "not JSON"
    return str(error).replace("`", "'")


def _block_tokens(records: Sequence[dict[str, object]]) -> int | None:
    """What the records say, else the one size at which every prompt has as many blocks as identifiers."""
    for record in records:
        said = record.get("block_size")
        if isinstance(said, int) and 1 <= said <= MAX_BLOCK_TOKENS:
            return said
    lengths = [
        (record["input_length"], len(ids))
        for record in records
        if isinstance(record["input_length"], int) and isinstance(ids := record["hash_ids"], list) and ids
    ]
    fitting = [
        size
        for size in _MOST_SIZES
        if lengths and all(number in (tokens // size, -(-tokens // size)) for tokens, number in lengths)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _seconds(timestamp: float | str | None, ticks_per_s: float) -> float | None:
    if timestamp is None:
        return None
    try:
        return float(timestamp) / ticks_per_s
    except ValueError as error:
        raise MalformedError("timestamp is not a number") from error
