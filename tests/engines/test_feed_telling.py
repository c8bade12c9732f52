"""Those who follow a node hear of each request once, also of those for which nothing is looked up."""

from collections.abc import Iterator

import pytest
from tests.engines.test_saving import BLOCK, Bench

from kvferry.testing.fake_engine import FakeRequest


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(blocks=100)
    made.node.followed = True
    yield made
    made.side.close()
    made.adapters.close()


def ask(bench: Bench, request: FakeRequest, local_tokens: int) -> None:
    for _ in range(3):  # vLLM asks again while a request waits
        assert bench.side.matched_tokens(request, local_tokens)[0] is not None


def test_what_the_engine_has_all_itself_is_told_of_with_its_chunks(bench: Bench) -> None:
    ask(bench, FakeRequest("r", list(range(3 * BLOCK + 1))), 3 * BLOCK)
    assert bench.node.came_by == {"r": (3, 3 * BLOCK + 1, 3 * BLOCK)}
    assert bench.node.asked == []


def test_what_is_shorter_than_a_chunk_is_told_of_without_any(bench: Bench) -> None:
    ask(bench, FakeRequest("r", [1, 2]), 0)
    assert bench.node.came_by == {"r": (0, 2, 0)}


def test_what_may_not_read_is_told_of_too(bench: Bench) -> None:
    request = FakeRequest("r", list(range(2 * BLOCK)))
    request.skip_reading_prefix_cache = True
    ask(bench, request, 0)
    assert bench.node.came_by == {"r": (2, 2 * BLOCK, 0)}


def test_what_is_looked_up_is_told_of_by_that(bench: Bench) -> None:
    request = FakeRequest("r", list(range(3 * BLOCK + 1)))
    while bench.side.matched_tokens(request, BLOCK)[0] is None:
        pass
    assert bench.node.asked == ["r"]
    assert bench.node.came_by == {}


def test_where_nobody_follows_nothing_is_named_or_told(bench: Bench) -> None:
    bench.node.followed = False
    ask(bench, FakeRequest("r", list(range(3 * BLOCK + 1))), 3 * BLOCK)
    assert bench.node.came_by == {}
