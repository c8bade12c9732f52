"""A keeper: what is worth keeping goes from Valkey to a disk and to objects, and comes back when asked for.

One thread decides; the tiers' threads move bytes. Every method may be called from any thread and returns at
once; ``done`` is called on the keeper's or a tier's thread.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.errors import RefusedError
from kvferry.identity.names import PartRef
from kvferry.keeper.below import Below, Held, LowerTier
from kvferry.keeper.buffers import Buffers
from kvferry.keeper.copies import Copies
from kvferry.keeper.drops import Drops
from kvferry.keeper.forms import Form, Plain
from kvferry.keeper.limits import Limits
from kvferry.keeper.reuse import ReuseTable
from kvferry.keeper.stager import Done, Stager
from kvferry.keeper.staging import Request
from kvferry.keeper.statistics import KeeperStatistics, StageStatistics, line_statistics
from kvferry.keeper.wire import Where
from kvferry.loop import Loop
from kvferry.tiers.contract import Droppable, Dropped, Outcome, Tier, Transfer

log = logging.getLogger("kvferry.keeper")

ANSWER_S = 2.0
"""How long a snapshot waits for the keeper's thread."""


class Keeper:
    """Implements ``requests.Keeping``. The tiers are its own from now on: ``close`` closes them.

    valkey: with ``AsStored`` protection where ``form`` is ``Sealed``. disk, objects: at least one.
    """

    def __init__(
        self,
        *,
        valkey: Tier,
        disk: LowerTier | None,
        objects: LowerTier | None,
        limits: Limits | None = None,
        form: Form | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or Limits()
        self._valkey = valkey
        self._below = Below(disk=disk, objects=objects, form=form or Plain())
        self._loop = Loop(after_turn=self._pump, clock=clock)
        self._buffers = Buffers(self._limits.shares(objects=objects is not None))
        self._copies = Copies(
            loop=self._loop, valkey=valkey, below=self._below, buffers=self._buffers, limits=self._limits
        )
        self._stager = Stager(
            loop=self._loop,
            valkey=valkey,
            below=self._below,
            buffers=self._buffers,
            copies=self._copies,
            limits=self._limits,
        )
        self._reuse = ReuseTable(self._limits.reused_parts)
        self._drops = Drops()
        self._lock = threading.Lock()  # of the table of uses, the drops and the counters
        self._located: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._gate = threading.Lock()  # what was posted before the end is done before the end
        self._closed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper", daemon=True)
        self._thread.start()

    # ---- what nodes tell

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in Valkey now. positions: see ``StoreItem``. likely: to be wanted again."""
        with self._lock:
            self._told["stored"] += len(refs)
            self._told["likely"] += sum(likely)
            dropping = self._dropping(refs)
        likely = [wanted and ref not in dropping for ref, wanted in zip(refs, likely, strict=True)]
        if any(likely):
            self._post(partial(self._copies.stored, refs, positions, likely))

    def used(self, refs: Sequence[PartRef]) -> None:
        """These were loaded, from whichever tier, the head of the prompt first."""
        with self._lock:
            self._told["used"] += len(refs)
            self._reuse.used(refs, self._loop.clock())
            dropping = self._dropping(refs)
        if dropping:
            refs = [ref for ref in refs if ref not in dropping]

        def looked(held: Sequence[Held]) -> None:
            self._post(partial(self._copies.used, refs, held))

        self._below.look(refs, deadline=self._loop.clock() + self._limits.ask_s, done=looked, everywhere=True)

    # ---- what they ask

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each is below Valkey. Counts as a use of what is there."""

        with self._lock:
            dropping = self._dropping(refs)

        def looked(held: Sequence[Held]) -> None:
            found = [
                Where.ABSENT if ref in dropping else _where(each)
                for ref, each in zip(refs, held, strict=True)
            ]
            with self._lock:
                self._located.update(where.name.lower() for where in found)
            done(found)

        self._below.look(refs, deadline=deadline, done=looked)

    def stage(self, refs: Sequence[PartRef], *, deadline: float, done: Done) -> Transfer:
        """Bring them into Valkey, in this order; ``done`` once per index, by the deadline."""
        asked = _Asked(self._post, self._stager)
        with self._lock:
            dropping = self._dropping(refs)
        if dropping:
            refs, done = _without(refs, dropping, done)
        if not self._post(partial(asked.begin, refs, deadline, done)):
            for index in range(len(refs)):
                done(index, Outcome.LATE)
        return asked

    # ---- deletion

    def remove(self, refs: Sequence[PartRef], *, done: Callable[[], None] | None = None) -> None:
        """Delete them in every tier; ``done`` when none has them any more, as far as the tiers know."""
        going = frozenset(ref.key for ref in refs)
        with self._lock:
            self._told["removed"] += len(refs)
            self._reuse.forget(refs)

        def begin() -> None:
            self._copies.forget(lambda ref: ref.key in going)
            self._stager.forget(lambda ref: ref.key in going)
            self._remove_all(refs, done)

        if not self._post(begin) and done is not None:
            done()

    def _remove_all(self, refs: Sequence[PartRef], done: Callable[[], None] | None) -> None:
        names = [name for ref in refs for name in self._below.form.names(ref)]
        lower = (self._below.objects, self._below.disk)
        targets: list[tuple[Tier, Sequence[PartRef]]] = [(tier, names) for tier in lower if tier is not None]
        targets.append((self._valkey, refs))
        left = len(targets)
        lock = threading.Lock()

        def ended(outcomes: Sequence[Outcome]) -> None:
            nonlocal left
            del outcomes
            with lock:
                left -= 1
                last = not left
            if last and done is not None:
                done()

        for tier, some in targets:
            tier.remove(some, done=ended)

    def drop(
        self,
        tier: str,
        *,
        namespace: bytes | None,
        older_than_s: float | None,
        done: Callable[[Dropped], None],
    ) -> None:
        """Forget what ``valkey``, ``disk`` or ``objects`` hold: all, of a namespace, or what is old.

        Raises RefusedError for a tier that this keeper does not have.
        """
        target = self._droppable(tier)
        whole = older_than_s is None
        if whole:
            with self._lock:
                self._drops.begin(namespace)
                self._reuse.forget_namespace(namespace)

        def ended(dropped: Dropped) -> None:
            if whole:
                with self._lock:
                    self._drops.end(namespace, self._loop.clock())
            done(dropped)

        def begin() -> None:
            if whole:
                self._forget_namespace(tier, namespace)
            target.drop(namespace=namespace, older_than_s=older_than_s, done=ended)

        if not self._post(begin):
            ended(Dropped(0, 0, Outcome.LATE))

    def _droppable(self, tier: str) -> Droppable:
        found = {"disk": self._below.disk, "objects": self._below.objects}.get(tier)
        if found is None:
            raise RefusedError(f"this keeper has no tier {tier!r} to drop from")
        return found

    def _forget_namespace(self, tier: str, namespace: bytes | None) -> None:
        def unwanted(ref: PartRef) -> bool:
            return namespace is None or ref.key.namespace == namespace

        if tier == "valkey":
            self._stager.forget(unwanted)
        else:
            self._copies.forget(unwanted, tier=tier)

    def _dropping(self, refs: Sequence[PartRef]) -> frozenset[PartRef]:
        """Those that are being deleted. Under the lock."""
        now = self._loop.clock()
        going = {space for space in {ref.key.namespace for ref in refs} if self._drops.covers(space, now)}
        return frozenset(ref for ref in refs if ref.key.namespace in going) if going else frozenset()

    # ---- about itself

    def most_reused(self, *, within_s: float, max_bytes: int, namespace: bytes | None) -> Sequence[PartRef]:
        """What was used most within so many seconds, of at most so many bytes, most used first."""
        with self._lock:
            return self._reuse.most(
                within_s=within_s, max_bytes=max_bytes, namespace=namespace, now=self._loop.clock()
            )

    def statistics(self) -> KeeperStatistics:
        """A snapshot; waits for the keeper's thread, never for I/O."""
        answer: list[KeeperStatistics] = []
        ready = threading.Event()

        def take() -> None:
            answer.append(self._snapshot())
            ready.set()

        if self._post(take) and ready.wait(ANSWER_S):
            return answer[0]
        return self._snapshot()  # it ends, or hangs: what can be read without it

    def _snapshot(self) -> KeeperStatistics:
        now = self._loop.clock()
        counts = self._stager.counts
        stages = StageStatistics(
            requests=self._stager.requests,
            parts=self._stager.parts,
            running=self._stager.running,
            asked=counts.requests,
            joined_parts=counts.joined,
            promoted_parts=counts.promoted,
            staged_parts=dict(counts.parts),
            staged_bytes=dict(counts.nbytes),
            outcomes=dict(counts.outcomes),
        )
        tiers = (self._valkey, self._below.disk, self._below.objects)
        with self._lock:
            return KeeperStatistics(
                stages=stages,
                keep=line_statistics(self._copies.keep, now),
                flush=line_statistics(self._copies.flush, now),
                scan=None,
                located=dict(self._located),
                told_stored_parts=self._told["stored"],
                told_likely_parts=self._told["likely"],
                told_used_parts=self._told["used"],
                removed_parts=self._told["removed"],
                reused_parts=len(self._reuse),
                buffer_bytes=self._buffers.used_bytes,
                buffer_limit_bytes=self._buffers.limit_bytes,
                defects=self._loop.defects,
                tiers=tuple(tier.statistics() for tier in tiers if tier is not None),
            )

    def close(self) -> None:
        """Answer everybody, give what is on its way to objects a moment, and close the tiers. Idempotent."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._loop.post(self._end)
        give_up = time.monotonic() + self._limits.close_s
        self._ending.wait(max(0.0, give_up - time.monotonic()))
        for tier in (self._valkey, self._below.objects, self._below.disk):
            if tier is not None:
                tier.close()
        self._loop.stop()
        self._thread.join()
        self._loop.close()

    # ---- its thread

    def _post(self, call: Callable[[], None]) -> bool:
        """On the keeper's thread, soon; False once it closes."""
        with self._gate:
            if not self._closed:
                self._loop.post(call)
            return not self._closed

    def _run(self) -> None:
        self._loop.run()

    def _pump(self) -> None:
        self._stager.pump()
        self._copies.pump(waited_for=self._stager.parts > 0)
        if self._closed and not self._copies.running and not self._stager.running:
            self._ending.set()

    def _end(self) -> None:
        self._copies.close()
        self._stager.close()


class _Asked:
    """A ``contract.Transfer`` for a stage."""

    def __init__(self, post: Callable[[Callable[[], None]], bool], stager: Stager) -> None:
        self._post = post
        self._stager = stager
        self._request: Request | None = None

    def begin(self, refs: Sequence[PartRef], deadline: float, done: Done) -> None:
        """On the keeper's thread."""
        self._request = self._stager.stage(refs, deadline=deadline, done=done)

    def cancel(self) -> None:
        """See the contract."""
        self._post(self._cancel)

    def _cancel(self) -> None:
        if self._request is not None:
            self._stager.cancel(self._request)


def _without(refs: Sequence[PartRef], dropping: frozenset[PartRef], done: Done) -> tuple[list[PartRef], Done]:
    """Those that are being deleted are answered now, and the others keep their indexes."""
    places = [index for index, ref in enumerate(refs) if ref not in dropping]
    for index, ref in enumerate(refs):
        if ref in dropping:
            done(index, Outcome.MISS)

    def renumbered(index: int, outcome: Outcome) -> None:
        done(places[index], outcome)

    return [refs[index] for index in places], renumbered


def _where(held: Held) -> Where:
    if held.disk is not None:
        return Where.DISK
    if held.objects is not None:
        return Where.OBJECTS
    return Where.UNKNOWN if held.unknown else Where.ABSENT
