"""Which chunks each step completes, and how many of them are copied out at once.

Blocks of attention are found by their position in the request's table, as long as the engine has not let go
of them. States are not: the engine hands each over once, with the boundary it belongs to, in the step that
computes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvferry.engines.planning import ChunkGeometry, Eligibility, part_blocks, plan_saves
from kvferry.engines.vllm.messages import SaveChunk, SaveSpec
from kvferry.engines.vllm.requests import Admission, Tracked
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.errors import RefusedError
from kvferry.identity.geometry import GroupKind

# A save costs the scheduler's thread some 60 microseconds at 32K tokens, most of it vLLM's block table.
# Requests that run in step complete their chunks in step: what is over goes with the next steps.
MAX_SAVES_PER_STEP = 32


class BlockTables(Protocol):
    """Of the requests of one step.

    boundary_state_offloads: by request, states that the step leaves behind: group, block, tokens before it.
    """

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]: ...

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
        self._positional = [
            (at, group) for at, group in enumerate(geometry.groups) if group.kind is not GroupKind.STATE
        ]

    def plan(
        self, scheduled: Iterable[tuple[Tracked, int]], tables: BlockTables | None
    ) -> tuple[SaveSpec, ...]:
        """The saves that go with a step. scheduled: its requests and how many tokens of each it computes."""
        if not self._book.ready or tables is None:
            return ()
        due = [
            _Due(tracked, chunks) for tracked, tokens in scheduled if (chunks := self._full(tracked, tokens))
        ]
        states = tables.boundary_state_offloads
        # States are handed over once. Then the longest arrears, so that no request is put off for ever.
        due.sort(key=lambda entry: (entry.tracked.request_id in states, len(entry.chunks)), reverse=True)
        saves: list[SaveSpec] = []
        for tracked, chunks in due[:MAX_SAVES_PER_STEP]:
            saves += self._save(tracked, chunks, tables)
        return tuple(saves)

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

    def _save(self, tracked: Tracked, chunks: range, tables: BlockTables) -> list[SaveSpec]:
        """By group, what is not stored yet."""
        if not self._admission.still_named(tracked):
            return []
        try:
            digests = tracked.digests(chunks.stop, chunk_tokens=self._geometry.chunk_tokens)
        except RefusedError:
            tracked.eligibility, tracked.chain = Eligibility.TOKENS, None
            return []
        new = self._states(digests, tables.boundary_state_offloads.get(tracked.request_id, ()))
        room = self._book.room - sum(len(found) for found in new.values())
        found_tables: tuple[Sequence[int], ...] = ()
        for chunk in chunks:
            wanted = [entry for entry in self._positional if self._book.wants(digests[chunk], entry[0])]
            if wanted:
                if sum(group.part_blocks(self._geometry.chunk_tokens) for _, group in wanted) > room:
                    break
                found_tables = found_tables or tables.get_block_ids(tracked.request_id)
            for at, group in wanted:
                blocks = part_blocks(
                    self._geometry,
                    group,
                    chunk=chunk,
                    table=found_tables[at],
                    null_block=self._book.null_block,
                )
                if blocks is not None:
                    new.setdefault(at, []).append(SaveChunk(chunk, digests[chunk], blocks))
                    room -= len(blocks)
            tracked.first_unsaved = chunk + 1
        tracked.story.stored_chunks += len({chunk.number for found in new.values() for chunk in found})
        prefixes: dict[int, tuple[bytes, ...]] = {}
        saves = []
        for at, found in sorted(new.items()):
            first = found[0].number
            prefix = prefixes.setdefault(first, tuple(digests[:first]))
            saves.append(self._book.begin(prefix, found, at))
        return saves

    def _states(
        self, digests: Sequence[bytes], handed: Iterable[tuple[int, int, int]]
    ) -> dict[int, list[SaveChunk]]:
        """Of the states handed over, those at the end of a chunk."""
        found: dict[int, dict[int, SaveChunk]] = {}
        room = self._book.room
        for group, block, tokens in sorted(handed, key=lambda state: state[2]):
            number, inside = tokens // self._geometry.chunk_tokens - 1, tokens % self._geometry.chunk_tokens
            if inside or not 0 <= number < len(digests) or block == self._book.null_block or room < 1:
                continue
            if self._book.wants(digests[number], group):
                found.setdefault(group, {})[number] = SaveChunk(number, digests[number], (block,))
                room -= 1
        return {group: list(chunks.values()) for group, chunks in found.items()}
