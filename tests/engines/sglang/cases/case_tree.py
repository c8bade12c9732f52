"""SGLang's radix cache with hierarchical caching: a whole turn, from one engine's device memory to another's.

The copies between device and host memory, CUDA kernels in SGLang, are torch's here; all else is its own.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sglang.cases import rig
from tests.engines.sglang.cases.tree import replicas

from kvferry.node.node import Node
from kvferry.testing.holdings import at_rest


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    return rig.start_node(tmp_path / "host", stack)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return rig.model(tmp_path / "model")


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_what_one_engine_computed_another_has_in_its_device_memory(
    layout: str, model: Path, node: Node, stack: ExitStack
) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack, hicache_mem_layout=layout)
    computed = here.compute(rig.tokens(5))
    here.settle()
    there.prefetch(rig.tokens(6))
    assert there.loaded(rig.tokens(6)) == computed
    at_rest(node)


def test_a_second_turn_continues_the_first(model: Path, node: Node, stack: ExitStack) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack)
    first = here.compute(rig.tokens(3))
    here.settle()
    there.prefetch(rig.tokens(4))
    assert there.loaded(rig.tokens(4)) == first
    there.compute(rig.tokens(7))  # the pages that it has, and four more
    there.settle()
    here.prefetch(rig.tokens(8))
    assert here.loaded(rig.tokens(8)) == there.loaded(rig.tokens(8))
    assert here.match(rig.tokens(8)).device_prefix_len == 7 * rig.PAGE


def test_a_flushed_engine_finds_its_own_pages_again(model: Path, node: Node, stack: ExitStack) -> None:
    (engine,) = replicas(1, model, node.settings.socket_path, stack)
    computed = engine.compute(rig.tokens(5))
    engine.settle()
    engine.flush()
    assert engine.match(rig.tokens(5)).host_hit_length == 0
    engine.prefetch(rig.tokens(5))
    assert engine.loaded(rig.tokens(5)) == computed


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_under_every_prefetch_policy_a_request_runs_with_pages_that_are_right(
    policy: str, model: Path, node: Node, stack: ExitStack
) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack, hicache_storage_prefetch_policy=policy)
    computed = here.compute(rig.tokens(5))
    here.settle()
    there.prefetch(rig.tokens(6))  # which best_effort may end before anything has come
    came = there.loaded(rig.tokens(6))
    assert all(whole.startswith(part) for whole, part in zip(computed, came, strict=True))
    if policy != "best_effort":
        assert came == computed


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_every_write_policy_stores_what_it_means_to(
    policy: str, model: Path, node: Node, stack: ExitStack
) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack, hicache_write_policy=policy)
    computed = here.compute(rig.tokens(4))
    here.settle()
    if policy == "write_through_selective":
        there.prefetch(rig.tokens(4))
        assert not any(there.loaded(rig.tokens(4)))  # not before it was used twice
        here.compute(rig.tokens(4))  # of which the tree keeps what it had
    if policy == "write_back":
        here.evict(4)
    here.settle()
    there.prefetch(rig.tokens(4))
    assert there.loaded(rig.tokens(4)) == computed


def test_users_with_different_salts_share_nothing(model: Path, node: Node, stack: ExitStack) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack)
    computed = here.compute(rig.tokens(4), salt="one")
    here.settle()
    for salt in (None, "two"):
        there.prefetch(rig.tokens(4), salt=salt)
        assert not any(there.loaded(rig.tokens(4), salt=salt))
    there.prefetch(rig.tokens(4), salt="one")
    assert there.loaded(rig.tokens(4), salt="one") == computed


def test_an_engine_goes_on_when_its_node_ends(model: Path, node: Node, stack: ExitStack) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack)
    here.compute(rig.tokens(4))
    here.settle()
    node.close()
    there.prefetch(rig.tokens(4))
    assert not any(there.loaded(rig.tokens(4)))
    computed = there.compute(rig.tokens(4))
    there.settle()
    assert there.loaded(rig.tokens(4)) == computed


def test_clearing_the_storage_by_sglangs_own_call_hides_it_from_this_engine(
    model: Path, node: Node, stack: ExitStack
) -> None:
    here, there = replicas(2, model, node.settings.socket_path, stack)
    computed = here.compute(rig.tokens(4))
    here.settle()
    assert here.cache.clear_storage_backend()
    here.flush()
    here.prefetch(rig.tokens(4))
    assert not any(here.loaded(rig.tokens(4)))
    there.prefetch(rig.tokens(4))
    assert there.loaded(rig.tokens(4)) == computed
