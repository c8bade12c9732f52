"""A tier that does nothing by itself: what it is asked to do waits until the machine says how it ends."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, TierStatistics


@dataclass(slots=True, eq=False)
class Call:
    """A fetch or store of several items, which are cancelled together."""

    cancelled: bool = False

    def cancel(self) -> None:
        """See the contract."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class Probe:
    """answered: what was said, once it was said."""

    refs: Sequence[PartRef]
    done: Callable[[Sequence[Outcome]], None]
    answered: Sequence[Outcome] | None = None
    turn: int = 0  # which of all answers it was


@dataclass(slots=True, eq=False)
class Fetch:
    """Until ``done`` the tier may write to ``item.into`` at any time."""

    item: FetchItem
    index: int
    call: Call
    done: Callable[[int, FetchResult], None]


@dataclass(slots=True, eq=False)
class Store:
    """Until ``done`` the tier may read ``item.data`` at any time."""

    item: StoreItem
    index: int
    call: Call
    done: Callable[[int, Outcome], None]


@dataclass(slots=True)
class Value:
    """What lies under a key: the name inside its header, its bytes, its checksums."""

    key: PartKey
    data: bytes
    checksums: tuple[bytes, ...]

    def is_whole(self, ref: PartRef) -> bool:
        """As a tier checks it."""
        if self.key != ref.key or len(self.data) != ref.nbytes:
            return False
        return part_checksums(memoryview(self.data)) == self.checksums


@dataclass(slots=True)
class ScriptedTier:
    """Implements ``tiers.contract.Tier``. values: what survives a restart of the node."""

    values: dict[PartKey, Value] = field(default_factory=dict[PartKey, Value])
    name: str = "scripted"
    up: bool = True
    probes: list[Probe] = field(default_factory=list[Probe])
    fetches: list[Fetch] = field(default_factory=list[Fetch])
    answers: int = 0
    stores: list[Store] = field(default_factory=list[Store])
    ended: Counter[Outcome] = field(
        default_factory=Counter[Outcome]
    )  # fetches, those of cancelled calls apart

    # ---- the contract

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""
        del deadline
        self.probes.append(Probe(refs, done))

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Call:
        """See the contract."""
        del deadline
        call = Call()
        for index, item in enumerate(items):
            assert item.into.nbytes == item.ref.nbytes
            assert not any(other.item.ref.key == item.ref.key for other in self.fetches), "a second fetch"
            self.fetches.append(Fetch(item, index, call, done))
        return call

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Call:
        """See the contract."""
        del deadline
        call = Call()
        for index, item in enumerate(items):
            assert item.data.nbytes == item.ref.nbytes
            self.stores.append(Store(item, index, call, done))
        return call

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""
        for ref in refs:
            self.values.pop(ref.key, None)
        if done is not None:
            done([Outcome.OK for _ in refs])

    def statistics(self) -> TierStatistics:
        """See the contract."""
        return TierStatistics(
            name=self.name,
            state="up" if self.up else "down",
            fetched_parts=0,
            fetched_bytes=0,
            stored_parts=0,
            stored_bytes=0,
            missed_parts=0,
            failed={},
            inflight_bytes=0,
            detail={},
        )

    def close(self) -> None:
        """See the contract."""
        self.end_all(Outcome.LATE)

    # ---- the machine's side

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be ended."""
        return not (self.probes or self.fetches or self.stores)

    def answer(self, probe: Probe, odd: Outcome | None, odd_at: int) -> None:
        """Truthfully, but for the part at ``odd_at``, if any is to be, as often as it was asked for."""
        self.probes.remove(probe)
        outcomes = [Outcome.OK if ref.key in self.values else Outcome.MISS for ref in probe.refs]
        if odd is not None and outcomes:
            named = probe.refs[odd_at % len(outcomes)]
            outcomes = [odd if ref == named else seen for ref, seen in zip(probe.refs, outcomes, strict=True)]
        self.answers += 1
        probe.answered, probe.turn = outcomes, self.answers
        probe.done(outcomes)

    def finish(self, fetch: Fetch, ending: Outcome | None) -> None:
        """None: as a working tier does, which copies before it has seen the checksum."""
        self.fetches.remove(fetch)
        ref, into = fetch.item.ref, fetch.item.into
        value = self.values.get(ref.key)
        outcome = ending
        if outcome is None:
            if value is None:
                outcome = Outcome.MISS
            elif value.is_whole(ref):
                outcome = Outcome.OK
                into[:] = value.data
            else:
                outcome = Outcome.CORRUPT
                if len(value.data) == ref.nbytes:
                    into[:] = value.data
                del self.values[ref.key]
        if not (outcome is Outcome.LATE and fetch.call.cancelled):
            self.ended[outcome] += 1
        checksums = value.checksums if outcome is Outcome.OK and value is not None else ()
        fetch.done(fetch.index, FetchResult(outcome, checksums))

    def stored(self, store: Store, ending: Outcome | None) -> None:
        """None: the value lies there now, unless another lay there before."""
        self.stores.remove(store)
        ref = store.item.ref
        if ending is None:
            self.values.setdefault(ref.key, Value(ref.key, bytes(store.item.data), store.item.checksums))
        store.done(store.index, ending or Outcome.OK)

    def damage(self, key: PartKey, how: str) -> None:
        """What lies under that key is not what was stored."""
        value = self.values[key]
        if how == "lost":
            del self.values[key]
        elif how == "cut":
            self.values[key] = replace(value, data=value.data[:100])
        elif how == "flipped":
            self.values[key] = replace(value, data=value.data[:9] + bytes(1) + value.data[10:])
        else:
            self.values[key] = next(iter(self.values.values()))

    def end_all(self, ending: Outcome | None) -> None:
        """Everything that waits, in the order in which it was asked for."""
        for probe in list(self.probes):
            self.answer(probe, ending, 0)
        for fetch in list(self.fetches):
            self.finish(fetch, ending)
        for store in list(self.stores):
            self.stored(store, ending)
