"""Says in the log how workers are: a few changes at once, then once a minute. Clients may cause them."""

import asyncio
import logging
from collections.abc import Callable

from kvferry.router.health import State

QUIET_S = 60.0
AT_ONCE = 4  # of a worker, in that time: an outage and its end

log = logging.getLogger("kvferry.router")


class _Said:
    """About one worker, in the minute that goes on."""

    __slots__ = ("left", "now", "said", "untold")

    def __init__(self, said: State) -> None:
        self.said = self.now = said
        self.left = AT_ONCE - 1
        self.untold = 0


def _on_the_loop(seconds: float, then: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, then)


class Telling:
    """later: calls back after so many seconds."""

    def __init__(self, *, later: Callable[[float, Callable[[], None]], None] = _on_the_loop) -> None:
        self._later = later
        self._workers: dict[str, _Said] = {}

    def changed(self, url: str, before: State, after: State, *, why: str = "") -> None:
        """It was in one state, and is in another. why: where that is known."""
        if before is after:
            return
        said = self._workers.get(url)
        why = f": {why}" if why else ""
        if said is None:
            log.info("worker %s is %s (was %s)%s", url, after.value, before.value, why)
            self._workers[url] = _Said(after)
            self._later(QUIET_S, lambda: self._due(url))
        elif said.left:
            log.info("worker %s is %s (was %s)%s", url, after.value, before.value, why)
            said.said = said.now = after
            said.left -= 1
        else:
            said.now = after
            said.untold += 1

    def _due(self, url: str) -> None:
        said = self._workers[url]
        if not said.untold:
            del self._workers[url]
            return
        now, untold = said.now, said.untold
        log.info("worker %s is %s (was %s; %d changes since)", url, now.value, said.said.value, untold)
        self._workers[url] = _Said(now)
        self._later(QUIET_S, lambda: self._due(url))
