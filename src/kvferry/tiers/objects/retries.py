"""When a request that failed is tried again: a budget for all of them together, and full jitter.

Full jitter: the wait is drawn from zero up to a bound that doubles. The budget grows with every first try and
shrinks with every other, so that a store in trouble gets a tenth more requests and not a multiple.
https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.tiers.objects.bucket import BucketError, Trouble

_T = TypeVar("_T")
BASE_S = 0.05
LONGEST_S = 2.0
FULL_BUDGET = 20.0
EARNED = 0.1
WORTH_ANOTHER = frozenset({Trouble.SLOW_DOWN, Trouble.BROKEN, Trouble.SILENT})


@dataclass(slots=True)
class RetryBudget:
    """tokens: how many tries again may follow at once. spent, refused: since start."""

    tokens: float = FULL_BUDGET
    spent: int = 0
    refused: int = 0

    def earn(self) -> None:
        """A request was tried for the first time."""
        self.tokens = min(FULL_BUDGET, self.tokens + EARNED)

    def spend(self) -> bool:
        """Whether one may be tried again."""
        if self.tokens < 1.0:
            self.refused += 1
            return False
        self.tokens -= 1.0
        self.spent += 1
        return True


@dataclass(slots=True)
class Retries:
    """clock: monotonic seconds. sleep and draw are passed in by tests."""

    clock: Callable[[], float]
    budget: RetryBudget = field(default_factory=RetryBudget)
    draw: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(
        self,
        work: Callable[[float], Awaitable[_T]],
        *,
        limit_s: float,
        give_up_at: float,
        wanted: Callable[[], bool] = lambda: True,
        failed: Callable[[BucketError], None] = lambda error: None,
    ) -> _T:
        """What ``work(limit_s)`` gives, tried until ``give_up_at`` or while it is wanted. BucketError.

        failed: hears of every failure.
        """
        self.budget.earn()
        longest_s = BASE_S
        while True:
            try:
                return await work(max(0.001, min(limit_s, give_up_at - self.clock())))
            except BucketError as error:
                failed(error)
                wait_s = self.draw(0.0, longest_s)
                longest_s = min(2 * longest_s, LONGEST_S)
                worth = error.trouble in WORTH_ANOTHER and self.clock() + wait_s < give_up_at
                if not worth or not wanted() or not self.budget.spend():
                    raise
            await self.sleep(wait_s)
            if not wanted():
                raise BucketError(Trouble.SILENT, "nobody waits for it any more")
