"""Keeps engine blocks from being reused while they are copied out.

    build a plan ── pin ──► plan sent ──► copying on every rank ── all ranks reported ──► unpin
                     └── the plan broke off ──────────────────────────────────────────► unpin

Also works when everything else of the scheduler side is switched off: a pin must always come back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

MAX_PINNED_SHARE = 0.5  # of the engine's blocks: a node slower than the engine must not starve it


class BlockPool(Protocol):
    """The part of vLLM's block pool that is used here."""

    blocks: Any
    null_block: Any

    def touch(self, blocks: Any) -> None:
        """Take one more reference on each block."""

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Give one reference on each block back."""


@dataclass(slots=True)
class _Pin:
    blocks: list[Any]
    ranks_left: int


class Pins:
    """References on blocks by save number. Single-threaded, like the scheduler that owns it."""

    def __init__(self, *, ranks: int) -> None:
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._pins: dict[int, _Pin] = {}
        self._pinned = 0
        self._unsent: list[int] = []

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool, known once its scheduler exists."""
        self._pool = pool

    @property
    def ready(self) -> bool:
        """Whether blocks can be pinned yet."""
        return self._pool is not None

    @property
    def null_block(self) -> int | None:
        """The number that stands in a block table for a block that the engine does not need."""
        return None if self._pool is None else int(self._pool.null_block.block_id)

    @property
    def pending(self) -> int:
        """How many saves hold blocks."""
        return len(self._pins)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return 0 if self._pool is None else int(len(self._pool.blocks) * MAX_PINNED_SHARE) - self._pinned

    def pin(self, save_id: int, block_ids: Iterable[int]) -> None:
        """Hold these blocks until every rank has reported ``save_id``."""
        if self._pool is None:
            return
        blocks = [self._pool.blocks[block] for block in block_ids]
        self._pool.touch(blocks)
        self._pins[save_id] = _Pin(blocks, self._ranks)
        self._pinned += len(blocks)
        self._unsent.append(save_id)

    def sent(self) -> None:
        """The plan with all of these saves goes to the workers, who will report them."""
        self._unsent.clear()

    def take_back(self) -> None:
        """Plans with saves that were pinned since ``sent`` never leave: no worker would report them."""
        for save_id in self._unsent:
            if save_id in self._pins:
                self._unpin(save_id)
        self._unsent.clear()

    def reported(self, save_id: int) -> bool:
        """One rank is done with it. True when it was the last one and the blocks are free again."""
        pin = self._pins.get(save_id)
        if pin is None:
            return False
        pin.ranks_left -= 1
        if pin.ranks_left:
            return False
        self._unpin(save_id)
        return True

    def _unpin(self, save_id: int) -> None:
        pin = self._pins.pop(save_id)
        self._pinned -= len(pin.blocks)
        if self._pool is not None:
            # The tail first: it is what the engine should evict first.
            self._pool.free_blocks(reversed(pin.blocks))
