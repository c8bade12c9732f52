"""Feeds damaged inputs to the decoders, each within bounds of time and memory."""

import contextlib
import random
import signal
import time
import tracemalloc
from collections.abc import Iterator
from types import FrameType

from tests.fuzz.mutate import mutate
from tests.fuzz.subjects import Subject

CPU_S = 5.0
"""CPU time that a batch may take: hundreds of times what any needs."""
BATCH = 500
MEASURED_EVERY = 20


class BoundError(AssertionError):
    """An input took more than it may."""


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """Raises in the main thread when the timer that is set inside runs out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise BoundError(f"too much CPU time for {BATCH} small inputs")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(subject: Subject, *, seed: int, inputs: int, cpu_s: float = CPU_S) -> int:
    """Feed ``inputs`` inputs; the number fed. Raises AssertionError with the input that broke a property."""
    rng = random.Random(f"{subject.name} {seed}")
    for data in subject.seeds:
        _feed(subject, data)
    with _stopped():
        for number in range(inputs):
            if number % BATCH == 0:
                signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
            data = mutate(rng, subject.seeds)
            if number % MEASURED_EVERY:
                _feed(subject, data)
            else:
                _measured(subject, data)
    return inputs


def _feed(subject: Subject, data: bytes) -> None:
    try:
        subject.feed(data)
    except BaseException as error:
        raise AssertionError(
            f"{subject.name}: {type(error).__name__}: {error}; reproduce with feed({data!r})"
        ) from error


def _measured(subject: Subject, data: bytes) -> None:
    tracemalloc.start()
    try:
        _feed(subject, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > subject.memory_bytes + 100 * len(data):
        raise BoundError(f"{subject.name}: {peak} bytes were allocated for feed({data!r})")


def timed(subject: Subject, *, seed: int, inputs: int) -> tuple[int, float]:
    """The same, and the seconds it took."""
    began = time.monotonic()
    return fuzz(subject, seed=seed, inputs=inputs), time.monotonic() - began
