"""Which chunks each step completes, and how many of them are copied out at once."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvferry.engines.planning import ChunkGeometry, Eligibility, chunk_blocks, plan_saves
from kvferry.engines.vllm.messages import SaveChunk, SaveSpec
from kvferry.engines.vllm.requests import Admission, Tracked
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.errors import RefusedError

# A save costs the scheduler's thread some 60 microseconds at 32K tokens, most of it vLLM's block table.
# Requests that run in step complete their chunks in step: what is over goes with the next steps.
MAX_SAVES_PER_STEP = 32


class BlockTables(Protocol):
    """Of the requests of one step."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """By group."""
        ...


class _Due(NamedTuple):
    tracked: Tracked
    chunks: range


class SavePlanner:
    """Scheduler's thread only. Nothing that does not fit is lost: it is due again with the next step."""

    def __init__(self, geometry: ChunkGeometry, admission: Admission, book: SaveBook) -> None:
        self._geometry = geometry
        self._admission = admission
        self._book = book

    def plan(
        self, scheduled: Iterable[tuple[Tracked, int]], tables: BlockTables | None
    ) -> tuple[SaveSpec, ...]:
        """The saves that go with a step. scheduled: its requests and how many tokens of each it computes."""
        if not self._book.ready or tables is None:
            return ()
        due = [
            _Due(tracked, chunks) for tracked, tokens in scheduled if (chunks := self._full(tracked, tokens))
        ]
        # The longest arrears first, so that no request is put off for ever.
        due.sort(key=lambda entry: len(entry.chunks), reverse=True)
        saves = [self._save(tracked, chunks, tables) for tracked, chunks in due[:MAX_SAVES_PER_STEP]]
        return tuple(save for save in saves if save is not None)

    def _full(self, tracked: Tracked, tokens: int) -> range | None:
        """Chunks that are full after the step and were not considered yet."""
        if tracked.chain is None or not tracked.writes:
            return None
        request = tracked.request
        return plan_saves(
            self._geometry,
            known_tokens=request.num_tokens,
            computed_tokens=request.num_computed_tokens + tokens,
            first_unsaved=tracked.first_unsaved,
        )

    def _save(self, tracked: Tracked, chunks: range, tables: BlockTables) -> SaveSpec | None:
        if not self._admission.still_named(tracked):
            return None
        try:
            digests = tracked.digests(chunks.stop, chunk_tokens=self._geometry.chunk_tokens)
        except RefusedError:
            tracked.eligibility, tracked.chain = Eligibility.TOKENS, None
            return None
        room = self._book.room // self._geometry.blocks_per_chunk
        new: list[int] = []
        for chunk in chunks:
            if self._book.wants(digests[chunk]):
                if len(new) >= room:
                    break
                new.append(chunk)
            tracked.first_unsaved = chunk + 1
        if not new:
            return None
        table = tables.get_block_ids(tracked.request_id)[0]
        tracked.story.stored_chunks += len(new)
        return self._book.begin(
            digests[: new[0]],
            [SaveChunk(i, digests[i], chunk_blocks(self._geometry, i, table)) for i in new],
        )
