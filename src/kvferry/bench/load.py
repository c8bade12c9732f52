"""Load on one replica: many questions at once, timed as a whole."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry.demo.ask import Question, Replica


@dataclass(frozen=True, slots=True)
class Throughput:
    """All tokens, read and written, over the wall time of the batch."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def run_load(replica: Replica, questions: Sequence[Question], *, concurrency: int) -> Throughput:
    """Ask all, ``concurrency`` at a time. Raises what asking raises."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="load") as pool:
        replies = list(pool.map(replica.ask, questions))
    return Throughput(
        seconds=time.perf_counter() - begun,
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        output_tokens=sum(reply.output_tokens for reply in replies),
        reused_tokens=sum(reply.cached_tokens for reply in replies),
    )
