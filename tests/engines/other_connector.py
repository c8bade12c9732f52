"""Another connector, to stand beside ours in a MultiConnector: what it promises it fails to load.

It has a handshake of its own. Requests say with ``kv_transfer_params`` how many blocks it promises.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.engines.vllm_life_driver import PROMISE
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass
class LossyPlan(KVConnectorMetadata):
    """blocks: to be spoiled, and reported as failed."""

    blocks: list[int] = field(default_factory=list)


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """Of no use to anybody else."""

    word: str = "hello"


class LossyConnector(KVConnectorBase_V1):
    """Loads inside the forward pass, as most connectors do, and badly."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._promised: set[str] = set()
        self._plan = LossyPlan()
        self._caches: dict[str, Any] = {}
        self._failed: set[int] = set()

    def get_handshake_metadata(self) -> Greeting:
        return Greeting()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promised = int((request.kv_transfer_params or {}).get(PROMISE, 0)) * self._block
        if request.request_id in self._promised:
            return 0, False
        return max(0, promised - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            last = int(request.kv_transfer_params[PROMISE])
            first = last - num_external_tokens // self._block
            self._plan.blocks += blocks.get_block_ids()[0][first:last]

    def build_connector_meta(self, scheduler_output: Any) -> LossyPlan:
        plan, self._plan = self._plan, LossyPlan()
        return plan

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, LossyPlan)
        for cache in self._caches.values():
            cache[plan.blocks] = 1
        self._failed.update(plan.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
