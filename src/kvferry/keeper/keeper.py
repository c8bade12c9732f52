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
from pathlib import Path

from kvferry.identity.names import PartRef
from kvferry.keeper.below import DELETED, Ask, Below, Held
from kvferry.keeper.buffers import Buffers
from kvferry.keeper.copies import Copies
from kvferry.keeper.deletion import Deletion, Drops
from kvferry.keeper.forms import Form, Plain
from kvferry.keeper.limits import Limits
from kvferry.keeper.reconcile import Reconciler
from kvferry.keeper.remembered import load, save
from kvferry.keeper.reuse import ReuseTable, most_used
from kvferry.keeper.scan import Scanner, ScanSettings
from kvferry.keeper.stager import Done, Stager
from kvferry.keeper.staging import Request
from kvferry.keeper.statistics import KeeperStatistics, StageStatistics, line_statistics
from kvferry.keeper.wire import Where
from kvferry.loop import Loop
from kvferry.tiers.contract import Dropped, LowerTier, Outcome, Tier, Transfer
from kvferry.tiers.valkey.keyspace import Keyspace

log = logging.getLogger("kvferry.keeper")

ANSWER_S = 2.0
"""How long a snapshot waits for the keeper's thread."""
MAX_TOLD_PARTS = 1 << 17
"""Of one kind of message, until they are dealt with: what nodes tell beyond that is dropped."""


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
        keyspace: Keyspace | None = None,
        scan: ScanSettings | None = None,
        uses: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """keyspace: Valkey's keys; None: they are neither searched nor dropped.

        uses: a file in which what was used lately outlives the keeper; None: it does not.
        """
        self._limits = limits or Limits()
        self._valkey = valkey
        self._below = Below(disk=disk, objects=objects, form=form or Plain())
        self._loop = Loop(after_turn=self._pump, clock=clock)
        self._buffers = Buffers(self._limits.shares(objects=objects is not None))
        self._drops = Drops(clock)
        self._copies = Copies(
            loop=self._loop, valkey=valkey, below=self._below, buffers=self._buffers, limits=self._limits
        )
        self._stager = Stager(
            loop=self._loop,
            valkey=valkey,
            below=self._below,
            buffers=self._buffers,
            copies=self._copies,
            dropping=self._drops.among,
            limits=self._limits,
        )
        self._reconciler = Reconciler(
            loop=self._loop,
            below=self._below,
            copies=self._copies,
            dropping=self._drops.among,
            room_parts=self._limits.backlog_parts,
        )
        self._reuse = ReuseTable(self._limits.reused_parts)
        self._uses = uses
        if uses is not None:
            self._reuse.restore(load(uses, clock()))
        self._lock = threading.Lock()  # of the table of uses and the counters
        self._located: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # parts told of and not dealt with, by kind
        self._gate = threading.Lock()  # what was posted before the end is done before the end
        self._closed = False
        self._ending = threading.Event()
        self._scanner = (
            Scanner(keyspace, settings=scan or ScanSettings(), found=self._found) if keyspace else None
        )
        self._deletion = Deletion(
            post=self._post,
            drops=self._drops,
            valkey=valkey,
            below=self._below,
            copies=self._copies,
            stager=self._stager,
            scanner=self._scanner,
        )
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper", daemon=True)
        self._thread.start()
        if self._scanner is not None:
            self._scanner.start()

    # ---- what nodes tell

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in Valkey now. positions: see ``StoreItem``. likely: to be wanted again."""
        with self._lock:
            self._told["stored"] += len(refs)
            self._told["likely"] += sum(likely)
        if any(likely) and self._admit("stored", len(refs)):
            self._post(partial(self._stored, refs, positions, likely))

    def _stored(self, refs: Sequence[PartRef], positions: Sequence[int], likely: Sequence[bool]) -> None:
        self._dealt_with("stored", len(refs))
        going = self._drops.among(refs)
        wanted = [each and ref not in going for ref, each in zip(refs, likely, strict=True)]
        self._copies.stored(refs, positions, wanted)

    def used(self, refs: Sequence[PartRef]) -> None:
        """These were loaded, from whichever tier, the head of the prompt first."""
        with self._lock:
            self._told["used"] += len(refs)
        self._used(refs)

    def _found(self, refs: Sequence[PartRef]) -> None:
        """The scan says that these were used lately."""
        self._used(refs)

    def _used(self, refs: Sequence[PartRef]) -> None:
        if not self._admit("used", len(refs)):
            return
        count = len(refs)
        going = self._drops.among(refs)
        if going:
            refs = [ref for ref in refs if ref not in going]
        with self._lock:
            self._reuse.used(refs, self._loop.clock())

        def looked(held: Sequence[Held]) -> None:
            self._post(partial(self._used_and_looked, refs, held, count))

        self._below.look(refs, deadline=self._loop.clock() + self._limits.ask_s, done=looked, ask=Ask.BOTH)

    def _used_and_looked(self, refs: Sequence[PartRef], held: Sequence[Held], count: int) -> None:
        self._dealt_with("used", count)
        going = self._drops.among(refs)
        self._copies.used(refs, [DELETED if ref in going else at for ref, at in zip(refs, held, strict=True)])

    def _admit(self, kind: str, parts: int) -> bool:
        """Whether so many more may wait; counted as dropped if not."""
        with self._lock:
            fits = self._waiting[kind] + parts <= MAX_TOLD_PARTS
            self._waiting[kind] += parts if fits else 0
            self._told["dropped"] += 0 if fits else parts
            return fits

    def _dealt_with(self, kind: str, parts: int) -> None:
        with self._lock:
            self._waiting[kind] -= parts

    # ---- what they ask

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each is below Valkey. Counts as a use of what is there."""

        going = self._drops.among(refs)

        def looked(held: Sequence[Held]) -> None:
            found = [
                Where.ABSENT if ref in going else _where(each) for ref, each in zip(refs, held, strict=True)
            ]
            with self._lock:
                self._located.update(where.name.lower() for where in found)
            done(found)

        self._below.look(refs, deadline=deadline, done=looked)

    def stage(self, refs: Sequence[PartRef], *, deadline: float, done: Done) -> Transfer:
        """Bring them into Valkey, in this order; ``done`` once per index, by the deadline."""
        asked = _Asked(self._post, self._stager)
        if not self._post(partial(asked.begin, refs, deadline, done)):
            for index in range(len(refs)):
                done(index, Outcome.LATE)
        return asked

    # ---- deletion

    def remove(self, refs: Sequence[PartRef], *, done: Callable[[], None] | None = None) -> None:
        """Delete them in every tier; ``done`` when none has them any more, as far as the tiers know.

        Beyond MAX_TOLD_PARTS that wait: not at all.
        """
        with self._lock:
            self._told["removed"] += len(refs)
            self._reuse.forget(refs)
        ended = done or _nothing
        if not self._admit("removed", len(refs)):
            ended()
            return

        def removed() -> None:
            self._dealt_with("removed", len(refs))
            ended()

        self._deletion.remove(refs, removed)

    def drop(
        self,
        tier: str,
        *,
        namespace: bytes | None,
        older_than_s: float | None,
        parts: Sequence[PartRef] | None = None,
        alone: bool = False,
        done: Callable[[Dropped], None],
    ) -> None:
        """Forget what ``valkey``, ``disk`` or ``objects`` hold: all, a namespace, old parts, or named ones.

        alone: see ``wire.Drop``. Raises RefusedError for a tier that this keeper does not have.
        """
        if parts is not None:
            self._deletion.drop_parts(tier, parts, done)
            return
        self._deletion.drop(tier, namespace=namespace, older_than_s=older_than_s, alone=alone, done=done)
        if older_than_s is None and not alone:
            with self._lock:
                self._reuse.forget_namespace(namespace)

    def drop_ended(self, namespace: bytes | None) -> None:
        """Of a drop that went through several tiers: it may be kept again."""
        self._drops.ended(namespace)

    # ---- about itself

    def most_reused(self, *, within_s: float, max_bytes: int, namespace: bytes | None) -> Sequence[PartRef]:
        """What was used most within so many seconds, of at most so many bytes, most used first."""
        with self._lock:
            uses = self._reuse.all()
        return most_used(
            uses, within_s=within_s, max_bytes=max_bytes, namespace=namespace, now=self._loop.clock()
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
                scan=self._scanner.statistics if self._scanner is not None else None,
                located=dict(self._located),
                told_stored_parts=self._told["stored"],
                told_likely_parts=self._told["likely"],
                told_used_parts=self._told["used"],
                removed_parts=self._told["removed"],
                told_dropped_parts=self._told["dropped"],
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
        if self._scanner is not None:
            self._scanner.close()
        self._loop.post(self._end)
        give_up = time.monotonic() + self._limits.close_s
        self._ending.wait(max(0.0, give_up - time.monotonic()))
        for tier in (self._valkey, self._below.objects, self._below.disk):
            if tier is not None:
                tier.close()
        self._loop.stop()
        self._thread.join()
        self._loop.close()
        if self._uses is not None:
            with self._lock:
                save(self._uses, self._reuse.all(), self._loop.clock())

    # ---- its thread

    def _post(self, call: Callable[[], None]) -> bool:
        """On the keeper's thread, soon; False once it closes."""
        with self._gate:
            if not self._closed:
                self._loop.post(call)
            return not self._closed

    def _run(self) -> None:
        self._loop.post(self._reconciler.begin)
        self._loop.run()

    def _pump(self) -> None:
        self._stager.pump()
        self._copies.pump(waited_for=self._stager.parts > 0)
        if self._closed and not self._copies.running and not self._stager.running:
            self._ending.set()

    def _end(self) -> None:
        self._reconciler.close()
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


def _nothing() -> None:
    """Nobody waits for it."""


def _where(held: Held) -> Where:
    if held.disk is not None:
        return Where.DISK
    if held.objects is not None:
        return Where.OBJECTS
    return Where.UNKNOWN if held.unknown else Where.ABSENT
