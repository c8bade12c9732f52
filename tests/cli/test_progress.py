"""Long work says how far it is, on a terminal only, and leaves nothing behind."""

import io
import sys

import pytest

from kvferry.cli import progress
from kvferry.cli.progress import Progress
from kvferry.cli.table import COLUMNS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_each_text_in_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with Progress() as shown:
        assert shown.due
        shown.show("reading")
        shown.show("x" * 500)
    first, second, last = screen.getvalue().split("\r")[1:]
    assert first == "reading\x1b[K"
    assert len(second) < COLUMNS + len("\x1b[K")
    assert last == "\x1b[K"


def test_quick_work_shows_nothing_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "EVERY_S", 3600.0)
    with Progress() as shown:
        assert not shown.due
    assert not sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with Progress() as shown:
        assert not shown.due
        shown.show("reading")
    assert not log.getvalue()
