"""What a trace format is: a reader of one file's lines, made from how the file begins.

Every format is a class with ``of(opening)``, which gives a reader, or None where the file is another
format's. To add one, write the class and name it in ``source``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar, cast

import msgspec

from kvferry.traces.request import MalformedError, Request

MAX_BLOCK_TOKENS = 1 << 20
DEFAULT_BLOCK_TOKENS = 64
_Record = TypeVar("_Record")


class Clock(StrEnum):
    """What the times of requests count from."""

    TRACE = "trace"
    SESSION = "session"  # each session from its own start; sessions follow each other in the file


@dataclass(frozen=True)
class Opening:
    """A file's path and first lines. block_tokens: what the user chose, or None."""

    path: Path
    lines: Sequence[bytes]
    block_tokens: int | None = None

    @cached_property
    def objects(self) -> Sequence[Mapping[str, object]]:
        """The lines that are JSON objects."""
        found = []
        for line in self.lines:
            try:
                record = decoded(line, ANY)
            except MalformedError:
                continue
            if isinstance(record, dict):
                found.append(record)
        return found


class Reader(Protocol):
    """Reads the lines of one file, in order.

    format: its name. block_tokens: tokens of each block. note: what is estimated or left out; empty: nothing.
    """

    format: str
    block_tokens: int
    clock: Clock

    @property
    def note(self) -> str:
        """As of the lines read so far."""
        ...

    def requests(self, line: bytes) -> Iterable[Request]:
        """The requests of one line; none where it belongs there but is none. Raises MalformedError."""
        ...


def decoded(line: bytes | str, decoder: "msgspec.json.Decoder[_Record]") -> _Record:
    """A line of JSON. Raises MalformedError in words without places, so that equal mistakes count as one."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise MalformedError(str(error).replace("`", "'")) from error
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    except (ValueError, UnicodeDecodeError) as error:
        if decoder is not ANY or b"\\ud" not in (line.encode() if isinstance(line, str) else line).lower():
            raise MalformedError("not JSON") from error
    try:
        return cast(
            _Record, json.loads(line)
        )  # which takes half a pair of surrogates, as logs that cut texts have them
    except (ValueError, RecursionError) as error:
        raise MalformedError("not JSON") from error


ANY: "msgspec.json.Decoder[object]" = msgspec.json.Decoder(object)
