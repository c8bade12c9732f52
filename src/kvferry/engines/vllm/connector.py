"""The class vLLM loads: ``KvferryConnector``. Thin: each hook hands over to one side, behind a guard.

--kv-transfer-config '{"kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.client.messages import Tier
from kvferry.config import client_token
from kvferry.engines.planning import ChunkGeometry, owed_blocks
from kvferry.engines.vllm.announced import Announced
from kvferry.engines.vllm.asker import Asker
from kvferry.engines.vllm.compat import (
    check_transfer_config,
    check_version,
    installed_version,
    unsupported_reason,
)
from kvferry.engines.vllm.facts import worker_facts
from kvferry.engines.vllm.groups import layers_by_group
from kvferry.engines.vllm.guard import Guard, guarded
from kvferry.engines.vllm.identity import engine_geometry
from kvferry.engines.vllm.kv_memory import KvMemory
from kvferry.engines.vllm.messages import Assignment, StepPlan, WorkerFacts, WorkerReport
from kvferry.engines.vllm.opening import Opening
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.reach import connect_scheduler, connect_worker
from kvferry.engines.vllm.scheduler import GENERATION_BYTES, SchedulerSide
from kvferry.engines.vllm.settings import parse_settings
from kvferry.engines.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.engines.vllm.transfers import Store
from kvferry.engines.vllm.weights import WeightsWatch, watch_weights
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.identity.domain import DomainKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(WorkerReport)
KVConnectorHandshakeMetadata.register(WorkerFacts)

# A MultiConnector finds the counters of its connectors by name, in the front end too.
with contextlib.suppress(ValueError):  # that name is registered already
    KVConnectorFactory.register_connector("KvferryConnector", __name__, "KvferryConnector")

_log = logging.getLogger("vllm.kvferry")

_SOURCES = {Tier.MEMORY: CacheHitSource.HOST}
MAX_INTRODUCTIONS = 16  # a scheduler side that has not understood by then does without the cache


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Shares this engine's KV through the host's kvferry node.

    One object per process and role. Raises MisconfiguredError at start-up for what a person must mend;
    what merely is not supported yet, or a node that is absent, lets the engine run without the cache.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(installed_version())
        role_in_split = check_transfer_config(vllm_config, outer=get_current_vllm_config_or_none())
        self.guard = Guard(role.name.lower())
        self._settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        key = DomainKey.load(self._settings.domain, key_file=self._settings.domain_key_file)
        self._token = client_token(self._settings.token_file)
        self._unsupported = unsupported_reason(vllm_config, kv_cache_config)
        self._pins = Pins(ranks=int(vllm_config.parallel_config.world_size))
        self._announced = Announced()
        self._introduced = 0
        self._opening: Opening | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._weights: WeightsWatch | None = None
        self._facts: WorkerFacts | None = None
        self._spare_step = 0
        self._geometry = ChunkGeometry(1, 1)
        if self._unsupported is None:
            # Fails at start-up, not at the first request, and in every process.
            self._geometry = engine_geometry(vllm_config, kv_cache_config, self._settings)
            self._opening = Opening(
                vllm_config, settings=self._settings, key=key, geometry=self._geometry, role=role_in_split
            )
        elif role is KVConnectorRole.SCHEDULER:
            _log.warning(
                "kvferry: served without the shared cache: %s is not supported yet", self._unsupported.reason
            )

    # -- parts; a connector that watches another's work puts its own round them ---------------------

    def _kv_memory(self, kv_caches: Mapping[str, Any], *, layers: Sequence[Sequence[str]]) -> KvMemory:
        """The engine's memory, with what copies to and from it. layers: by KV group."""
        held = [group.part_blocks(self._geometry.chunk_tokens) for group in self._geometry.groups]
        blocks = self._kv_cache_config.num_blocks
        return KvMemory(kv_caches, groups=layers, blocks=blocks, part_blocks=held)

    def _node_worker(self, assignment: Assignment, rank: int) -> Store:
        """The worker's way to the node."""
        return connect_worker(assignment, rank, token=self._token, group=self._settings.group)

    def _node_asker(self, assignment: Assignment) -> Asker:
        """The scheduler's way to the node."""
        return connect_scheduler(assignment, token=self._token, group=self._settings.group)

    # -- properties and class methods that vLLM asks for -------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing more."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        """From what another process counted."""
        return KvferryStats(data) if data is not None else KvferryStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvferryPromMetrics:
        """Counters on the engine's own /metrics."""
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side -------------------------------------------------------------------------------

    @guarded(lambda self, kv_caches: None)
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's KV memory, once."""
        if self._worker is not None:
            return
        try:
            if self._unsupported is not None:  # perhaps by a layer that the scheduler side does not see
                raise MisconfiguredError(f"{self._unsupported.reason} is not supported yet")
            layers = layers_by_group(self._kv_cache_config, kv_caches)
            memory = self._kv_memory(kv_caches, layers=layers)
            self._facts = worker_facts(
                self._vllm_config,
                self._kv_cache_config,
                layouts=memory.layouts,
                layers=layers,
                device=memory.device,
            )
        except KvferryError as error:
            self._facts = WorkerFacts(0, 0, (), "", "", problem=str(error))
            return
        self._weights = watch_weights()
        self._worker = WorkerSide(
            memory, rank=self._facts.rank, by_block=self._geometry.by_block, connect=self._node_worker
        )
        # What the scheduler side will say, unless ranks differ: the pool is mapped before the first load.
        if self._opening is not None:
            with contextlib.suppress(KvferryError):
                self._worker.connect(self._opening.assignment(self._facts))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side must know of this worker's memory."""
        return self._facts

    @guarded(lambda self, plan: self._decline(plan))
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The earliest hook of a step: loads must not wait behind its forward pass."""
        if isinstance(kv_connector_metadata, StepPlan):
            if kv_connector_metadata.assignment is not None:  # the scheduler side knows who this is
                self._introduced = MAX_INTRODUCTIONS
            if self._weights is not None:
                self._weights.heard = kv_connector_metadata.weights
            if self._weights is not None and self._weights.stale:
                self._decline(kv_connector_metadata)
            elif self._worker is not None:
                self._worker.begin_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Also begins the step, for runners that skip the hook above. Doing it twice changes nothing."""
        super().bind_connector_metadata(connector_metadata)
        self.handle_preemptions(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads have begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only once all of its load is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are copied after the step."""

    @guarded(lambda self: self._decline(None))
    def wait_for_save(self) -> None:
        """The forward pass is over: hand its full chunks to the saving thread. Waits for nothing."""
        if self._worker is not None:
            self._worker.end_step()

    @guarded(lambda self, ids: self._ended())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and which of them must be recomputed as a whole."""
        return self._ended()

    def _ended(self) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.finished_loads(), self._worker.failed_requests()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    @guarded(lambda self: self._worker.failed_blocks() if self._worker else set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those loads that must be recomputed."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    @guarded(lambda self: self._worker.report() if self._worker else None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What else the scheduler side must hear."""
        report = self._worker.report() if self._worker is not None else None
        if self._facts is not None and self._introduced < MAX_INTRODUCTIONS:
            self._introduced += 1
            report = report or WorkerReport()
            report.facts.append(self._facts)
        if self._weights is not None and self._weights.stale:
            report = report or WorkerReport()
            report.weights = self._weights.changes
        return report

    def _decline(self, plan: KVConnectorMetadata | None) -> None:
        """With the side switched off, whatever vLLM waits for is still answered."""
        if self._worker is not None:
            self._worker.decline(plan if isinstance(plan, StepPlan) else None)

    # -- scheduler side ----------------------------------------------------------------------------

    @guarded(lambda self, metadata: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers' facts are here: from now on requests are looked up."""
        if self._scheduler is not None:
            return
        said = [fact for _, fact in sorted(metadata.items())]
        if any(isinstance(fact, WorkerFacts) for fact in said):  # else another connector's: ours come later
            self._begin(said)

    def _begin(self, said: Sequence[object]) -> None:
        if self._opening is not None:  # else it was said at the start; workers say the same
            self._scheduler = self._opening.scheduler(said, ask=self._node_asker, pins=self._pins)

    @guarded(lambda self, pool: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Where blocks are pinned while they are copied out."""
        self._pins.bind(gpu_block_pool)

    @guarded(lambda self, request, computed: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much more of the prompt can be loaded; (None, False) while the node has not answered."""
        if self._scheduler is None:
            waits = self._opening is not None and self._opening.pending(now=time.monotonic())
            return (None if waits else 0), False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(lambda self, request, blocks, external: self._announce(request, blocks, external))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated; with external tokens, the load goes out with this step's plan."""
        tables = self._announce(request, blocks, num_external_tokens)
        if self._scheduler is not None:
            self._scheduler.allocated(request, tables, num_external_tokens)

    def _announce(self, request: Any, blocks: Any, external: int) -> tuple[list[int], ...]:
        """With external tokens vLLM puts the request to wait: from now on it is owed an end of its load."""
        if not external:
            return ()
        tables: tuple[list[int], ...] = blocks.get_block_ids()
        self._announced.add(request.request_id, owed_blocks(self._geometry, tables, external_tokens=external))
        return tables

    @guarded(lambda self, request, tokens: {})
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tier supplied how many tokens."""
        sources: dict[CacheHitSource, int] = {}
        if self._scheduler is not None:
            for tier, tokens in self._scheduler.hit_sources(request, num_external_tokens).items():
                source = _SOURCES.get(Tier(tier), CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + tokens
        return sources

    @guarded(lambda self, output: self._bare_plan())
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """This step's work for the workers."""
        if self._scheduler is None:
            return self._bare_plan()
        plan = self._scheduler.plan_step(scheduler_output)
        for load in plan.loads:
            self._announced.sent(load.request_id)
        self._pins.sent()
        plan.failed = self._announced.take()
        return plan

    def _bare_plan(self) -> StepPlan:
        """Only what is owed: loads that were announced to the engine end as failed, blocks are unpinned."""
        self._pins.take_back()
        self._spare_step -= 1  # below zero: never the number of a real plan
        return StepPlan(step=self._spare_step, failed=self._announced.take())

    @guarded(lambda self, output: self._settle_pins(output))
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What the workers finished."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is None:
            facts = report.facts if isinstance(report, WorkerReport) else ()
            if self._opening is not None and (said := self._opening.hear(facts)):
                self._begin(said)
            return
        if isinstance(report, WorkerReport):
            self._scheduler.absorb(report)
        for request_id in connector_output.finished_recving or ():
            self._scheduler.load_finished(request_id)

    def _settle_pins(self, output: "KVConnectorOutput") -> None:
        """With the side switched off, pinned blocks still return."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for save in report.saves:
                self._pins.reported(save.save_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: what is being copied is pinned."""
        self._finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As above, for engines with several groups."""
        self._finished(request)
        return False, None

    @guarded(lambda self, request: None)
    def _finished(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until pinned blocks are back; each save has a deadline."""
        return self._pins.pending > 0

    @guarded(lambda self: None)
    def reset_cache(self) -> bool | None:
        """The engine's caches were reset with their connector: keep apart what comes from now on."""
        if self._scheduler is not None:
            self._scheduler.reset(os.urandom(GENERATION_BYTES))
        return True

    @guarded(lambda self: None)
    def get_kv_connector_stats(self) -> KvferryStats | None:
        """Counts since the last call, of the side that this process has."""
        if self._scheduler is not None:
            counts = self._scheduler.counts.take()
            return KvferryStats(counts) if counts else None
        return None

    def take_events(self) -> Iterable[Any]:
        """None of ours."""
        return ()

    def shutdown(self) -> None:
        """Ends transfers and joins threads. Idempotent."""
        self._shut_down()

    @guarded(lambda self: None)
    def _shut_down(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._opening is not None:
            self._opening.close()
