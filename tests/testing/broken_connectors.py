"""Memory connectors with one defect each, of kinds that engines' connectors were seen with."""

from collections.abc import Sequence
from typing import Any

from kvferry.engines.loadcap import FIELD, load_cap
from kvferry.errors import BrokenError
from kvferry.testing.engine_books import StepOutput
from kvferry.testing.memory_connector import Load, MemoryScheduler, MemoryWorker, Plan, Save
from kvferry.testing.memory_kv import BLOCK_TOKENS, KvStore, digests_of

# -- loads -----------------------------------------------------------------------------------------


class CallsFailuresGood(MemoryWorker):
    """A load that failed is reported as loaded."""

    def failed_blocks(self) -> set[int]:
        super().failed_blocks()
        return set()


class CallsFailuresOfRankOneGood(MemoryWorker):
    """Only the first rank tells."""

    def failed_blocks(self) -> set[int]:
        failed = super().failed_blocks()
        return failed if self._rank == 0 else set()


class CallsAGoneNodeGood(MemoryWorker):
    """What cannot be read since the node is gone passes as read."""

    def _load(self, job: Any) -> None:
        before = self._store.epoch, self._store.up
        super()._load(job)
        if not self._store.up or before[0] != self._store.epoch:
            job.failed.clear()


class LoadsFromTheNodeAfter(MemoryWorker):
    """A promise of one node is taken to another: whatever is in its memory there passes as loaded."""

    def _load(self, job: Any) -> None:
        before = self._store.epoch
        super()._load(job)
        if before != self._store.epoch:
            job.failed.clear()


class ReportsEarly(MemoryWorker):
    """Loads are reported when they begin."""

    def begin_step(self, plan: Plan) -> None:
        super().begin_step(plan)
        with self._lock:
            self._loaded += [self._jobs[load.request_id] for load in plan.loads]

    def _load(self, job: Any) -> None:
        super()._load(job)
        with self._lock:
            self._loaded.remove(job)


class ReportsTwice(MemoryWorker):
    """A load that was reported is reported again with the next step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._again: set[str] = set()

    def finished_loads(self) -> set[str]:
        again, self._again = self._again, super().finished_loads()
        return self._again | again


class NeverReports(MemoryWorker):
    """Loads end and nobody is told."""

    def finished_loads(self) -> set[str]:
        super().finished_loads()
        return set()


class MixesUpBlocks(MemoryWorker):
    """The right bytes in the wrong blocks."""

    def _load(self, job: Any) -> None:
        job.load = job.load._replace(blocks=job.load.blocks[::-1])
        super()._load(job)


class ReadsRankZero(MemoryWorker):
    """Every rank loads the first one's part."""

    def _load(self, job: Any) -> None:
        rank, self._rank = self._rank, 0
        super()._load(job)
        self._rank = rank


class ReusesAnAbortedLoad(MemoryWorker):
    """A load of what is being loaded already waits for that one, which fills other blocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: list[Load] = []

    def begin_step(self, plan: Plan) -> None:
        under_way = {job.load.digests for job in self._jobs.values()}
        self._waiting += [load for load in plan.loads if load.digests in under_way]
        rest = tuple(load for load in plan.loads if load.digests not in under_way)
        super().begin_step(Plan(rest, plan.saves, plan.cancelled))

    def finished_loads(self) -> set[str]:
        found = super().finished_loads()
        if found:
            found |= {load.request_id for load in self._waiting}
            self._waiting.clear()
        return found


class LoadsOverTheEnginesOwn(MemoryScheduler):
    """Fills the request's first blocks, which the engine has itself and may share."""

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> object:
        head = [table[: external_tokens // BLOCK_TOKENS] for table in tables]
        return super().allocated(request, head, external_tokens)


class PromisesEverything(MemoryScheduler):
    """Leaves no token to compute."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        found, loads = super().matched_tokens(request, local_tokens)
        return (found + BLOCK_TOKENS if found else found), loads


class WantsAllOrNothing(MemoryScheduler):
    """A part of a prefix is no hit."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        found, loads = super().matched_tokens(request, local_tokens)
        whole = ((request.num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        return (found, loads) if found and found + local_tokens == whole else (0, False)


class NeverLoadsAgain(MemoryScheduler):
    """What was decided for a request stays, whatever becomes of its blocks."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if request.num_preemptions else super().matched_tokens(request, local_tokens)


class AsksForEver(MemoryScheduler):
    """A load that failed is tried again at once."""

    def load_finished(self, request_id: str) -> None:
        tracked = self._tracked[request_id]
        super().load_finished(request_id)
        tracked.settled_at = -1


class KeepsDamage(KvStore):
    """Damaged blocks stay; so the same answer comes again."""

    def read(self, rank: int, digest: bytes) -> bytes | None:
        kept = self._blocks.get((rank, digest))
        data = super().read(rank, digest)
        if data is None and kept is not None:
            self._blocks[(rank, digest)] = kept
        return data


# -- saves -----------------------------------------------------------------------------------------


class PinsNothing(MemoryScheduler):
    """Blocks are the engine's again before they were copied out."""

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        save = super()._save(name, tokens, output)
        if save is not None and self.pool is not None:
            self.pool.free_blocks(self.pins[save.save_id].blocks)
            self.pins[save.save_id].blocks = []
        return save


class PinsEverything(MemoryScheduler):
    """A slow node takes all blocks from the engine."""

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        self._pinned = 0
        if self.pool is not None:
            self._pinned = -len(self.pool.blocks)
        return super()._save(name, tokens, output)


class LosesPinsUnderPressure(MemoryScheduler):
    """When blocks are scarce, a report is overlooked."""

    def absorb(self, report: Sequence[int]) -> None:
        if self.pool is not None and len(self.pool.free) < 8:
            report = report[1:]
        super().absorb(report)


class ForgetsSavesOfAGoneNode(MemoryWorker):
    """What cannot be stored is not reported either."""

    def report(self) -> list[int]:
        saved = super().report()
        return saved if self._store.up else []


class PublishesFirst(MemoryWorker):
    """A block can be read before it was copied."""

    def _save(self, save: Save) -> None:
        for digest, block in zip(save.digests, save.blocks, strict=True):
            self._store.write(self._rank, digest, bytes(self._memory[:, block].nbytes))
        super()._save(save)


class StoresPromptsAlone(MemoryScheduler):
    """Answers are not stored."""

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        request = self._tracked[name].request
        if request.num_tokens > request.num_prompt_tokens:
            return None
        return super()._save(name, tokens, output)


class StoresNothingUnread(MemoryScheduler):
    """A request that reads nothing is taken to store nothing."""

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        if self._tracked[name].request.skip_reading_prefix_cache:
            return None
        return super()._save(name, tokens, output)


class StoresNothingAfterPreemption(MemoryScheduler):
    """Blocks that come after a preemption are skipped."""

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        if self._tracked[name].request.num_preemptions:
            return None
        return super()._save(name, tokens, output)


class NeverStoresTwice(MemoryScheduler):
    """What was stored once is taken to be there for ever."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        written = set(self._written)
        found = super().matched_tokens(request, local_tokens)
        self._written |= written
        return found

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> object:
        self._written.update(self._tracked[request.request_id].offered)
        return super().allocated(request, tables, external_tokens)


class BelievesTheNodeBefore(MemoryScheduler):
    """A restart is not noticed: what the node had is taken to be there still."""

    def plan_step(self, output: StepOutput) -> Plan:
        self._epoch = self._store.epoch
        return super().plan_step(output)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        written = set(self._written)
        found = super().matched_tokens(request, local_tokens)
        self._written |= written
        return found


# -- life ------------------------------------------------------------------------------------------


class IgnoresSalts(MemoryScheduler):
    """Users read each other's prefixes."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return super().matched_tokens(request, local_tokens)
        finally:
            request.cache_salt = salt

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        request = self._tracked[name].request
        salt, request.cache_salt = request.cache_salt, None
        try:
            return super()._save(name, tokens, output)
        finally:
            request.cache_salt = salt


class IgnoresCaps(MemoryScheduler):
    """Everything is loaded, whatever the request allows."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        request.kv_transfer_params = None
        return super().matched_tokens(request, local_tokens)


class CountsTheEnginesOwn(MemoryScheduler):
    """What the engine has itself is taken off what the request allows."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params and local_tokens:
            request.kv_transfer_params = {FIELD: max(0, params[FIELD] - local_tokens)}
        return super().matched_tokens(request, local_tokens)


class RaisesForACap(MemoryScheduler):
    """A client's nonsense stops the engine."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        if load_cap(request.kv_transfer_params).problem:
            raise BrokenError("no number of tokens")
        return super().matched_tokens(request, local_tokens)


class RaisesForASalt(MemoryScheduler):
    """A client's nonsense stops the engine."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        if not digests_of(request, 1):
            raise BrokenError("a salt that is no text")
        return super().matched_tokens(request, local_tokens)


class RaisesWithoutANode(MemoryScheduler):
    """The engine's scheduler sees the node's end as an exception."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        if not self._store.up:
            raise ConnectionError("no node")
        return super().matched_tokens(request, local_tokens)


class ForgetsAfterARestart(MemoryScheduler):
    """Works with the node it was started with, and never with another."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._first = self._store.epoch

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        found = super().matched_tokens(request, local_tokens)
        return found if self._store.epoch == self._first else (0, False)


class ForgetsAbortedLoads(MemoryScheduler):
    """An aborted request is forgotten while its load is under way."""

    def finished(self, request: Any) -> None:
        self._tracked.pop(request.request_id, None)

    def load_finished(self, request_id: str) -> None:
        if request_id in self._tracked:
            super().load_finished(request_id)


class KeepsLeasesOfTheKilled(MemoryScheduler):
    """A killed engine's loads hold the node's memory for ever."""

    def killed(self) -> None:
        pass


class HoldsWhatItFinds(MemoryScheduler):
    """Takes blocks for every request it tracks, and gives them back when that ends well."""

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        found = super().matched_tokens(request, local_tokens)
        if self.pool is not None and local_tokens and found[1]:
            self.pool.touch([self.pool.blocks[next(iter(self.pool.cached.values()))]])
        return found
