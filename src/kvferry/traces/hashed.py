"""Traces of hashed blocks: Mooncake's, and Qwen-Bailian's, which adds chats.

One JSON object a line: ``{"timestamp": 0, "input_length": 675, "output_length": 50, "hash_ids": [0, 1]}``.
Mooncake counts milliseconds from the start and 512 tokens a block, Bailian seconds and 16 tokens, and has
``chat_id`` and ``parent_chat_id`` (-1: none). Dates and times since 1970 are taken as such in both. A
``block_size`` in the records says so outright, as kvcache-simulator's do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvferry.errors import MisconfiguredError
from kvferry.traces import blocks
from kvferry.traces.formats import MAX_BLOCK_TOKENS, Clock, Opening, decoded
from kvferry.traces.request import MalformedError, Request
from kvferry.traces.times import seconds

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


_DECODER = msgspec.json.Decoder(_Line, strict=False)  # 675.0 and "675" are numbers too
_MILLI = 1000.0
_FROM_1970 = 9e8  # no trace is so long, in milliseconds from its start


class HashedBlocks:
    """Mooncake and Bailian lines."""

    clock = Clock.TRACE

    def __init__(self, *, name: str, block_tokens: int, ticks_per_s: float | None) -> None:
        """ticks_per_s: of times from the start; None: they are dates or since 1970, and say so themselves."""
        self.format = name
        self.block_tokens = block_tokens
        self._ticks_per_s = ticks_per_s
        unit = "milliseconds" if ticks_per_s == _MILLI else "seconds"
        self.note = f"times are {unit} from the start" if ticks_per_s else ""
        self._decoder = _DECODER
        self._roots: dict[int | str, str] = {}  # chat -> the chat it began as

    @classmethod
    def of(cls, opening: Opening) -> "HashedBlocks | None":
        """A reader, if the file's first objects have ``hash_ids`` in a list."""
        found = [
            line
            for line in opening.objects
            if isinstance(line.get("hash_ids"), list) and "input_length" in line
        ]
        if not found:
            return None
        chats = "chat_id" in found[0]
        ticks = 1.0 if chats else _MILLI
        size = _block_tokens(found) or opening.block_tokens
        if size is None:
            raise MisconfiguredError(
                f"{opening.path}: no block size makes hash_ids and input_length agree; give --block-tokens"
            )
        return cls(
            name="qwen-bailian" if chats else "mooncake",
            block_tokens=size,
            ticks_per_s=None if _tell_themselves(found) else ticks,
        )

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request. Raises MalformedError."""
        record = decoded(line, self._decoder)
        if record.block_size not in (None, self.block_tokens):
            raise MalformedError("block_size is not that of the lines before")
        if len(record.hash_ids) > -(-record.input_length // self.block_tokens):
            raise MalformedError("more hash_ids than input_length has blocks")
        return [
            Request(
                time_s=_seconds(record.timestamp, self._ticks_per_s),
                input_tokens=record.input_length,
                output_tokens=record.output_length,
                blocks=blocks.of_ids(record.hash_ids),
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


def _block_tokens(records: Sequence[Mapping[str, object]]) -> int | None:
    """What the records say, else the size at which most prompts have as many blocks as identifiers."""
    for record in records:
        said = record.get("block_size")
        if isinstance(said, int) and 1 <= said <= MAX_BLOCK_TOKENS:
            return said
    lengths = [
        (int(tokens), len(ids))
        for record in records
        if isinstance(tokens := _number(record["input_length"]), float)
        and isinstance(ids := record["hash_ids"], list)
        and ids
    ]
    fits = Counter(
        size
        for tokens, number in lengths
        for size in _MOST_SIZES
        if tokens > 0 and number in (tokens // size, -(-tokens // size))
    )
    (best, lines), (_, next_lines) = [*fits.most_common(2), (0, 0), (0, 0)][:2]
    return best if lines > next_lines and 2 * lines > len(lengths) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _tell_themselves(records: Sequence[Mapping[str, object]]) -> bool:
    """Whether the times are dates, or numbers that can only count from 1970."""
    times = [record["timestamp"] for record in records if record.get("timestamp") is not None]
    numbers = [_number(time) for time in times]
    return bool(times) and all(number is None or number >= _FROM_1970 for number in numbers)


def _seconds(timestamp: float | str | None, ticks_per_s: float | None) -> float | None:
    if timestamp is None:
        return None
    if ticks_per_s is None:
        return seconds(timestamp)
    try:
        return float(timestamp) / ticks_per_s
    except (ValueError, OverflowError) as error:
        raise MalformedError("timestamp is not a number") from error
