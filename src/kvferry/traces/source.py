"""Trace files: opened, unpacked, recognised, and read a line at a time in bounded memory."""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvferry.errors import MisconfiguredError
from kvferry.traces.formats import Reader
from kvferry.traces.hashed import HashedBlocks
from kvferry.traces.request import MalformedError, Request

FORMATS = (HashedBlocks,)
MAX_LINE_BYTES = 256 << 20
SAMPLE_LINES = 256
SAMPLE_BYTES = 16 << 20
MAX_REASONS = 20
MAX_EXAMPLES = 3
_GZIP = b"\x1f\x8b"


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
    """One file: its format is known from its first lines, its requests come as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        with self._opened() as stream:
            sample, size = [], 0
            for line in _lines(stream):
                sample.append(line)
                size += len(line)
                if len(sample) >= SAMPLE_LINES or size >= SAMPLE_BYTES:
                    break
        self.reader = _recognised(path, sample)

    def requests(self, malformed: Malformed) -> Iterator[Request]:
        """Every request, in the file's order; lines that give none are counted. Raises MisconfiguredError."""
        with self._opened() as stream:
            for line in _lines(stream):
                self.lines += 1
                if not line.strip():
                    continue
                try:
                    yield from self.reader.requests(line)
                except MalformedError as error:
                    malformed.add(str(error), f"{self.path.name}:{self.lines}")

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO | gzip.GzipFile]:
        """The file's bytes, unpacked if need be. What goes wrong while it is open is about this file."""
        try:
            with self.path.open("rb") as probe:
                packed = probe.read(2) == _GZIP
            with gzip.open(self.path) if packed else self.path.open("rb", buffering=1 << 20) as stream:
                yield stream
        except (OSError, EOFError, zlib.error) as error:
            raise MisconfiguredError(f"cannot read {self.path}: {error}") from error


def _lines(stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES):
        yield line


def _recognised(path: Path, sample: Sequence[bytes]) -> Reader:
    for known in FORMATS:
        reader = known.of(sample)
        if reader is not None:
            return reader
    raise MisconfiguredError(
        f"{path} has no format that is known here: nothing fits its first {len(sample)} lines; "
        "docs/analyze.md lists the formats"
    )
