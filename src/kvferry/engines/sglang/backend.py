"""The class that SGLang's dynamic loader takes for ``--hicache-storage-backend dynamic``.

SGLang calls it from three threads of its own in every rank: one looks, one loads, one stores. Nothing is
raised there, whatever a node does, and every call is bounded.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.version import __version__ as installed_version

from kvferry.config import client_token
from kvferry.engines.sglang.facts import check_version, engine_facts, pool_facts, shared_by_ranks
from kvferry.engines.sglang.guard import Guard, guarded
from kvferry.engines.sglang.hits import MAX_QUESTIONS, Policy, SidePool, fold
from kvferry.engines.sglang.identity import Identity, PoolFacts
from kvferry.engines.sglang.keys import PageNames
from kvferry.engines.sglang.pages import describe
from kvferry.engines.sglang.pools import Ends, Moved, StoredPool
from kvferry.engines.sglang.settings import parse_settings
from kvferry.engines.sglang.stores import PageStore, open_store
from kvferry.engines.sglang.updates import watch
from kvferry.errors import MisconfiguredError

CONNECT_S = 1.0  # waited for at start-up, to say whether there is a node
QUERY_S = 1.0  # for all questions of one query, the first excepted; a prefix not found by then is not offered
MAX_SAMPLES = 4096  # between two questions of SGLang's metrics
_KV = str(PoolName.KV)
_WINDOWS = ("swa", "_state")  # how the names of pools end that hold windows of pages
_log = logging.getLogger("kvferry.sglang")


def _all_false(_: Any, keys: Sequence[str], *args: Any, **kwargs: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of(_: Any, transfers: Sequence[PoolTransfer], *args: Any, **kwargs: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KvferryStorage(HiCacheStorage):  # type: ignore[misc]
    """See SGLang's ``HiCacheStorage``. One object per rank.

    Raises MisconfiguredError when it is made or is shown a pool, for what a person must mend. A node that is
    absent is no such thing: until there is one, everything is a miss.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,
        *,
        open_store: Callable[..., PageStore] = open_store,
    ) -> None:
        del kwargs
        self.guard = Guard()
        check_version(installed_version)
        self._config = storage_config
        self._settings = parse_settings(storage_config.extra_config or {})
        self._token = client_token(self._settings.token_file)
        self._identity = Identity(self._settings, engine_facts(installed_version))
        self._updated = watch()
        self._open_store = open_store
        self._lock = threading.Lock()
        self._pools: dict[str, StoredPool] = {}
        self._closed = False
        self._page_tokens = 0
        self._generation = ""
        self._samples: dict[str, list[Moved]] = {"prefetch": [], "backup": []}

    def may_serve(self) -> bool:
        """See ``guard.Guarded``. What was stored before a change of weights must not be mixed with them."""
        if self._updated.is_set():
            self.guard.turn_off("the weights were changed while the engine runs; restart it to store again")
        return not self.guard.off and not self._closed

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV pages themselves."""
        super().register_mem_pool_host(mem_pool_host)
        self._page_tokens = int(mem_pool_host.page_size)
        self._add(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it, or the same once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Say once how it stands."""
        pool = self._pools.get(_KV)
        if pool is None:
            return
        if pool.store.wait_connected(CONNECT_S):
            _log.info("kvferry: pages of %d tokens, node at %s", self._page_tokens, self._settings.socket)
        else:
            _log.warning(
                "kvferry: no node at %s (%s): everything is computed until there is one",
                self._settings.socket,
                pool.store.last_error or "it does not answer",
            )

    def _add(self, name: str, pool: Any) -> None:
        known = self._pools.get(name)
        if known is None or known.pool is not pool:
            added = self._stored(name, pool)
            with self._lock:
                self._pools[name] = added
            if known is not None:
                known.close()

    def _stored(self, name: str, pool: Any) -> StoredPool:
        if not self._page_tokens:
            raise MisconfiguredError(f"host pool {name} was registered before the one of KV pages")
        pages = describe(pool, name)
        last_only = name == PoolName.MAMBA
        facts = pool_facts(
            name,
            pool,
            pages,
            config=self._config,
            page_tokens=self._page_tokens,
            last=last_only,
        )
        names, store = self._open(facts)
        ends = Ends(*self._open(facts.ends())) if name.endswith(_WINDOWS) else None
        return StoredPool(pool, pages, names=names, store=store, last_only=last_only, ends=ends)

    def _open(self, facts: PoolFacts) -> tuple[PageNames, PageStore]:
        info = self._identity.namespace(facts, generation=self._generation)
        config = self._config
        label = Path(config.model_name or "model").name
        rank = f"{config.dp_rank}.{config.pp_rank}.{config.tp_rank}"
        engine = f"sglang:{label}:{os.getpid()}/{rank}/{facts.name}"
        store = self._open_store(self._settings, info, engine=engine, token=self._token)
        return PageNames(self._identity.key, info.namespace), store

    # ---- what is there

    @guarded(lambda self, keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are there."""
        pool = self._pools[_KV]
        return pool.reach(keys)

    @guarded(lambda self, keys, pool_transfers=None, extra_info=None: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How far a prefix can be restored from all these pools."""
        main = self._pools[_KV]
        reached = main.reach(keys)
        until = time.monotonic() + QUERY_S
        others = [
            self._side_pool(transfer, keys, until=until)
            for transfer in pool_transfers or ()
            if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS  # never rules out a hit; no verdict on it
        ]
        config = self._config
        ranks = int(config.tp_size) * int(config.pp_size) * int(config.attn_cp_size)
        hit = fold(PoolName.KV, reached, others, boundaries=1 if ranks == 1 else MAX_QUESTIONS)
        return PoolTransferResult(hit.pages, dict(hit.by_pool), list(hit.boundaries))

    def _side_pool(self, transfer: PoolTransfer, keys: Sequence[str], *, until: float) -> SidePool:
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            return SidePool(transfer.name, Policy.ALL, lambda _: 0)
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
            return SidePool(
                transfer.name,
                Policy.TRAILING,
                lambda limit: pool.longest(keys[:limit], window=window, until=until),
            )
        return SidePool(transfer.name, Policy.ALL, lambda limit: pool.reach(keys[:limit]))

    def exists(self, key: str) -> bool:
        """One page."""
        return bool(self.batch_exists([key]) == 1)

    # ---- pages in and out

    @guarded(_all_false)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool. False: not to be used."""
        return self._load(_KV, keys, host_indices)

    @guarded(_all_false)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool."""
        return self._save(_KV, keys, host_indices, extra_info)

    @guarded(_none_of)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages into their pools."""
        return {
            transfer.name: self._load(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @guarded(_none_of)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of their pools."""
        return {
            transfer.name: self._save(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or host_indices is None:
            return [False] * len(keys)
        loaded, moved = pool.load(keys, host_indices)
        self._sample("prefetch", moved)
        return loaded

    def _save(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or host_indices is None:
            return [False] * len(keys)
        prefix = (extra_info.prefix_keys if extra_info is not None else None) or ()
        held, moved = pool.save(prefix, keys, host_indices)
        self._sample("backup", moved)
        return held

    # ---- the interface without addresses, which SGLang does not use beside interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages go by ``batch_get_v1``."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Nothing: see ``get``."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing: pages go by ``batch_set_v1``."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing: see ``set``."""
        return False

    # ---- the rest

    @guarded(lambda self: None)
    def clear(self) -> None:
        """Nothing stored before is found again by this engine; others keep it.

        Ranks that share pages cannot agree on a new name for them, so their engine stores no more.
        """
        config = self._config
        several = int(config.tp_size) * int(config.attn_cp_size) > 1
        with self._lock:
            pools = dict(self._pools)
        if several and any(shared_by_ranks(pool.pool, config) for pool in pools.values()):
            self.guard.turn_off("the storage was cleared; ranks that share pages begin anew when restarted")
            return
        self._generation = os.urandom(16).hex()
        for name, known in pools.items():
            added = self._stored(name, known.pool)
            with self._lock:
                self._pools[name] = added
            known.close()

    def get_stats(self) -> StorageMetrics | None:
        """Pages per call and GB/s since the last question, for SGLang's histograms."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            taken, self._samples = self._samples, {"prefetch": [], "backup": []}
        metrics = StorageMetrics()
        for moved in taken["prefetch"]:
            metrics.prefetch_pgs.append(moved.pages)
            metrics.prefetch_bandwidth.append(moved.nbytes / max(moved.seconds, 1e-9) / 1e9)
        for moved in taken["backup"]:
            metrics.backup_pgs.append(moved.pages)
            metrics.backup_bandwidth.append(moved.nbytes / max(moved.seconds, 1e-9) / 1e9)
        return metrics

    def _sample(self, kind: str, moved: Moved) -> None:
        if self._config.enable_storage_metrics and moved.pages:
            with self._lock:
                if len(self._samples[kind]) < MAX_SAMPLES:
                    self._samples[kind].append(moved)

    def close(self) -> None:
        """Idempotent; joins the threads of the connections."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()
