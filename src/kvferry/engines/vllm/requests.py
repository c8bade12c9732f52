"""What the scheduler side remembers of each request.

    NEW ── lookup ──► ASKED ── answer with chunks ──► ANSWERED ── blocks allocated ──► LOADING
     │                  │                                │                                │
     └── nothing to ask └── nothing found, no answer     └── not needed any more          └── done or failed
                        ▼                                ▼                                ▼
                     SETTLED ◄────────────────────────────────────────────────────────────┘
     SETTLED ── preempted ──► NEW

A settled request is answered with 0 for the rest of its life or until it is preempted: vLLM asks again at
once when a load failed from its first block, and the same answer again would go on for ever.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvferry.client.messages import LookupAnswer
from kvferry.engines.loadcap import NO_CAP, LoadCap, load_cap
from kvferry.engines.planning import Eligibility, LoadPlan
from kvferry.engines.vllm.identity import AdapterDigests, adapter_extra
from kvferry.engines.vllm.messages import LoadResult
from kvferry.engines.vllm.multimodal import ItemDigests, Items
from kvferry.engines.vllm.roles import KvRole
from kvferry.errors import RefusedError
from kvferry.identity.chunks import ChunkChain, Extras
from kvferry.identity.domain import DomainKey

_log = logging.getLogger("vllm.kvferry")

NAMING_WAIT_S = 5.0
REST_LOADING_S = 0.005  # cut short by the load's end
REST_ASKED_S = 0.001


class Phase(Enum):
    """Where a request stands; the diagram is above."""

    NEW = "new"
    ASKED = "asked"
    ANSWERED = "answered"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class Story:
    """What ``kvferry explain`` is told of a request. Seconds, tokens, bytes."""

    engine_tokens: int = 0
    loaded_tokens: int = 0
    failed_tokens: int = 0
    stored_chunks: int = 0
    loaded_bytes: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Tracked:
    """One request. chain: None until its extras are known, and for good where it takes no part.

    reads, writes: whether it is looked up, and whether what it computes is stored. filled: the first chunk
    that the load brings of each group. cap: how much the request itself lets be loaded. told: the
    node knows of it without a lookup.
    """

    request: Any
    eligibility: Eligibility
    seen_at: float
    reads: bool = True
    writes: bool = True
    cap: LoadCap = NO_CAP
    chain: ChunkChain | None = None
    adapter: "Future[bytes] | None" = None
    items: "Future[Items] | None" = None
    phase: Phase = Phase.NEW
    preemptions: int = 0
    asked_at: float = 0.0
    answered_at: float = 0.0
    answer: LookupAnswer | None = None
    load: LoadPlan | None = None
    filled: tuple[int, ...] = ()
    load_began: float = 0.0
    results: list[LoadResult] = field(default_factory=list)
    first_unsaved: int = 0
    finished: bool = False
    scheduled: bool = False
    told: bool = False
    story: Story = field(default_factory=Story)

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""
        return str(self.request.request_id)

    @property
    def note(self) -> str:
        """Why it takes no part in lookups, or what it asked for itself; else empty."""
        if self.eligibility is not Eligibility.YES:
            return self.eligibility.value
        return self.cap.note if self.reads else Eligibility.NO_PREFIX_READ.value

    def settle(self, reason: str) -> None:
        """No more lookups until the request is preempted."""
        self.phase = Phase.SETTLED
        self.answer = None
        self.load = None
        self.preemptions = self.request.num_preemptions
        self.story.reason = reason

    def withdraw(self) -> None:
        """What it has computed cannot be named any more: it neither reads nor stores from now on."""
        self.chain = self.adapter = self.items = None
        self.reads = self.writes = False

    def reopen_after_preemption(self) -> None:
        """A preempted request lost its blocks: what was decided before no longer holds."""
        if self.phase is Phase.SETTLED and self.request.num_preemptions > self.preemptions:
            self.phase = Phase.NEW

    def digests(self, chunks: int, *, chunk_tokens: int) -> list[bytes]:
        """Digests of the first ``chunks`` chunks, whose tokens must be known.

        Raises RefusedError for token ids that cannot be named.
        """
        if self.chain is None:
            return []
        missing = self.request.all_token_ids[self.chain.tokens : chunks * chunk_tokens]
        if missing:
            self.chain.extend(missing)
        return self.chain.digests[:chunks]


def rest_s(requests: Iterable[Tracked]) -> float:
    """How long workers may sleep in a step that runs nothing, so that what it waits for has the cores."""
    phases = {tracked.phase for tracked in requests}
    return REST_LOADING_S if Phase.LOADING in phases else REST_ASKED_S if Phase.ASKED in phases else 0.0


class Admission:
    """Decides what part a request takes and prepares its chain. items: None: no multimodal input is named."""

    def __init__(
        self,
        *,
        key: DomainKey,
        namespace: bytes,
        chunk_tokens: int,
        adapters: AdapterDigests,
        items: ItemDigests | None = None,
        role: KvRole = KvRole.BOTH,
    ) -> None:
        self._key = key
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._adapters = adapters
        self._items = items
        self._role = role
        self.generation = b""
        self._said_cap = False

    def admit(self, request: Any, *, now: float) -> Tracked:
        """A request's first appearance."""
        tracked = Tracked(request, classify(request), now)
        if request.mm_features and self._items is not None:
            tracked.items = self._items.items(request.mm_features)
        if tracked.eligibility is not Eligibility.YES:
            return tracked
        tracked.reads = self._role.loads and not request.skip_reading_prefix_cache
        tracked.writes = self._role.stores
        tracked.cap = self._cap(request)
        if request.mm_features and tracked.items is None:
            tracked.eligibility = Eligibility.MULTIMODAL
        elif request.lora_request is not None:
            tracked.adapter = self._adapters.digest(request.lora_request)
            if tracked.adapter is None:
                tracked.eligibility = Eligibility.ADAPTER
        elif tracked.items is None:
            self._start_chain(tracked)
        return tracked

    def ready(self, tracked: Tracked, *, now: float) -> bool:
        """Whether the chain is there; False while what names the request is still being read."""
        named = [(tracked.adapter, Eligibility.ADAPTER), (tracked.items, Eligibility.MULTIMODAL)]
        waits = [(future, without) for future, without in named if future is not None]
        if tracked.chain is not None or not waits or tracked.eligibility is not Eligibility.YES:
            return True
        if now - tracked.seen_at <= NAMING_WAIT_S and not all(future.done() for future, _ in waits):
            return False
        for future, without in waits:
            if not future.done() or future.cancelled() or future.exception() is not None:
                tracked.eligibility = without
                return True
        self._start_chain(tracked)
        return True

    def still_named(self, tracked: Tracked) -> bool:
        """Whether what it computes now still belongs to its chain: an adapter may be replaced meanwhile."""
        lora, features = tracked.request.lora_request, tracked.request.mm_features
        if lora is not None and not self._adapters.unchanged(lora):
            tracked.eligibility = Eligibility.ADAPTER
        elif features and self._items is not None and not self._items.unchanged(features):
            tracked.eligibility = Eligibility.MULTIMODAL
        else:
            return True
        tracked.chain = None
        return False

    def _cap(self, request: Any) -> LoadCap:
        cap = load_cap(request.kv_transfer_params)
        if cap.problem and not self._said_cap:
            self._said_cap = True
            _log.warning("kvferry: request %s: %s (said once)", request.request_id, cap.problem)
        return cap

    def _start_chain(self, tracked: Tracked) -> None:
        """With everything that names the request at hand."""
        adapter = tracked.adapter.result() if tracked.adapter is not None else None
        items = tracked.items.result() if tracked.items is not None else ()
        try:
            extras = Extras(
                adapter=adapter_extra(adapter, self.generation),
                cache_salt=tracked.request.cache_salt,
                items=items,
            )
        except RefusedError:
            tracked.eligibility = Eligibility.SALT
            return
        tracked.chain = ChunkChain(self._key, self._namespace, chunk_tokens=self._chunk_tokens, extras=extras)


def classify(request: Any) -> Eligibility:
    """Whether a request's KV can be named by its tokens and what stands between them."""
    if request.pooling_params is not None:
        return Eligibility.POOLING
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return Eligibility.EMBEDS
    if request.resumable:
        return Eligibility.STREAMING
    return Eligibility.YES
