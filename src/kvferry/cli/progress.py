"""A line on the terminal that says how far long work is. Nothing where standard error is no terminal."""

import sys
import time
from types import TracebackType
from typing import Self

from kvferry.cli.table import COLUMNS, clip

EVERY_S = 0.5


class Progress:
    """One line, written over itself, gone at the end. Used as ``with Progress() as progress``."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._written = False
        self._next_s = time.monotonic() + EVERY_S  # quick work shows nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            self._write("")

    @property
    def due(self) -> bool:
        """Whether it is time to show something: asked before a text is made."""
        return self._shown and time.monotonic() >= self._next_s

    def show(self, text: str) -> None:
        """Show ``text`` in place of what was there."""
        if self._shown:
            self._write(clip(text, COLUMNS - 1))
            self._next_s = time.monotonic() + EVERY_S

    def _write(self, text: str) -> None:
        self._written = True
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
