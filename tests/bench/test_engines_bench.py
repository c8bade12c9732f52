"""The engine benchmark: pairs stay pairs, faults count for nothing, aims are judged by medians."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench import engine_report
from kvferry.bench.engine_arms import MEMORY, VALKEY, Arms, Pair, Results, Versus
from kvferry.bench.prompts import Prompts
from kvferry.bench.spread import spread
from kvferry.demo.ask import Question, Reply
from kvferry.demo.fleet import Fleet

positive = st.floats(0.01, 100.0)


def _pair(*, load: float, own: float = 0.5, fault: str = "") -> Pair:
    return Pair(engine_report.FIXED, MEMORY, 6020, 5888, load, own, 0.05, 135_000_000, fault)


def test_a_ratio_is_the_median_of_the_pairs_own_ratios() -> None:
    results = Results(pairs=[_pair(load=0.5), _pair(load=2.0, own=2.0), _pair(load=1.0)])
    figure = engine_report.figures(results)[0]
    assert (figure.ratio.median, figure.ratio.n) == (1.0, 3)
    assert figure.met is True


def test_a_pair_that_measured_something_else_does_not_count_and_is_named() -> None:
    results = Results(pairs=[_pair(load=0.5), _pair(load=50.0, fault="came from computed")])
    assert engine_report.figures(results)[0].ratio.n == 1
    assert engine_report.faults(results) == ["fixed length, host memory: came from computed"]


def test_a_missed_aim_is_shown() -> None:
    results = Results(pairs=[_pair(load=0.7)], versus=[Versus("cold", 1.1, 1.0, 0.01)])
    assert engine_report.figures(results)[0].met is False
    assert "NO" in engine_report.terminal(results)
    assert json.loads(json.dumps(engine_report.document(results, {})))["figures"][0]["met"] is False
    assert "<svg" in engine_report.html(results, {"n": 1})


def test_nothing_measured_makes_no_rows() -> None:
    assert engine_report.figures(Results()) == []


@given(values=st.lists(positive, min_size=1, max_size=30))
def test_the_quartiles_enclose_the_median(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_prefixes_of_one_run_share_no_block() -> None:
    prompts = Prompts(1)
    first, second = prompts.tokens(1024), prompts.tokens(1024)
    assert all(first[at : at + 16] != second[at : at + 16] for at in range(0, 1024, 16))
    assert Prompts(1).tokens(64) == first[:64]


BLOCK = 128
PREFIX = 6000
BOUNDARY = PREFIX // BLOCK * BLOCK


@dataclass
class FakeNode:
    """Remembers where each request's chunks came from. forgets: it knows no request."""

    forgets: bool = False
    in_memory: bool = True
    records: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def committed_parts(self) -> int:
        return 0

    def wait_saved(self, *, parts: int) -> None:
        self.in_memory = True

    def wait_written_back(self) -> None: ...

    def drop_memory(self) -> None:
        self.in_memory = False

    def settled_records(self, request_id: str) -> list[dict[str, Any]]:
        return [] if self.forgets else [self.records[request_id]]


@dataclass
class FakeEngine:
    """Keeps a prefix of its own once so many questions about it were loaded; own_tokens: of such a hit."""

    node: FakeNode
    keeps_after: int
    own_tokens: int = BOUNDARY
    loads: int = 0

    def reset_prefix_cache(self) -> None:
        self.loads = 0

    def ask(self, question: Question) -> Reply:
        own = self.loads >= self.keeps_after
        tier = "memory" if self.node.in_memory else "valkey"
        self.node.in_memory = True
        self.loads += 1
        chunks = {} if own else {tier: BOUNDARY // BLOCK}
        report = {"reason": "absent", "load_s": 0.01, "loaded_bytes": 1}
        self.node.records[question.request_id] = {"reused_chunks": chunks, "report": report}
        cached = self.own_tokens if own else BOUNDARY
        return Reply(question.request_id, "", 0.5, 0.6, len(question.prompt), cached, 2, ())


@dataclass
class FakeFleet:
    """One that computes and one that loads."""

    node_view: FakeNode
    replicas: dict[str, FakeEngine]


def _pairs(*, keeps_after: int, own_tokens: int = BOUNDARY, node_forgets: bool = False) -> list[Pair]:
    node = FakeNode(forgets=node_forgets)
    replicas = {name: FakeEngine(node, keeps_after, own_tokens) for name in ("A", "B")}
    arms = Arms(
        fleet=cast(Fleet, FakeFleet(node, replicas)),
        prompts=Prompts(1),
        block_tokens=BLOCK,
        gap_s=0.0,
        say=lambda text: None,
        hooks_s=lambda: 0.0,
    )
    return arms.pairs(engine_report.FIXED, prefix_tokens=PREFIX, repeats=1)


@pytest.mark.parametrize("keeps_after", [1, 2], ids=["full attention", "windows"])
def test_an_own_hit_is_asked_for_once_the_engine_keeps_the_boundary(keeps_after: int) -> None:
    assert [(pair.tier, pair.fault) for pair in _pairs(keeps_after=keeps_after)] == [
        (MEMORY, ""),
        (VALKEY, ""),
    ]


def test_an_own_hit_that_came_from_the_node_does_not_count() -> None:
    for pair in _pairs(keeps_after=100):
        assert pair.fault == "the own hit came from host memory, not own cache (absent)"


def test_an_own_hit_of_another_length_does_not_count() -> None:
    for pair in _pairs(keeps_after=2, own_tokens=BOUNDARY - BLOCK):
        assert pair.fault == f"the own hit reused {BOUNDARY - BLOCK} tokens, not {BOUNDARY}"


def test_a_load_from_nowhere_near_the_tier_does_not_count() -> None:
    for pair in _pairs(keeps_after=0):
        wanted = "host memory" if pair.tier == MEMORY else "Valkey"
        assert pair.fault == f"the load came from own cache, not {wanted} (absent)"


def test_a_pair_of_which_the_node_knows_nothing_does_not_count() -> None:
    for pair in _pairs(keeps_after=2, node_forgets=True):
        assert pair.fault == "the load has no record at the node; the own hit has no record at the node"
