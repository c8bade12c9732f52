"""What is copied out of an engine is bounded, comes back whatever breaks, and is fair to every request."""

import random
from collections.abc import Sequence  # sorted below
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.test_identity import model_directory

from kvferry.client.messages import LookupAnswer, LookupRequest, NamespaceInfo, Reason, Report
from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm import lookups
from kvferry.engines.vllm.identity import AdapterDigests
from kvferry.engines.vllm.lookups import MAX_NAMED_TOKENS_PER_STEP
from kvferry.engines.vllm.messages import Assignment, SaveResult, WorkerPart, WorkerReport
from kvferry.engines.vllm.pins import MAX_PINNED_SHARE, Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.engines.vllm.saving import MAX_SAVES_PER_STEP
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.errors import BrokenError
from kvferry.identity.domain import DomainKey
from kvferry.testing.fake_engine import BlockPool, FakeRequest, StepOutput

BLOCK = 4


class EmptyNode:
    """Answers every lookup with: nothing here."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.came_by: dict[str, tuple[int, int, int]] = {}
        self.epoch = 1
        self.followed = False

    def came(
        self, request_id: str, chunks: Sequence[bytes], *, prompt_tokens: int, engine_tokens: int
    ) -> None:
        self.came_by[request_id] = (len(chunks), prompt_tokens, engine_tokens)

    def lookup(self, request: LookupRequest) -> None:
        self.asked.append(request.request_id)

    def poll(self, request_id: str) -> LookupAnswer | None:
        return LookupAnswer(request_id, 0, 1, 0, 0, (), (), 0.0, 0.0, 0.0, Reason.ABSENT)

    def cancel(self, request_id: str) -> None: ...

    def end(self, load_id: int) -> None: ...

    def suspect(self) -> None: ...

    def report(self, report: Report) -> None: ...

    def close(self) -> None: ...


class Bench:
    """A scheduler side whose engine is a few lists. node: an EmptyNode by default."""

    def __init__(
        self, *, blocks: int, ranks: int = 1, chunk_blocks: int = 1, node: EmptyNode | None = None
    ) -> None:
        self.node, self.pool, self.pins = node or EmptyNode(), BlockPool(blocks), Pins(ranks=ranks)
        self.pins.bind(self.pool)
        self.adapters = AdapterDigests()
        geometry = ChunkGeometry(BLOCK, BLOCK * chunk_blocks)
        namespace = NamespaceInfo(bytes(16), (1024,), geometry.chunk_tokens, "default")
        self.side = SchedulerSide(
            assignment=Assignment("/s", "e", namespace, ((WorkerPart(0, 1),),)),
            geometry=geometry,
            admission=Admission(
                key=DomainKey.default("default"),
                namespace=bytes(16),
                chunk_tokens=geometry.chunk_tokens,
                adapters=self.adapters,
            ),
            client=self.node,
            pins=self.pins,
            prefill=PrefillWatch(),
        )
        self.requests: dict[str, FakeRequest] = {}

    def running(self, name: str, tokens: int, *, lora: Any = None) -> FakeRequest:
        """A request with its blocks that has computed nothing yet."""
        rng = random.Random(name)
        request = FakeRequest(name, [rng.randrange(50000) for _ in range(tokens)])
        request.lora_request = lora
        request.blocks = self.pool.take(-(-tokens // BLOCK)) or []
        while self.side.matched_tokens(request, 0)[0] is None:
            pass
        self.requests[name] = request
        return request

    def step(self, **tokens: int) -> Any:
        """The plan of a step that computes these."""
        tables = {name: (self.requests[name].blocks,) for name in tokens}
        plan = self.side.plan_step(StepOutput(tokens, StepOutput({}, None, tables)))
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return plan

    def finish(self, name: str) -> None:
        """As vLLM does when a request ends."""
        request = self.requests.pop(name)
        self.side.finished(request)
        self.pool.free_blocks([self.pool.blocks[number] for number in reversed(request.blocks)])


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Any:
    made = Bench(**getattr(request, "param", {"blocks": 400}))
    yield made
    made.side.close()
    made.adapters.close()


def stored(plan: Any) -> WorkerReport:
    """One rank's report: all saves of the plan are done."""
    return WorkerReport(
        saves=[SaveResult(s.save_id, tuple(c.digest for c in s.chunks), 0, 0) for s in plan.saves]
    )


@pytest.mark.parametrize("bench", [{"blocks": 20}], indirect=True)
def test_blocks_that_wait_for_a_slow_node_leave_the_engine_its_share(bench: Bench) -> None:
    bench.running("a", 64)
    plan = bench.step(a=64)
    held = sum(len(chunk.blocks) for save in plan.saves for chunk in save.chunks)
    assert held == 20 * MAX_PINNED_SHARE
    bench.finish("a")
    assert len(bench.pool.free) == 20 - held


@pytest.mark.parametrize("bench", [{"blocks": 20}], indirect=True)
def test_what_found_no_room_is_stored_with_a_later_step(bench: Bench) -> None:
    bench.running("a", 65)
    first = bench.step(a=64)
    bench.side.absorb(stored(first))
    second = bench.step(a=1)
    numbers = [chunk.number for plan in (first, second) for save in plan.saves for chunk in save.chunks]
    assert numbers == list(range(16))


def test_requests_in_step_are_stored_over_several_steps_and_none_is_forgotten(bench: Bench) -> None:
    names = [f"r{n}" for n in range(MAX_SAVES_PER_STEP + 7)]
    for name in names:
        bench.running(name, 2 * BLOCK)
    sizes = []
    for _ in range(4):
        plan = bench.step(**dict.fromkeys(names, 2))
        sizes.append(len(plan.saves))
        bench.side.absorb(stored(plan))
    assert max(sizes) <= MAX_SAVES_PER_STEP
    while (plan := bench.step(**dict.fromkeys(names, 0))).saves:
        bench.side.absorb(stored(plan))
    assert bench.side.counts.take()["stored_chunks"] == 2 * len(names)


def test_a_burst_of_long_prompts_is_named_over_several_steps(bench: Bench) -> None:
    tokens = MAX_NAMED_TOKENS_PER_STEP // 4
    burst = [FakeRequest(f"r{n}", [n] * tokens) for n in range(10)]
    asked = []
    for _ in range(4):
        answers = [bench.side.matched_tokens(request, 0) for request in burst]
        asked.append(len(bench.node.asked))
        assert all(answer in [(None, False), (0, False)] for answer in answers)
        bench.side.plan_step(StepOutput({}))
    assert asked[0] == 5  # the one that went over the limit included
    assert asked[-1] == len(burst)


def test_a_prompt_past_the_limit_is_named_in_one_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_NAMED_TOKENS_PER_STEP", 10)
    bench.running("a", 100)
    assert bench.node.asked == ["a"]


def test_pins_of_a_plan_that_broke_off_come_back() -> None:
    pool, pins = BlockPool(8), Pins(ranks=2)
    pins.bind(pool)
    pins.pin(1, [2, 3])
    pins.sent()
    pins.pin(2, [3, 4])
    pins.take_back()
    assert (pins.pending, len(pool.free)) == (1, 6)
    pins.take_back()
    assert not pins.reported(2)
    assert not pins.reported(1)
    assert pins.reported(1)
    assert (pins.pending, len(pool.free)) == (0, 8)


@pytest.mark.parametrize("bench", [{"blocks": 40, "ranks": 2}], indirect=True)
def test_a_report_that_broke_off_is_settled_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counted twice would free blocks that the other rank still copies."""
    bench.running("a", 8)
    bench.running("b", 8)
    plan = bench.step(a=8, b=8)
    report = stored(plan)
    first, second = (save.save_id for save in report.saves)
    honest = SaveBook.reported

    def breaks(book: SaveBook, result: SaveResult) -> int:
        if result.save_id == second:
            raise BrokenError("half way")
        return honest(book, result)

    monkeypatch.setattr(SaveBook, "reported", breaks)
    with pytest.raises(BrokenError):
        bench.side.absorb(report)
    for save in report.saves:  # as the connector does with what is left
        bench.pins.reported(save.save_id)
    assert bench.pins.pending == 2
    assert bench.pins.reported(first)


def test_an_adapter_that_turns_out_unreadable_is_counted_as_ineligible(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "readme").write_text("no weights here")
    request = FakeRequest("a", list(range(40)))
    request.lora_request = SimpleNamespace(
        lora_path=str(tmp_path), lora_name="x", lora_int_id=1, load_inplace=False
    )
    while bench.side.matched_tokens(request, 0)[0] is None:
        pass
    assert bench.side.counts.take() == {"ineligible": 1}


def model_at(path: Path, seed: int) -> SimpleNamespace:
    """An adapter there, and a request's reference to it."""
    model_directory(path, seed=seed)
    return SimpleNamespace(lora_path=str(path), lora_name="x", lora_int_id=1, load_inplace=False)


@pytest.mark.parametrize("in_place", ["same files' path", "another path"])
def test_nothing_is_stored_of_a_request_whose_adapter_was_replaced_while_it_ran(
    bench: Bench, tmp_path: Path, in_place: str
) -> None:
    """The engine goes on with the new weights: what it computes is neither adapter's."""
    bench.running("a", 8 * BLOCK, lora=model_at(tmp_path / "1", 1))
    assert bench.step(a=3 * BLOCK).saves
    if in_place == "another path":
        reloaded = FakeRequest("b", [1] * 40)
        reloaded.lora_request = model_at(tmp_path / "2", 2)
        reloaded.lora_request.load_inplace = True
        assert bench.side.matched_tokens(reloaded, 0) == (0, False)
    else:
        model_at(tmp_path / "1", 2)
    assert not bench.step(a=3 * BLOCK).saves
