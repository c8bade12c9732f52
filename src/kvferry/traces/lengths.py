"""Traces of lengths alone, as CSV: Azure's LLM inference traces, BurstGPT. Which prompts share content is
unknown.
"""

import csv
from collections.abc import Iterable

from kvferry.traces.formats import DEFAULT_BLOCK_TOKENS, Clock, Opening
from kvferry.traces.request import MalformedError, Request
from kvferry.traces.times import seconds

# format -> the names of time, input and output columns, in small letters
_COLUMNS = {
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
}
_SESSION = "session id"  # of BurstGPT's second edition
_SEPARATORS = (",", ";", "\t")


class Lengths:
    """CSV with a head."""

    clock = Clock.TRACE
    note = "the format has lengths only"

    def __init__(self, name: str, head: list[str], block_tokens: int, separator: str) -> None:
        self.format = name
        self.block_tokens = block_tokens
        self._head = head
        self._separator = separator
        self._places = [head.index(column) for column in _COLUMNS[name]]
        self._session = head.index(_SESSION) if _SESSION in head else None

    @classmethod
    def of(cls, opening: Opening) -> "Lengths | None":
        """A reader, if the first line has the columns of a known trace."""
        for separator in _SEPARATORS:
            head = _cells(opening.lines[0], separator) if opening.lines else []
            names = [cell.strip().lower() for cell in head]
            for name, columns in _COLUMNS.items():
                if all(column in names for column in columns):
                    return cls(name, names, opening.block_tokens or DEFAULT_BLOCK_TOKENS, separator)
        return None

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request; none for the head. Raises MalformedError."""
        cells = _cells(line, self._separator)
        if [cell.strip().lower() for cell in cells] == self._head:
            return []
        try:
            time, given, made = (cells[place] for place in self._places)
            request = Request(
                time_s=seconds(time),
                input_tokens=_whole(given),
                output_tokens=_whole(made),
                blocks=None,
                session=None if self._session is None else cells[self._session] or None,
            )
        except IndexError as error:
            raise MalformedError("fewer columns than the head") from error
        except ValueError as error:
            raise MalformedError("a number of tokens is no whole number") from error
        return [request]


def _whole(cell: str) -> int:
    """A count, as ``374`` or ``374.0``. Raises ValueError."""
    try:
        return int(cell)
    except ValueError:
        number = float(cell)
    if not number.is_integer():
        raise ValueError(cell)
    return int(number)


def _cells(line: bytes, separator: str) -> list[str]:
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
        return next(csv.reader([text], delimiter=separator), [])
    except (UnicodeDecodeError, csv.Error):
        return []
