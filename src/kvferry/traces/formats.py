"""The trace formats: how each is told from the others, and how a line of it becomes requests.

A format is a class with ``of(sample)``, which makes a reader of a file that begins with these lines, or None
where it is another format's, and ``requests(line)``. To add one, write the class and name it in ``source``.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvferry.traces.request import Request

MAX_BLOCK_TOKENS = 1 << 20


class Reader(Protocol):
    """Reads the lines of one file.

    format: its name. block_tokens: tokens of each block; None where the format leaves that to the caller.
    """

    format: str
    block_tokens: int | None

    def requests(self, line: bytes) -> Iterable[Request]:
        """The requests of one line. Raises MalformedError."""
        ...


def objects(sample: Sequence[bytes]) -> list[dict[str, object]]:
    """The lines that are JSON objects."""
    found = []
    for line in sample:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
