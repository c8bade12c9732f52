"""Trace files: opened, unpacked, recognised, and read a line at a time in bounded memory."""

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvferry.errors import MisconfiguredError
from kvferry.traces.agents import AgentSessions
from kvferry.traces.formats import Opening, Reader
from kvferry.traces.hashed import HashedBlocks
from kvferry.traces.lengths import Lengths
from kvferry.traces.openai import OpenAiRequests
from kvferry.traces.rag import RagChunks
from kvferry.traces.request import MalformedError, Request
from kvferry.traces.tokens import TokenIds
from kvferry.traces.vllmlog import VllmLog

FORMATS = (HashedBlocks, RagChunks, AgentSessions, TokenIds, OpenAiRequests, VllmLog, Lengths)
MAX_LINE_BYTES = 256 << 20
SAMPLE_LINES = 256
SAMPLE_BYTES = 16 << 20
MAX_REASONS = 20
MAX_EXAMPLES = 3
_GZIP = b"\x1f\x8b"
_OTHERS = {
    b"PK\x03\x04": "packed with zip", b"\x28\xb5\x2f\xfd": "packed with zstd", b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz", b"PAR1": "a Parquet file", b"\xff\xfe": "text in UTF-16, not UTF-8",
    b"SQLite format 3": "a database",
}  # fmt: skip
_BOM = b"\xef\xbb\xbf"
_LIST = re.compile(rb"\[\s*(?:[\[{\]]|$)")  # and no line of a log, as "[2026-"


@dataclass(slots=True)
class Malformed:
    """Lines that gave no request: how many, why, and where the first of each kind are."""

    lines: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count one line. Beyond ``MAX_REASONS`` kinds, new ones count as others."""
        if reason not in self.reasons and len(self.reasons) >= MAX_REASONS:
            reason = "other reasons"
        self.lines += 1
        self.reasons[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < MAX_EXAMPLES:
            places.append(place)


class TraceFile:
    """One file: its format is known from its first lines, its requests come as they are read.

    ``lines`` and ``other_lines`` count what was read so far, and what of it belongs there but is no request.
    ``cut``: the packed file is damaged or ends early, and what could be unpacked of it was read.
    """

    def __init__(self, path: Path, *, block_tokens: int | None = None) -> None:
        self.path = path
        self.lines = 0
        self.other_lines = 0
        self.cut = False
        self._raw: BinaryIO | None = None
        if path.is_dir():
            raise MisconfiguredError(f"{path} is a directory; name the files in it")
        if path.exists() and not path.is_file():  # a pipe gives its bytes once, and they are read twice
            raise MisconfiguredError(f"{path} is no file; write what it holds to one (gzip is fine)")
        with self._opened() as stream:
            sample, size = [], 0
            for line in self._lines(stream):
                sample.append(line)
                size += len(line)
                if len(sample) >= SAMPLE_LINES or size >= SAMPLE_BYTES:
                    break
        if not sample:
            raise MisconfiguredError(f"{path} is {'damaged from its beginning' if self.cut else 'empty'}")
        self._whole = _is_one_document(sample)
        if self._whole:
            sample = list(self._records())[:SAMPLE_LINES]
        self.reader = _recognised(Opening(path, sample, block_tokens))

    def requests(self, malformed: Malformed) -> Iterator[Request]:
        """Every request, in the file's order; lines that give none are counted. Raises MisconfiguredError."""
        for line in self._records():
            self.lines += 1
            if not line.strip():
                continue
            number = 0
            try:
                for number, request in enumerate(self.reader.requests(line), 1):  # noqa: B007
                    yield request
            except MalformedError as error:
                malformed.add(str(error), f"{self.path.name}:{self.lines}")
            else:
                self.other_lines += not number

    @property
    def share_read(self) -> float:
        """How much of the file, packed as it is, was read while its requests are."""
        if self._raw is None or self._raw.closed:
            return 0.0
        return self._raw.tell() / max(1, self.path.stat().st_size)

    def _records(self) -> Iterator[bytes]:
        with self._opened() as stream:
            if self._whole:
                document = stream.read(MAX_LINE_BYTES + 1)
                yield from _elements(self.path, document.removeprefix(_BOM))
            else:
                yield from self._lines(stream)

    def _lines(self, stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
        """Up to the end, or up to where a packed file cannot be unpacked."""
        start = _BOM
        while True:
            try:
                line = stream.readline(MAX_LINE_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                self.cut = True
                return
            if not line:
                return
            yield line.removeprefix(start)
            start = b""

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO | gzip.GzipFile]:
        """The file's bytes, unpacked if need be. What goes wrong while it is open is about this file."""
        try:
            with self.path.open("rb", buffering=1 << 20) as raw:
                packed = raw.read(2) == _GZIP
                raw.seek(0)
                self._raw = raw
                if not packed:
                    yield raw
                    return
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield stream
        except (OSError, EOFError, zlib.error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise MisconfiguredError(f"cannot read {self.path}: {why}") from error


def _is_one_document(sample: Sequence[bytes]) -> bool:
    """Whether this is a JSON document over several lines, or a list, rather than an object a line."""
    first = next((line.strip() for line in sample if line.strip()), b"")
    return _LIST.match(first) is not None or first == b"{"


def _elements(path: Path, document: bytes) -> list[bytes]:
    """A document as if it had one object a line."""
    if len(document) > MAX_LINE_BYTES:
        raise MisconfiguredError(
            f"{path} is one JSON document of over {MAX_LINE_BYTES >> 20} MiB; write one object a line instead"
        )
    if not document.lstrip().startswith(b"["):
        return [document]
    try:
        return [bytes(part) for part in msgspec.json.decode(document, type=list[msgspec.Raw])]
    except (ValueError, RecursionError) as error:
        raise MisconfiguredError(f"{path} begins like a JSON list and is none: {error}") from error


def _recognised(opening: Opening) -> Reader:
    for known in FORMATS:
        reader = known.of(opening)
        if reader is not None:
            return reader
    start = opening.lines[0] if opening.lines else b""
    other = next((name for mark, name in _OTHERS.items() if start.startswith(mark)), None)
    if other is not None:
        raise MisconfiguredError(
            f"{opening.path} is {other}; write it as lines of text first (plain, or packed with gzip)"
        )
    raise MisconfiguredError(
        f"{opening.path}: no known format fits its first {len(opening.lines)} lines; see docs/analyze.md"
    )
