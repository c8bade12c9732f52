"""A request's own cap on what is loaded for it: what is asked, what is said, and what becomes of nonsense."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_saving import BLOCK, Bench, EmptyNode

from kvferry.client.messages import LookupAnswer, LookupRequest, Reason, Report
from kvferry.engines.loadcap import NO_CAP, load_cap
from kvferry.testing.fake_engine import FakeRequest

TOKENS = 10 * BLOCK + 1


class FullNode(EmptyNode):
    """Has everything that it is asked for. chunks, reports: what it was asked and told."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[tuple[int, int]] = []
        self.reports: list[Report] = []
        self.ended = 0

    def lookup(self, request: LookupRequest) -> None:
        super().lookup(request)
        self.chunks.append((request.first_chunk, len(request.chunks)))

    def poll(self, request_id: str) -> LookupAnswer | None:
        first, chunks = self.chunks[-1]
        n, whole = chunks - first, Reason.COMPLETE
        return LookupAnswer(request_id, n, 1, n, first, (0,) * n, ((None,),) * n, 9.0, 9.0, 1e9, whole)

    def end(self, load_id: int) -> None:
        self.ended += 1

    def report(self, report: Report) -> None:
        self.reports.append(report)


@pytest.fixture
def node() -> FullNode:
    return FullNode()


@pytest.fixture
def bench(node: FullNode) -> Iterator[Bench]:
    made = Bench(blocks=100, chunk_blocks=2, node=node)
    yield made
    made.side.close()
    made.adapters.close()


def asks(params: Any, name: str = "r") -> FakeRequest:
    return FakeRequest(name, list(range(TOKENS)), kv_transfer_params=params)


def test_the_node_is_asked_for_the_whole_chunks_within_the_cap(bench: Bench, node: FullNode) -> None:
    request = asks({"max_load_tokens": 5 * BLOCK})
    assert bench.side.matched_tokens(request, 0) == (4 * BLOCK, True)
    assert node.chunks == [(0, 2)]
    bench.side.finished(request)
    assert node.reports[0].note == f"max_load_tokens {5 * BLOCK}"


@pytest.mark.parametrize("cap", [0, 1, 2 * BLOCK - 1])
def test_nothing_is_asked_where_the_cap_holds_no_chunk(bench: Bench, node: FullNode, cap: int) -> None:
    request = asks({"max_load_tokens": cap})
    assert bench.side.matched_tokens(request, 0) == (0, False)
    assert bench.side.matched_tokens(request, 0) == (0, False)
    assert node.chunks == []
    assert bench.side.counts.take() == {"capped": 1}
    bench.side.finished(request)
    said = node.reports[0]
    assert (said.reason, said.note) == ("capped by the request", f"max_load_tokens {cap}")


def test_a_prompt_that_the_engine_has_itself_is_not_counted_as_capped(bench: Bench, node: FullNode) -> None:
    request = asks({"max_load_tokens": 0})
    assert bench.side.matched_tokens(request, 10 * BLOCK) == (0, False)
    assert bench.side.counts.take() == {}
    bench.side.finished(request)
    assert node.reports[0].reason == "in the engine itself"


def test_an_engine_that_lost_some_of_its_own_since_it_asked_asks_again(bench: Bench, node: FullNode) -> None:
    """What is missing of the first chunk would come on top of what the request allows."""
    request = asks({"max_load_tokens": 3 * BLOCK})
    assert bench.side.matched_tokens(request, 3 * BLOCK) == (3 * BLOCK, True)
    assert bench.side.matched_tokens(request, 2 * BLOCK) == (None, False)
    assert node.ended == 1
    assert bench.side.matched_tokens(request, 2 * BLOCK) == (2 * BLOCK, True)
    assert node.chunks == [(1, 3), (1, 2)]
    bench.side.finished(request)


def test_nonsense_is_said_once_in_the_log_and_with_each_request(
    bench: Bench, node: FullNode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.kvferry"):
        for number, cap in enumerate((-1, "7", True)):
            request = asks({"max_load_tokens": cap}, f"r{number}")
            assert bench.side.matched_tokens(request, 0) == (10 * BLOCK, True)
            bench.side.finished(request)
    assert [record.getMessage() for record in caplog.records] == [
        "kvferry: request r0: max_load_tokens is negative, not a whole number of tokens from 0 up: ignored "
        "(said once)"
    ]
    assert [report.note.split(",")[0] for report in node.reports] == [
        "max_load_tokens is negative",
        "max_load_tokens is '7'",
        "max_load_tokens is True",
    ]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(anything)
def test_whatever_a_client_sends_is_a_cap_or_a_line_that_says_why_not(given: Any) -> None:
    cap = load_cap({"max_load_tokens": given})
    if given is None:
        assert cap == NO_CAP
    elif type(given) is int and given >= 0:
        assert (cap.tokens, cap.problem) == (given, "")
    else:
        assert cap.tokens is None
        assert cap.problem
        assert "\n" not in cap.note
    other = load_cap(given)
    assert len(cap.note + other.problem) < 4 * 512 or type(given) is int


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"max_offload_tokens": 0}])
def test_parameters_for_others_are_no_cap(params: Any) -> None:
    assert load_cap(params) is NO_CAP
