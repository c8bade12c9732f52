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
# Without a warm-up, vLLM's CPU backend never makes what a later stage receives.
PIPELINE = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager", "cudagraph_mode": "NONE"},
}


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


class TestTensorAndPipelineRanks:
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

    def test_two_stages_store_and_another_engine_of_two_stages_loads(
        self, engine_of: Callable[..., Engine], node: NodeProcess
    ) -> None:
        asked, before = prompt(1, TOKENS), node.chunks()
        first = engine_of("llama", cores=BOTH, **PIPELINE)
        assert first.generate(asked)["cached"] == 0
        own = first.generate(asked)
        _until_stored(node, before + REUSED // BLOCK)
        computed = first.digests()
        first.close()
        second = engine_of("llama", cores=BOTH, **PIPELINE)
        loaded = until_cached(second, asked, REUSED)
        assert loaded["tokens"] == own["tokens"]
        assert len(computed & second.digests()) >= 2 * REUSED // BLOCK

    def test_an_engine_of_one_rank_reads_nothing_of_either(self, engine_of: Callable[..., Engine]) -> None:
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

    def test_latent_attention_is_stored_once_and_loaded_by_an_engine_of_another_size(
        self, engine_of: Callable[..., Engine], node: NodeProcess
    ) -> None:
        asked, before = prompt(2, TOKENS), parts(node)
        blocks = (TOKENS - 1) // 16
        two = engine_of("deepseek", cores=BOTH, tensor_parallel_size=2, keep_prefix_caching=True)
        short = {"max_tokens": 4}  # ends within a block
        two.generate(asked, params=short)
        own = two.generate(asked, params=short)
        assert _loaded(two, asked, 16 * blocks, params=short)["tokens"] == own["tokens"]
        assert parts(node) - before == blocks
        computed = two.digests()
        two.close()
        one = engine_of("deepseek", cores="0", keep_prefix_caching=True)
        loaded = until_cached(one, asked, 16 * blocks, params=short)
        assert loaded["tokens"] == one.generate(asked, params=short)["tokens"]
        assert len(computed & one.digests()) >= blocks
        assert parts(node) - before == blocks


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


def _loaded(engine: Engine, asked: list[int], cached: int, **options: Any) -> dict[str, Any]:
    """The answer of an engine whose own memory is empty and holds zeros."""
    engine.reset()
    engine.ask("scrub")
    return until_cached(engine, asked, cached, **options)


def _until_stored(node: NodeProcess, chunks: int) -> None:
    give_up = time.monotonic() + REUSE_S
    while node.chunks() < chunks:
        assert time.monotonic() < give_up, f"{node.chunks()} of {chunks} chunks were stored"
        time.sleep(0.05)


def _shared_between_ranks(server: Server, node: NodeProcess, asked: list[int]) -> int:
    """Tokens that rank 1 had not to compute, since rank 0 had."""
    before = node.chunks()
    assert server.cached(asked, rank=0) == 0
    give_up = time.monotonic() + REUSE_S
    while node.chunks() < before + REUSED // BLOCK and time.monotonic() < give_up:
        time.sleep(0.05)
    return server.cached(asked, rank=1)
