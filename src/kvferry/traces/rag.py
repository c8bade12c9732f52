"""RAGPulse: prompts put together from numbered chunks, whose lengths stand in files of their own.

``{"timestamp": "82", "input_length": 3112, "output_length": 192, "session_id": "...", "hash_ids":
{"sys_prompt": [8302], "passages_ids": [7398], "history": [15200], "web_search": [], "user_input":
[26923]}}``, seconds. Beside it lie ``1_sys_prompt.jsonl`` and so on, with ``{"sys_prompt_id": 8302,
"token_length": 512}``. A prompt is its chunks one after another, cut into blocks; a block is named by the
chunks it holds and from where to where.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from kvferry.errors import MisconfiguredError
from kvferry.traces.formats import DEFAULT_BLOCK_TOKENS, Clock, Opening, decoded
from kvferry.traces.request import MalformedError, Request
from kvferry.traces.times import seconds

_LENGTHS = "[0-9]_*.jsonl"
_MAX_FILES = 16
_MAX_CHUNK_TOKENS = 1 << 24


class _Line(msgspec.Struct):
    input_length: int
    hash_ids: dict[str, list[int]]
    output_length: int | None = None
    timestamp: float | str | None = None
    session_id: str | int | None = None


class RagChunks:
    """RAGPulse's trace."""

    format = "ragpulse"
    clock = Clock.TRACE
    note = ""

    def __init__(self, lengths: dict[int, int], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._lengths = lengths
        self._decoder = msgspec.json.Decoder(_Line, strict=False)

    @classmethod
    def of(cls, opening: Opening) -> "RagChunks | None":
        """A reader, if the first objects name chunks by kind. Raises MisconfiguredError."""
        found = next((line for line in opening.objects if isinstance(line.get("hash_ids"), dict)), None)
        if found is None or "input_length" not in found:
            return None
        lengths: dict[int, int] = {}
        for path in sorted(opening.path.parent.glob(_LENGTHS))[:_MAX_FILES]:
            if path != opening.path:
                lengths |= _read_lengths(path)
        if not lengths:
            raise MisconfiguredError(
                f"{opening.path}: its chunks' lengths are not beside it; put 1_sys_prompt.jsonl etc. there"
            )
        return cls(lengths, opening.block_tokens or DEFAULT_BLOCK_TOKENS)

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request. Raises MalformedError."""
        record = decoded(line, self._decoder)
        chunks = [(name, self._lengths.get(name, 0)) for names in record.hash_ids.values() for name in names]
        if any(not tokens for _, tokens in chunks):
            raise MalformedError("a chunk has no length in the files beside the trace")
        full = sum(tokens for _, tokens in chunks) // self.block_tokens
        if full > -(-record.input_length // self.block_tokens):
            raise MalformedError("more chunks than input_length has blocks")
        return [
            Request(
                time_s=seconds(record.timestamp),
                input_tokens=record.input_length,
                output_tokens=record.output_length,
                blocks=b"".join(_blocks(chunks, self.block_tokens)),
                session=None if record.session_id is None else str(record.session_id),
            )
        ]


def _blocks(chunks: Sequence[tuple[int, int]], block_tokens: int) -> Iterator[bytes]:
    """A key for every full block of these (chunk, tokens)."""
    pieces: list[str] = []
    room = block_tokens
    for name, tokens in chunks:
        at = 0
        while tokens - at >= room:
            pieces.append(f"{name} {at} {at + room}")
            yield xxhash.xxh3_64_digest("\n".join(pieces).encode())
            pieces.clear()
            at += room
            room = block_tokens
        if at < tokens:
            pieces.append(f"{name} {at} {tokens}")
            room -= tokens - at


def _read_lengths(path: Path) -> dict[int, int]:
    """chunk -> tokens. Raises MisconfiguredError."""
    found = {}
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                record = msgspec.json.decode(line, type=dict[str, int])
                tokens = record.pop("token_length", 0)
                names = [value for key, value in record.items() if key.endswith("_id")]
                if len(names) != 1 or not 0 < tokens <= _MAX_CHUNK_TOKENS:
                    raise MisconfiguredError(f"{path}:{number} names no chunk with its token_length")
                found[names[0]] = tokens
    except OSError as error:
        raise MisconfiguredError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MisconfiguredError(f"{path} is no file of chunk lengths: {error}") from error
    return found
