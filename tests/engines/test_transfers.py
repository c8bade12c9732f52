"""The copying threads alone: what they touch, and for how long."""

import threading
from collections.abc import Sequence

from kvferry.client.messages import LoadTicket, ReservedSlot, ReserveOutcome
from kvferry.engines.vllm.copy import Fence
from kvferry.engines.vllm.messages import SaveChunk, SaveResult, SaveSpec, WorkerPart
from kvferry.engines.vllm.transfers import SaveJob, Saver, Stream

PART_BYTES = 64
CHUNKS = 5
WAIT_S = 20.0


class Copier:
    """Writes ones; remembers the parts it wrote."""

    block_bytes = PART_BYTES

    def __init__(self) -> None:
        self.written = 0

    def fence(self) -> None:
        """Nothing to wait for."""

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: Fence | None) -> None:
        """Not used here."""

    def save(self, blocks: Sequence[int], part: memoryview, *, after: Fence | None) -> None:
        part[:] = bytes([1]) * len(part)
        self.written += 1

    def close(self) -> None:
        """Nothing to release."""


class LostStore:
    """A store whose connection is lost after some publications."""

    def __init__(self, *, publications: int) -> None:
        self.memory = [bytearray(PART_BYTES) for _ in range(CHUNKS)]
        self._left = publications
        self.abandoned: list[bytes] = []

    def load(self, ticket: LoadTicket) -> Stream:
        raise NotImplementedError

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        return [
            ReservedSlot(at, digest, ReserveOutcome.RESERVED, memoryview(memory))
            for at, (digest, memory) in enumerate(zip(wanted, self.memory, strict=True))
        ]

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        self._left -= 1
        return self._left >= 0

    def abandon(self, part: int, digests: Sequence[bytes]) -> None:
        self.abandoned += digests

    def close(self) -> None:
        """Nothing to close."""


def test_once_a_publication_did_not_leave_no_other_slot_of_that_save_is_written() -> None:
    """The node gives the slots of a lost connection to others: a writer must not go on with them."""
    copier, store = Copier(), LostStore(publications=2)
    results: list[SaveResult] = []
    done = threading.Event()

    def on_done(result: SaveResult) -> None:
        results.append(result)
        done.set()

    saver = Saver(on_thread_start=lambda: None, on_done=on_done)
    chunks = tuple(SaveChunk(at, bytes([at]) * 32, (at,)) for at in range(CHUNKS))
    saver.submit(SaveJob(SaveSpec(1, (), chunks), store, copier, WorkerPart(0, 1), 0, None))
    assert done.wait(WAIT_S)
    saver.close()
    assert results == [SaveResult(1, tuple(chunk.digest for chunk in chunks[:2]), CHUNKS - 2, 2 * PART_BYTES)]
    assert copier.written == 3
    assert store.memory[3:] == [bytearray(PART_BYTES)] * 2
