"""What a fake engine keeps books of, named as in vLLM: requests, blocks, a step's output, hooks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import BrokenError

Kv = npt.NDArray[np.uint8]  # (layers, blocks, bytes), as vLLM lays CPU KV out


class WorkerHooks(Protocol):
    """One rank of a connector. Called in this order, once per step each."""

    def begin_step(self, plan: Any) -> None: ...
    def end_step(self) -> None: ...
    def finished_loads(self) -> set[str]: ...
    def failed_blocks(self) -> set[int]: ...
    def failed_requests(self) -> set[str]: ...
    def report(self) -> Any: ...


class SchedulerHooks(Protocol):
    """The scheduler's side of a connector."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]: ...
    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> object: ...
    def plan_step(self, output: Any) -> Any: ...
    def absorb(self, report: Any) -> None: ...
    def load_finished(self, request_id: str) -> None: ...
    def finished(self, request: Any) -> None: ...


class Status(Enum):
    """Of a request; names as in vLLM."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting for remote kvs"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class FakeRequest:
    """The fields of vLLM's Request that connectors read, and the engine's own."""

    request_id: str
    prompt_token_ids: list[int]
    output_tokens: int = 4
    cache_salt: Any = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    pooling_params: Any = None
    prompt_embeds: Any = None
    mm_features: tuple[Any, ...] = ()
    resumable: bool = False
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    all_token_ids: list[int] = field(default_factory=list)
    external_tokens: int = 0

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def blocks(self) -> list[int]:
        """Of the first KV group."""
        return self.tables[0]

    @blocks.setter
    def blocks(self, table: list[int]) -> None:
        self.tables[0] = table

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(slots=True)
class Block:
    """ref_cnt: users. name: the prefix whose KV it holds, or None while it is nobody's to reuse."""

    block_id: int
    ref_cnt: int = 0
    name: bytes | None = None


class BlockPool:
    """vLLM's pool: blocks that nobody uses keep their content until they are taken.

    null_block: stands in tables for a block that its request does not need; it has no place in memory.
    """

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.free: OrderedDict[int, None] = OrderedDict((number, None) for number in range(count))
        self.cached: dict[bytes, int] = {}
        self.null_block = Block(count)

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more user."""
        for block in blocks:
            if not block.ref_cnt:
                del self.free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        """One user less."""
        for block in ordered_blocks:
            if block.ref_cnt < 1:
                raise BrokenError(f"block {block.block_id} was freed twice")
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free[block.block_id] = None

    def take(self, count: int) -> list[int] | None:
        """New blocks; their old content is forgotten."""
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for number in taken:
            block = self.blocks[number]
            if block.name is not None:
                self.cached.pop(block.name, None)
            block.name, block.ref_cnt = None, 1
        return taken

    def reset(self) -> bool:
        """Forget all content; refused while blocks are in use."""
        if any(block.ref_cnt for block in self.blocks):
            return False
        self.cached.clear()
        for block in self.blocks:
            block.name = None
        return True


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The fields of vLLM's SchedulerOutput that connectors read."""

    num_scheduled_tokens: dict[str, int]
    kv_connector_block_state: "StepOutput | None" = None
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    has_sync_kv_loads: bool = False

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """By group."""
        return self.tables[request_id]
