"""A step compares what it should: tokens with tokens, blocks with blocks."""

from typing import Any, cast

from tests.demo.steps_made import reply

from kvferry.demo.fleet import Fleet
from kvferry.demo.scenario import Facts, Scenario
from kvferry.demo.steps import Source

COMPUTED = frozenset(f"block{number}" for number in range(47))


class _Replica:
    def __init__(self, digests: frozenset[str]) -> None:
        self._digests = digests

    def worker_call(self, method: str) -> list[dict[str, Any]]:
        """The probe's answer."""
        return [{"digests": sorted(self._digests)}]


class _NodeView:
    def settled_records(self, request_id: str) -> list[dict[str, Any]]:
        """A load of everything from host memory."""
        return [{"reused_chunks": {"memory": 46}, "reused_bytes": {"memory": 4600}, "chunk_tokens": 128}]


class _Fleet:
    def __init__(self, digests: frozenset[str]) -> None:
        self.replicas = {"B": _Replica(digests)}
        self.node_view = _NodeView()


def _scenario(digests: frozenset[str]) -> Scenario:
    scenario = Scenario(cast(Fleet, _Fleet(digests)), say=lambda _: None)
    scenario.block_tokens = 128
    scenario.establish(Facts(reply(cached=0), COMPUTED))
    return scenario


def test_a_load_is_right_with_all_its_tokens_and_blocks() -> None:
    held = frozenset(sorted(COMPUTED)[:46]) | {"a tail of its own"}
    step = _scenario(held).step("k", "t", "B", reply(), allowed=(Source.MEMORY,), wanted=5888, loaded=True)
    assert step.blocks is not None
    assert (step.blocks.equal, step.blocks.wanted) == (46, 46)
    assert step.problems == ()
    assert step.loaded_bytes == 4600


def test_one_block_that_differs_is_a_problem() -> None:
    held = frozenset(sorted(COMPUTED)[:45]) | {"a wrong block"}
    step = _scenario(held).step("k", "t", "B", reply(), allowed=(Source.MEMORY,), wanted=5888, loaded=True)
    assert step.problems == ("only 45 of 46 blocks have the computed bytes",)


def test_a_recompute_has_to_lead_to_every_block() -> None:
    made = _scenario(COMPUTED).step(
        "k", "t", "B", reply(cached=0), allowed=(Source.COMPUTED,), wanted=0, computed_like=COMPUTED
    )
    assert made.blocks is not None
    assert (made.blocks.equal, made.blocks.wanted) == (47, 47)
    assert made.problems == ()
    assert made.loaded_bytes == 0
