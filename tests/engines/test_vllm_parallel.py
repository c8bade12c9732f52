"""Real engines of several processes each: tensor, pipeline and data parallel ranks, and the parts they share.

The engines of a class use one node, one after the other.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, Server, arguments
from tests.engines.vllm_requests import BLOCK, REUSE_S, prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS, REUSED = 700, 640
BOTH = "0|1"


@pytest.fixture(scope="class")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


@pytest.fixture
def engine_of(node: NodeProcess, models: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(model: str, *, cores: str, **more: Any) -> Engine:
        options = arguments(models / model, node.socket, **more)
        started.append(Engine(f"{model}{len(started)}", directory=tmp_path, cores=cores, arguments=options))
        return started[-1].ready()

    yield start
    for engine in started:
        engine.close()


def parts(node: NodeProcess) -> int:
    """How many are in the node's memory, when nothing is under way."""
    return int(node.statistics()["catalogue"]["ready_parts"])


class TestTensorRanks:
    """One model, one prompt: each shape of engine stores it under a name of its own."""

    def test_two_ranks_store_and_load_their_own_parts(self, engine_of: Callable[..., Engine]) -> None:
        engine = engine_of("llama", cores=BOTH, tensor_parallel_size=2)
        asked = prompt(1, TOKENS)
        engine.generate(asked)
        own = engine.generate(asked)
        computed = engine.digests()
        loaded = _loaded(engine, asked, REUSED)
        assert loaded["tokens"] == own["tokens"]
        assert engine.ask("metrics")["vllm:kvferry_loaded_tokens"] >= REUSED
        assert len(computed & engine.digests()) >= 2 * REUSED // BLOCK

    def test_an_engine_of_one_rank_reads_nothing_of_theirs(self, engine_of: Callable[..., Engine]) -> None:
        engine = engine_of("llama", cores="0")
        asked = prompt(1, TOKENS)
        cold = engine.generate(asked)
        own = engine.generate(asked)
        assert (cold["cached"], own["cached"]) == (0, REUSED)
        assert _loaded(engine, asked, REUSED)["tokens"] == own["tokens"]


class TestEqualRanks:
    """Ranks that hold the same bytes: one part for all of them, whatever their number."""

    def test_two_ranks_with_one_kv_head_store_each_chunk_once(
        self, engine_of: Callable[..., Engine], node: NodeProcess
    ) -> None:
        engine = engine_of("onehead", cores=BOTH, tensor_parallel_size=2)
        asked, before = prompt(1, TOKENS), parts(node)
        engine.generate(asked)
        own = engine.generate(asked)
        loaded = _loaded(engine, asked, REUSED)
        assert loaded["tokens"] == own["tokens"]
        assert parts(node) - before == REUSED // BLOCK


class TestDataParallelRanks:
    def test_two_data_parallel_ranks_share_the_pool(
        self, node: NodeProcess, models: Path, tmp_path: Path
    ) -> None:
        server = Server(models / "llama", directory=tmp_path, socket=node.socket, cores=BOTH)
        try:
            server.ready()
            # Each prompt is asked once, and a busy node may be too late for one.
            assert any(
                _shared_between_ranks(server, node, prompt(n, TOKENS)) == REUSED for n in range(21, 26)
            )
        finally:
            server.close()


def _loaded(engine: Engine, asked: list[int], cached: int) -> dict[str, Any]:
    """The answer of an engine whose own memory is empty and holds zeros."""
    engine.reset()
    engine.ask("scrub")
    return until_cached(engine, asked, cached)


def _shared_between_ranks(server: Server, node: NodeProcess, asked: list[int]) -> int:
    """Tokens that rank 1 had not to compute, since rank 0 had."""
    before = node.chunks()
    assert server.cached(asked, rank=0) == 0
    give_up = time.monotonic() + REUSE_S
    while node.chunks() < before + REUSED // BLOCK and time.monotonic() < give_up:
        time.sleep(0.05)
    return server.cached(asked, rank=1)
