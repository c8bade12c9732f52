"""How a scheduler side comes to be: once the workers have said what they hold."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm.asker import Asker
from kvferry.engines.vllm.facts import Introductions, gathered_facts
from kvferry.engines.vllm.identity import AdapterDigests, assign
from kvferry.engines.vllm.messages import Assignment, WorkerFacts
from kvferry.engines.vllm.multimodal import ItemDigests
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.roles import KvRole
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.settings import ConnectorSettings
from kvferry.errors import KvferryError
from kvferry.identity.domain import DomainKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("vllm.kvferry")


class Opening:
    """Of an engine that is supported. Its workers' facts come with the handshake or with their reports.

    role: of this engine in a prefill/decode split. It owns what reads adapters and items for the scheduler
    side; close it after that.
    """

    def __init__(
        self,
        config: "VllmConfig",
        *,
        settings: ConnectorSettings,
        key: DomainKey,
        geometry: ChunkGeometry,
        role: KvRole,
    ) -> None:
        self._config = config
        self._settings = settings
        self._key = key
        self._geometry = geometry
        self._role = role
        self._ranks = int(config.parallel_config.world_size)
        self._introductions = Introductions(ranks=self._ranks)
        self._adapters: AdapterDigests | None = None
        self._items: ItemDigests | None = None

    def pending(self, *, now: float) -> bool:
        """Whether a request should wait for it."""
        return self._introductions.pending(now=now)

    def hear(self, facts: Iterable[WorkerFacts]) -> Sequence[WorkerFacts] | None:
        """Facts out of a worker's report. Every rank's, once, when it is time to open."""
        return self._introductions.hear(facts)

    def assignment(self, fact: WorkerFacts) -> Assignment:
        """What the scheduler side will say unless ranks differ. Raises KvferryError."""
        return self._assign([fact] * self._ranks)

    def scheduler(
        self, said: Sequence[object], *, ask: Callable[[Assignment], Asker], pins: Pins
    ) -> SchedulerSide | None:
        """The scheduler side; None, and why is logged, where the workers cannot be served.

        said: what came from each rank, in their order. ask: the way to the node.
        """
        self._introductions.end()
        try:
            assignment = self._assign(gathered_facts(said, ranks=self._ranks))
        except KvferryError as error:
            _log.warning("kvferry: served without the shared cache: %s", error)
            return None
        return self._start(assignment, client=ask(assignment), pins=pins)

    def close(self) -> None:
        """Idempotent; joins threads."""
        for digests in (self._adapters, self._items):
            if digests is not None:
                digests.close()
        self._adapters = self._items = None

    def _assign(self, facts: Sequence[WorkerFacts]) -> Assignment:
        return assign(self._config, self._settings, key=self._key, facts=facts, chunks=self._geometry)

    def _start(self, assignment: Assignment, *, client: Asker, pins: Pins) -> SchedulerSide:
        self._adapters, self._items = AdapterDigests(), ItemDigests()
        namespace = assignment.namespace
        _log.info(
            "kvferry: chunks of %d tokens (%.1f MB), namespace %s, node at %s",
            namespace.chunk_tokens,
            sum(namespace.part_bytes) / 1e6,
            namespace.namespace.hex(),
            self._settings.socket,
        )
        return SchedulerSide(
            assignment=assignment,
            geometry=self._geometry,
            admission=Admission(
                key=self._key,
                namespace=namespace.namespace,
                chunk_tokens=namespace.chunk_tokens,
                adapters=self._adapters,
                items=self._items,
                role=self._role,
            ),
            client=client,
            pins=pins,
            prefill=PrefillWatch(),
            deadline_cap_s=self._settings.deadline_cap_ms / 1000,
            steps_in_flight=int(self._config.max_concurrent_batches),
        )
