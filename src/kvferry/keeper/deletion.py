"""Deletes parts in a keeper's tiers: named ones, a namespace, what is old.

While a fleet's drop runs none of it may come back from another tier: it goes tier by tier, and what one has
lost could be copied there again from one that still has it. Whoever drops says when all of it has ended.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.errors import RefusedError
from kvferry.identity.names import PartRef
from kvferry.keeper.below import Below
from kvferry.keeper.copies import Copies
from kvferry.keeper.scan import Scanner
from kvferry.keeper.stager import Stager
from kvferry.tiers.contract import Droppable, Dropped, Outcome, Tier

GRACE_S = 330.0
"""Between two tiers of one drop at most: whoever drops waits for the slowest keeper, for minutes.

Whose connection ends in between drops no more: ``requests.py`` says so then.
"""


class Drops:
    """Namespaces that are being dropped; None stands for all. From any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: Counter[bytes | None] = Counter()
        self._until: dict[bytes | None, float] = {}

    def begin(self, namespace: bytes | None) -> None:
        """A drop starts. One of old parts only is none of this: what is used again may come back."""
        with self._lock:
            self._running[namespace] += 1

    def end(self, namespace: bytes | None, *, grace_s: float = GRACE_S) -> None:
        """It is done. grace_s: for so long more it counts as running."""
        now = self._clock()
        with self._lock:
            self._running[namespace] -= 1
            self._running = +self._running
            self._until = {space: until for space, until in self._until.items() if until > now}
            if grace_s:
                self._until[namespace] = now + grace_s

    def ended(self, namespace: bytes | None) -> None:
        """All of its tiers were dropped from, at all keepers: what comes now is new."""
        with self._lock:
            self._until.pop(namespace, None)

    def among(self, refs: Sequence[PartRef]) -> frozenset[PartRef]:
        """Those that are being deleted, and must not come back now."""
        if not self._running and not self._until:
            return frozenset()
        now = self._clock()
        with self._lock:
            going = {*self._running, *(space for space, until in self._until.items() if until > now)}
        return frozenset(ref for ref in refs if None in going or ref.key.namespace in going)


class Deletion:
    """post: onto the keeper's thread, False once it closes; what is called ``..._now`` runs there."""

    def __init__(
        self,
        *,
        post: Callable[[Callable[[], None]], bool],
        drops: Drops,
        valkey: Tier,
        below: Below,
        copies: Copies,
        stager: Stager,
        scanner: Scanner | None,
    ) -> None:
        self._post = post
        self._drops = drops
        self._valkey = valkey
        self._below = below
        self._copies = copies
        self._stager = stager
        self._scanner = scanner
        self._lock = threading.Lock()
        self._removals: list[tuple[Sequence[PartRef], Callable[[], None]]] = []  # that the next turn does

    def remove(self, refs: Sequence[PartRef], done: Callable[[], None]) -> None:
        """In every tier; ``done`` when none has them any more, as far as the tiers know."""
        with self._lock:
            self._removals.append((refs, done))
            if len(self._removals) > 1:
                return  # who came first has asked for a turn
        if not self._post(self._remove_now):
            self._take_removals()[1]()

    def drop_parts(self, tier: str, refs: Sequence[PartRef], done: Callable[[Dropped], None]) -> None:
        """In one tier. Raises RefusedError for a tier that this keeper does not have."""
        target = {"valkey": self._valkey, "disk": self._below.disk, "objects": self._below.objects}.get(tier)
        if target is None:
            raise _no_such_tier(tier)
        if not self._post(partial(self._drop_parts_now, tier, target, refs, done)):
            done(Dropped(0, 0, Outcome.LATE))

    def drop(
        self,
        tier: str,
        *,
        namespace: bytes | None,
        older_than_s: float | None,
        alone: bool = False,
        done: Callable[[Dropped], None],
    ) -> None:
        """All of a tier, of a namespace, or what is old. RefusedError as above; alone: ``wire.Drop``."""
        target = self._droppable(tier)
        whole = older_than_s is None
        if whole:
            self._drops.begin(namespace)

        def ended(dropped: Dropped) -> None:
            if whole:
                self._drops.end(namespace, grace_s=0.0 if alone else GRACE_S)
            done(dropped)

        def begin() -> None:
            if whole:
                self._forget_now(tier, lambda ref: namespace in (None, ref.key.namespace))
            target.drop(namespace=namespace, older_than_s=older_than_s, done=ended)

        if not self._post(begin):
            ended(Dropped(0, 0, Outcome.LATE))

    def _droppable(self, tier: str) -> Droppable | Scanner:
        tiers: dict[str, Droppable | Scanner | None] = {
            "valkey": self._scanner,
            "disk": self._below.disk,
            "objects": self._below.objects,
        }
        found = tiers.get(tier)
        if found is None:
            raise _no_such_tier(tier)
        return found

    def _forget_now(self, tier: str, unwanted: Callable[[PartRef], bool]) -> None:
        """What is under way to that tier does not stay there."""
        if tier == "valkey":
            self._stager.forget(unwanted)
        else:
            self._copies.forget(unwanted, tier=tier)

    def _drop_parts_now(
        self, tier: str, target: Tier, refs: Sequence[PartRef], done: Callable[[Dropped], None]
    ) -> None:
        keys = frozenset(ref.key for ref in refs)
        if tier == "valkey":
            self._stager.forget_named(keys)
        else:
            self._copies.forget_named(keys, tier=tier)
        names = refs if tier == "valkey" else self._names(refs)

        def ended(outcomes: Sequence[Outcome]) -> None:
            gone = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK]
            bad = [outcome for outcome in outcomes if outcome not in (Outcome.OK, Outcome.MISS)]
            done(Dropped(len(gone), sum(name.nbytes for name in gone), bad[0] if bad else Outcome.OK))

        target.remove(names, done=ended)

    def _take_removals(self) -> tuple[list[PartRef], Callable[[], None]]:
        """All that was asked for meanwhile, as one."""
        with self._lock:
            taken, self._removals = self._removals, []

        def done() -> None:
            for _, each in taken:
                each()

        return list(dict.fromkeys(ref for refs, _ in taken for ref in refs)), done

    def _remove_now(self) -> None:
        refs, done = self._take_removals()
        keys = frozenset(ref.key for ref in refs)
        self._copies.forget_named(keys)
        self._stager.forget_named(keys)
        lower = (self._below.objects, self._below.disk)
        targets: list[tuple[Tier, Sequence[PartRef]]] = [
            (tier, self._names(refs)) for tier in lower if tier is not None
        ]
        targets.append((self._valkey, refs))
        left = len(targets)
        lock = threading.Lock()

        def ended(outcomes: Sequence[Outcome]) -> None:
            nonlocal left
            del outcomes
            with lock:
                left -= 1
                last = not left
            if last:
                done()

        for tier, names in targets:
            tier.remove(names, done=ended)

    def _names(self, refs: Sequence[PartRef]) -> list[PartRef]:
        return [name for ref in refs for name in self._below.form.names(ref)]


def _no_such_tier(tier: str) -> RefusedError:
    return RefusedError(f"this keeper has no tier {tier!r} to drop from")
