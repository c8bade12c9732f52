"""What the scheduler side needs of whoever answers its lookups, and how long a step waits for an answer."""

import time
from collections.abc import Sequence
from typing import Protocol

from kvferry.client.messages import LookupAnswer, LookupRequest, Report


class Asker(Protocol):
    """What is used of ``SchedulerClient``; nothing here blocks."""

    @property
    def epoch(self) -> int:
        """Of the node that is connected now; 0 for none."""
        ...

    @property
    def followed(self) -> bool:
        """Whether the node tells others what comes here: then ``came`` is of use."""
        ...

    def came(
        self, request_id: str, chunks: Sequence[bytes], *, prompt_tokens: int, engine_tokens: int
    ) -> None: ...
    def lookup(self, request: LookupRequest) -> None: ...
    def poll(self, request_id: str) -> LookupAnswer | None: ...
    def cancel(self, request_id: str) -> None: ...
    def end(self, load_id: int) -> None: ...
    def suspect(self) -> None: ...
    def report(self, report: Report) -> None: ...
    def close(self) -> None: ...


class Patience:
    """A step of an engine that runs nothing may wait a moment for an answer.

    The next step would ask again, at what a step through all workers costs, and the answer of a node that is
    well, or knows that Valkey is not, comes sooner. rested_s: seconds waited so far.
    """

    POLLS = 16  # of one step, however many requests ask
    POLL_S = 0.0001

    def __init__(self) -> None:
        self.rested_s = 0.0
        self._left = self.POLLS

    def renew(self) -> None:
        """A step begins."""
        self._left = self.POLLS

    @property
    def spent(self) -> bool:
        """Whether this step must wait no more."""
        return self._left == 0

    def poll(self, client: Asker, request_id: str) -> LookupAnswer | None:
        """The answer, if it comes while there is patience left."""
        while (answer := client.poll(request_id)) is None and self._left:
            self._left -= 1
            begun = time.perf_counter()
            time.sleep(self.POLL_S)
            self.rested_s += time.perf_counter() - begun
        return answer
