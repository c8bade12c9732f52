"""Looks after the workers of a roster: probes them, asks what models they have, sees who has left.

One task for each worker, and one question at a time. Whatever a worker does with a question, it costs its
own task alone, for as long as the question's deadline.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Mapping

from kvferry.errors import KvferryError
from kvferry.router.asking import Answer, NobodyThereError, Tls, UntriedError, get
from kvferry.router.health import Change, Health, Probed, State, blames
from kvferry.router.models import models_of
from kvferry.router.roster import Roster, Worker

MODELS_EVERY_S = 10.0
MODELS_GAP_S = 1.0
QUESTION_S = 5.0
UNTRIED_S = 1.0
DRAIN_LOOK_S = 0.25
AT_ONCE_PER_S = 100  # workers probed per second, beyond which each is probed less often
_BEGAN = re.compile(rb"^process_start_time_seconds(?:\{[^}\n]*\})? ([0-9.e+]+)\s*$", re.MULTILINE)

log = logging.getLogger("kvferry.router")


Note = Callable[[str, Callable[[Health], Change]], object]


class Attendant:
    """Starts with ``attend`` for each worker; ``close`` ends all of it."""

    def __init__(
        self,
        roster: Roster,
        *,
        note: Note,
        removed: Callable[[str], None],
        heard_at: Callable[[str], float] = lambda _: 0.0,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """note: passes what was seen on to ``Roster.note``, and acts on it. removed: a worker has left.

        heard_at: when an answer to a request came from there last, or a part of one; by this clock.
        headers: for ``/v1/models`` and ``/metrics``, which may want a key.
        """
        self.defects = 0
        self._roster = roster
        self._note = note
        self._removed = removed
        self._heard_at = heard_at
        self._tls = tls
        self._headers = dict(headers or {})
        self._clock = clock
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._wakes: dict[Worker, asyncio.Event] = {}
        self._leaving: asyncio.Task[None] | None = None
        roster.noticed = self._noticed

    def attend(self, worker: Worker) -> None:
        """From now on, until it leaves. Twice is once."""
        if worker not in self._tasks:
            self._wakes[worker] = asyncio.Event()
            task = self._tasks[worker] = asyncio.create_task(self._attend(worker))
            task.add_done_callback(lambda _: self._forget(worker))

    def look_again(self, pool: str) -> None:
        """Somebody wants a model that nobody there is known to have: ask before long."""
        for worker, wake in self._wakes.items():
            if worker.pool == pool:
                worker.models_at = min(worker.models_at, self._clock() + MODELS_GAP_S)
                wake.set()

    def drain(self, url: str, *, grace_s: float) -> bool:
        """Let a worker go. False: there is none with this URL."""
        worker = self._roster.get(url)
        if worker is None or not self._roster.drain(url, until=self._clock() + grace_s):
            return False
        self._noticed(worker)
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._see_off())
        return True

    async def close(self) -> None:
        """All tasks end."""
        tasks = [*self._tasks.values(), *([self._leaving] if self._leaving is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, worker: Worker) -> None:
        self._tasks.pop(worker, None)
        self._wakes.pop(worker, None)

    async def _see_off(self) -> None:
        while any(worker.state is State.DRAINING for worker in self._roster):
            for worker in self._roster.drained(self._clock()):
                self._removed(worker.url)
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _attend(self, worker: Worker) -> None:
        wake = self._wakes[worker]
        while (due := worker.health.next_probe_at()) is not None:
            due = min(due, worker.models_at) if worker.health.probe_well else due
            wait_s = due - self._clock()
            if wait_s > 0:
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await wake.wait()
                continue
            try:
                await self._ask(worker)
            except UntriedError:
                await asyncio.sleep(UNTRIED_S)
            except Exception as error:
                self.defects += 1
                log.error("a defect in looking after %s; it goes on", worker.url, exc_info=error)
                await asyncio.sleep(1.0)

    async def _ask(self, worker: Worker) -> None:
        """Whichever question is due. Raises UntriedError."""
        due = worker.health.next_probe_at()
        if due is not None and self._clock() >= due:
            how = await self._probe(worker)
            stretch = max(1.0, len(self._roster) / (AT_ONCE_PER_S * worker.health.limits.interval_s))
            jitter = random.uniform(-1.0, 1.0)
            now = self._clock()
            self._tell(worker, lambda health: health.probed(how, now, jitter=jitter, stretch=stretch))
        if worker.health.boot_wanted:
            began = await self._began(worker)
            self._tell(worker, lambda health: health.booted(began))
        if worker.health.probe_well and self._clock() >= worker.models_at:
            worker.models_at = self._clock() + MODELS_EVERY_S
            await self._models(worker)

    async def _probe(self, worker: Worker) -> Probed:
        """A worker too busy for the question is not down: its answers to requests say so."""
        began, worker.trouble = self._clock(), ""
        try:
            answer = await get(worker.url, "/health", timeout_s=worker.health.limits.timeout_s, tls=self._tls)
        except NobodyThereError as error:
            worker.trouble = str(error)
            return Probed.REFUSED
        except UntriedError:
            raise
        except KvferryError as error:
            if self._heard_at(worker.url) > began:
                return Probed.WELL
            worker.trouble = str(error)
            return Probed.MISSED
        if not blames(answer.status):
            return Probed.WELL
        worker.trouble = f"/health answered {answer.status}"
        return Probed.MISSED

    async def _began(self, worker: Worker) -> float | None:
        """When its process did, by its own clock."""
        try:
            answer = await self._get(worker, "/metrics")
        except UntriedError:
            raise
        except KvferryError:
            return None
        found = _BEGAN.search(answer.body) if answer.status == 200 else None
        with contextlib.suppress(ValueError):
            return float(found[1]) if found is not None else None
        return None

    async def _models(self, worker: Worker) -> None:
        """What it does not say stays as it was."""
        try:
            answer = await self._get(worker, "/v1/models")
            models = models_of(answer.body) if answer.status == 200 else None
        except KvferryError as error:
            log.debug("%s", error)
            return
        if models is not None:
            self._roster.learned(worker.url, models)

    async def _get(self, worker: Worker, path: str) -> Answer:
        return await get(worker.url, path, timeout_s=QUESTION_S, headers=self._headers, tls=self._tls)

    def _tell(self, worker: Worker, event: Callable[[Health], Change]) -> None:
        if self._roster.get(worker.url) is worker:  # and not another one in its place
            self._note(worker.url, event)

    def _noticed(self, worker: Worker) -> None:
        wake = self._wakes.get(worker)
        if wake is not None:
            wake.set()
