"""Keepers and a node's side of them, over real sockets; what is kept is up to the test."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvferry.addresses import Address
from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.server import Admission, Server
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import WAIT_S
from kvferry.tiers.contract import Dropped, Outcome

NAMESPACE = b"test" + b"k" * 12
ANY_PORT = Address("127.0.0.1", 0)


def some_refs(count: int, *, seed: str = "", parts: int = 1) -> list[PartRef]:
    """Of so many chunks, with so many parts each."""
    chunks = [sha256(f"{seed}/{number}".encode()).digest() for number in range(count)]
    return [
        PartRef(PartKey(NAMESPACE, chunk, part), 1000 + part) for chunk in chunks for part in range(parts)
    ]


class Staging:
    """A stage that the test answers, or nobody."""

    def __init__(self, refs: Sequence[PartRef], done: Callable[[int, Outcome], None]) -> None:
        self.refs = refs
        self.done = done
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeKeeping:
    """Has what the test says; remembers what it was told. held: answer nothing by itself."""

    where: dict[PartRef, Where] = field(default_factory=dict)
    held: bool = False
    told: list[tuple[str, object]] = field(default_factory=list)
    locates: list[tuple[Sequence[PartRef], Callable[[Sequence[Where]], None]]] = field(default_factory=list)
    stages: list[Staging] = field(default_factory=list)
    drops: list[Callable[[Dropped], None]] = field(default_factory=list)

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        self.told.append(("stored", list(zip(refs, positions, likely, strict=True))))

    def used(self, refs: Sequence[PartRef]) -> None:
        self.told.append(("used", list(refs)))

    def remove(self, refs: Sequence[PartRef]) -> None:
        self.told.append(("remove", list(refs)))

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        self.locates.append((refs, done))
        if not self.held:
            done([self.where.get(ref, Where.ABSENT) for ref in refs])

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Staging:
        self.stages.append(Staging(refs, done))
        if not self.held:
            for index, ref in enumerate(refs):
                done(index, Outcome.OK if ref in self.where else Outcome.MISS)
        return self.stages[-1]

    def drop(
        self,
        tier: str,
        *,
        namespace: bytes | None,
        older_than_s: float | None,
        parts: Sequence[PartRef] | None,
        alone: bool,
        done: Callable[[Dropped], None],
    ) -> None:
        del alone
        if parts is not None:
            self.told.append(("drop", (tier, list(parts))))
            done(Dropped(len(parts), sum(ref.nbytes for ref in parts)))
            return
        self.told.append(("drop", (tier, namespace, older_than_s)))
        self.drops.append(done)
        if not self.held:
            done(Dropped(3, 3000))

    def drop_ended(self, namespace: bytes | None) -> None:
        self.told.append(("drop ended", namespace))

    def most_reused(self, *, within_s: float, max_bytes: int, namespace: bytes | None) -> Sequence[PartRef]:
        return list(self.where)


def started(
    keeping: FakeKeeping, admission: Admission | None = None, *, listen: Address = ANY_PORT
) -> Server:
    """A server that serves."""
    server = Server(listen, keeping=keeping, admission=admission or Admission(name="k"), status=lambda: b"{}")
    server.start()
    return server


class Answers:
    """``done`` of a call: what came, and how often."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._changed = threading.Condition()

    def __call__(self, *answer: object) -> None:
        with self._changed:
            self.calls.append(answer)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> "list[tuple[object, ...]]":
        """Once that many have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S), self.calls
            return list(self.calls)
