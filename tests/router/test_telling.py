"""What the log says of workers, however often they change."""

import logging
from collections.abc import Callable

import pytest
from tests.router.http.rig import CHAT, ask, mocks, prompt, routing, run

from kvferry.router.health import State
from kvferry.router.telling import AT_ONCE, QUIET_S, Telling

ONE, OTHER = "http://one:8000", "http://other:8000"


class Later:
    """A clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, then: Callable[[], None]) -> None:
        """As the loop's."""
        self.due.append((self.now + seconds, then))

    def pass_by(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds
        while due := [each for each in self.due if each[0] <= self.now]:
            for each in due:
                self.due.remove(each)
                each[1]()


def test_an_outage_is_told_at_once_and_what_follows_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry.router")
    later = Later()
    telling = Telling(later=later)
    for _ in range(500):
        telling.changed(ONE, State.UP, State.SUSPECT)
        telling.changed(ONE, State.SUSPECT, State.UP)
    telling.changed(ONE, State.UP, State.DOWN)
    telling.changed(OTHER, State.UP, State.DOWN)
    first = [f"worker {ONE} is suspect (was up)", f"worker {ONE} is up (was suspect)"]
    assert caplog.messages == [*first, *first, f"worker {OTHER} is down (was up)"]
    caplog.clear()
    later.pass_by(QUIET_S)
    assert caplog.messages == [f"worker {ONE} is down (was up; 997 changes since)"]
    caplog.clear()
    later.pass_by(QUIET_S)
    assert not later.due
    telling.changed(ONE, State.DOWN, State.UP)
    assert caplog.messages == [f"worker {ONE} is up (was down)"]


def test_what_is_as_it_was_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router")
    later = Later()
    Telling(later=later).changed(ONE, State.TRIAL, State.TRIAL)
    assert not caplog.messages
    assert not later.due


def test_a_client_whose_requests_fail_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router")

    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for number in range(20):
                worker.behave(status=0 if number % 2 else 500)
                await ask(router, CHAT, prompt())
            assert sum("(was" in message for message in caplog.messages) <= AT_ONCE

    run(test)
