"""The class that LMCache's ``plugin`` L2 adapter loads.

Objects go between LMCache's own memory and the Valkey tier's sockets, with no copy between. No exception
leaves a method that LMCache's controllers call: they would lose the request or the locks that it holds.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvferry.engines.lmcache.batches import Batch
from kvferry.engines.lmcache.books import Change, Holdings, Locks
from kvferry.engines.lmcache.compat import engine_format
from kvferry.engines.lmcache.link import Link, connect
from kvferry.engines.lmcache.memory import Layouts, advise_huge_pages, tensors_layout, view
from kvferry.engines.lmcache.names import Layout, Names
from kvferry.engines.lmcache.outbox import Outbox
from kvferry.engines.lmcache.settings import AdapterSettings, parse_settings
from kvferry.errors import KvferryError
from kvferry.identity.domain import DomainKey
from kvferry.identity.names import PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.tiers.contract import FetchItem, Outcome, StoreItem, Tier

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

DELETE_S = 10.0
"""How long LMCache's eviction waits for a removal."""
# Deadlines are for a task of usual size; a large one gets more time. A server that is silent ends both alike.
STRIPE_S = 1e-4
LOADED_BYTES_S = 500e6
STORED_BYTES_S = 100e6
MAX_LEARNT = 4096
MAX_COMPLAINTS = 32
_log = logging.getLogger("kvferry.lmcache")


class KvferryL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See LMCache's ``L2AdapterInterface``. Thread-safe.

    A lock keeps this server's own eviction off an object; Valkey evicts by recency, which a look-up renews.
    What Valkey gives up in spite of it is a load that fails for that object alone.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        l1_memory_desc: "L1MemoryDesc | None" = None,
        connect: Callable[[AdapterSettings], Tier] = connect,
    ) -> None:
        """params: LMCache's ``adapter_params``. Raises MisconfiguredError, one line, for what cannot work.

        A Valkey that does not answer yet is no such thing: until it does, everything is a miss.
        """
        settings = parse_settings(params)
        key = DomainKey.load(settings.domain, key_file=settings.domain_key_file)
        names = Names(
            settings.domain,
            key,
            engine_format=engine_format(version("lmcache")),
            weights=settings.weights,
            serde=settings.serde,
        )
        super().__init__(max_capacity_bytes=settings.capacity_bytes)
        self._settings = settings
        self._names = names
        self._layouts = Layouts()
        self._learnt: dict[tuple[str, int, int], Layout] = {}
        self._holdings: Holdings[ObjectKey] = Holdings()
        self._locks: Locks[ObjectKey] = Locks()
        self._complaints: set[str] = set()
        self._tasks = itertools.count()
        self._closing = threading.Lock()
        self._link = Link(partial(connect, settings))
        self._stores: Outbox[L2StoreResult] = Outbox()
        self._lookups: Outbox[Bitmap] = Outbox()
        self._loads: Outbox[Bitmap] = Outbox()
        if l1_memory_desc is not None:
            advise_huge_pages(l1_memory_desc.ptr, l1_memory_desc.size)

    def get_store_event_fd(self) -> int:
        """See the interface."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """See the interface."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """See the interface."""
        return self._loads.fd

    def submit_store_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """See the interface. What is there already, by whomever it was stored, is not sent again."""
        task = next(self._tasks)
        outcomes = [Outcome.REFUSED] * len(keys)
        sizes = [0] * len(keys)

        def ended(outcomes: Sequence[Outcome]) -> None:
            stored = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            whole = len(stored) == len(keys)
            try:
                self._account_stored([keys[place] for place in stored], [sizes[place] for place in stored])
            finally:
                self._stores.put(task, L2StoreResult(whole, sum(sizes) if whole else 0))

        def start(tier: Tier, deadline: float) -> None:
            items: list[StoreItem] = []
            places: list[int] = []
            for place, ref, memory in self._parts(keys, objects):
                items.append(StoreItem(ref, memory, (), position=place))
                places.append(place)
                sizes[place] = ref.nbytes
            if items:
                deadline += sum(sizes) / STORED_BYTES_S
                tier.store(items, deadline=deadline, done=Batch(outcomes, places, ended).done)
            else:
                ended(outcomes)

        self._start(start, self._settings.store_s, otherwise=lambda: ended(outcomes))
        return task

    def pop_completed_store_tasks(self) -> "dict[int, L2StoreResult]":
        """See the interface."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: "list[ObjectKey]", group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        """See the interface. An object of which only some stripes are left counts as absent."""
        task = next(self._tasks)
        outcomes = [Outcome.MISS] * len(keys)

        def ended(outcomes: Sequence[Outcome]) -> None:
            found = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            self._locks.lock([keys[place] for place in found], time.monotonic())
            self._lookups.put(task, _bitmap(len(keys), found))

        def start(tier: Tier, deadline: float) -> None:
            layouts = _layouts(group_layout_descs)
            refs: list[PartRef] = []
            places: list[int] = []
            for place, key in enumerate(keys):
                ref = self._names.head(key, layouts.get(key.object_group_id) or self._learnt.get(_kind(key)))
                if ref is not None:
                    refs.append(ref)
                    places.append(place)
            if refs:
                deadline += STRIPE_S * sum(len(stripe_plan(ref.nbytes)) for ref in refs)
                tier.probe(refs, deadline=deadline, done=Batch(outcomes, places, ended).probed)
            else:
                ended(outcomes)

        self._start(start, self._settings.lookup_s, otherwise=lambda: ended(outcomes))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """See the interface."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: "list[ObjectKey]") -> None:
        """See the interface."""
        self._locks.unlock(keys)

    def submit_load_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """See the interface. An object counts as loaded once its checksum was found right in place."""
        task = next(self._tasks)
        outcomes = [Outcome.MISS] * len(keys)

        def ended(outcomes: Sequence[Outcome]) -> None:
            loaded = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            self._loads.put(task, _bitmap(len(keys), loaded))
            self._notify_keys_accessed([keys[place] for place in loaded])
            lost = [keys[p] for p, o in enumerate(outcomes) if o in (Outcome.MISS, Outcome.CORRUPT)]
            self._account_gone(lost)

        def start(tier: Tier, deadline: float) -> None:
            items: list[FetchItem] = []
            places: list[int] = []
            for place, ref, memory in self._parts(keys, objects):
                items.append(FetchItem(ref, memory))
                places.append(place)
            if items:
                deadline += sum(item.ref.nbytes for item in items) / LOADED_BYTES_S
                tier.fetch(items, deadline=deadline, done=Batch(outcomes, places, ended).fetched)
            else:
                ended(outcomes)

        self._start(start, self._settings.load_s, otherwise=lambda: ended(outcomes))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """See the interface."""
        return self._loads.take(task_id)

    def delete(self, keys: "list[ObjectKey]") -> None:
        """See the interface. Waits, but not for ever; what is locked stays, and is asked for again."""
        now = time.monotonic()
        wanted = [key for key in keys if not self._locks.locked(key, now)]
        removed = threading.Event()
        outcomes: list[Outcome] = []

        def ended(found: Sequence[Outcome]) -> None:
            outcomes.extend(found)
            removed.set()

        def start(tier: Tier, deadline: float) -> None:
            del deadline
            refs = [self._known(key) for key in wanted]
            tier.remove([ref for ref in refs if ref is not None], done=ended)

        if wanted:
            self._start(start, DELETE_S, otherwise=removed.set)
            if not removed.wait(DELETE_S):
                _log.warning("%d objects were not removed within %.0f s", len(wanted), DELETE_S)
                return
            if outcomes and all(outcome in (Outcome.OK, Outcome.MISS) for outcome in outcomes):
                self._account_gone(wanted)

    def report_status(self) -> dict[str, Any]:
        """See the interface. A Valkey that is down makes no LMCache server unhealthy: it serves without."""
        tier = self._link.tier
        status: dict[str, Any] = {"is_healthy": True, "type": "kvferry"}
        if tier is None:
            return status | {"state": "down", "detail": {"connection": self._link.complaint}}
        found = tier.statistics()
        return status | {
            "state": found.state,
            "detail": dict(found.detail),
            "loaded_objects": found.fetched_parts,
            "loaded_bytes": found.fetched_bytes,
            "stored_objects": found.stored_parts,
            "stored_bytes": found.stored_bytes,
            "missed_objects": found.missed_parts,
            "failed": dict(found.failed),
            "inflight_bytes": found.inflight_bytes,
        }

    def close(self) -> None:
        """See the interface. No thread touches LMCache's memory once it returns."""
        with self._closing:
            self._link.close()
            for outbox in (self._stores, self._lookups, self._loads):
                outbox.close()

    def _start(
        self, start: Callable[[Tier, float], None], within_s: float, *, otherwise: Callable[[], None]
    ) -> None:
        """Start work in the tier. Where there is none, or the start fails, ``otherwise`` ends the task."""
        tier = self._link.tier
        if tier is None:
            otherwise()
            return
        try:
            start(tier, time.monotonic() + within_s)
        except Exception as error:  # noqa: BLE001 - LMCache's controllers take no exception
            _log.debug("a task could not be started", exc_info=True)
            self._complain(f"a task could not be started: {type(error).__name__}: {error}")
            otherwise()

    def _parts(
        self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]"
    ) -> list[tuple[int, PartRef, memoryview]]:
        """(place, name and memory) of the objects that can be stored; the rest are told of once."""
        found: list[tuple[int, PartRef, memoryview]] = []
        for place, (key, thing) in enumerate(zip(keys, objects, strict=True)):
            try:
                layout = self._layouts.of(thing)
                found.append((place, self._names.ref(key, layout), view(thing, layout.nbytes)))
            except KvferryError as error:
                self._complain(f"not stored or loaded: {error}")
                continue
            self._learn(key, layout)
        return found

    def _complain(self, message: str) -> None:
        """Once for each thing that is wrong, since there may be thousands of objects with it."""
        if message not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add(message)
            _log.warning("%s", message)

    def _learn(self, key: "ObjectKey", layout: Layout) -> None:
        """For who asks without telling a layout."""
        kind = _kind(key)
        if self._learnt.get(kind) is not layout:
            if len(self._learnt) >= MAX_LEARNT:
                self._learnt.clear()
            self._learnt[kind] = layout

    def _known(self, key: "ObjectKey") -> PartRef | None:
        layout = self._learnt.get(_kind(key))
        return self._names.ref(key, layout) if layout is not None else None

    def _account_stored(self, keys: "list[ObjectKey]", sizes: list[int]) -> None:
        if keys:
            added, forgotten = self._holdings.stored(keys, sizes)
            self._notify_keys_stored(added.keys, added.sizes)
            self._tell_gone(forgotten)

    def _account_gone(self, keys: "list[ObjectKey]") -> None:
        if keys:
            self._tell_gone(self._holdings.gone(keys))

    def _tell_gone(self, change: "Change[ObjectKey]") -> None:
        if change.keys:
            self._notify_keys_deleted(change.keys, change.sizes)


def _kind(key: "ObjectKey") -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _layouts(descs: "Mapping[int, MemoryLayoutDesc]") -> dict[int, Layout]:
    """Of the groups whose layout is told."""
    return {group: tensors_layout(desc.shapes, desc.dtypes) for group, desc in descs.items() if desc.shapes}


def _bitmap(size: int, places: Sequence[int]) -> Bitmap:
    bitmap = Bitmap(size)
    bitmap.batched_set(places)
    return bitmap
