"""Real vLLM engines over a real node. Engines are shared by the tests of a class, in order."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, EngineError, NodeProcess, arguments
from tests.engines.vllm_requests import BLOCK, prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="class")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


class Replicas:
    """Two replicas of one model, one core each."""

    def __init__(self, start: Callable[..., Engine]) -> None:
        self.start = start
        first, second = start("a", cores="0"), start("b", cores="1")
        self.a, self.b = first.ready(), second.ready()


@pytest.fixture(scope="class")
def replicas(node: NodeProcess, models: Path, tmp_path_factory: Any) -> Iterator[Replicas]:
    directory, started = tmp_path_factory.mktemp("engines"), []

    def start(name: str, *, cores: str, **more: Any) -> Engine:
        options = arguments(models / "llama", node.socket, **{**LORA, **more})
        started.append(Engine(name, directory=directory, cores=cores, arguments=options))
        return started[-1]

    try:
        yield Replicas(start)
    finally:
        for engine in started:
            engine.close()


class TestTwoReplicas:
    def test_b_reuses_what_a_computed_and_says_the_same_as_with_an_own_hit(self, replicas: Replicas) -> None:
        asked = prompt(1, 700)
        cold = replicas.a.generate(asked)
        own = replicas.a.generate(asked)
        loaded = until_cached(replicas.b, asked, 640)
        assert cold["cached"] == 0
        assert (own["cached"], own["tokens"]) == (640, loaded["tokens"])
        metrics = replicas.b.ask("metrics")
        assert metrics["vllm:external_prefix_cache_hits"] == 640
        assert metrics["vllm:kvferry_loaded_tokens"] == 640

    def test_loaded_blocks_hold_the_computed_bytes(self, replicas: Replicas) -> None:
        computed = replicas.a.digests()
        both = computed & replicas.b.digests()
        assert len(both) >= 640 // BLOCK

    def test_a_prompt_that_is_stored_whole_is_answered(self, replicas: Replicas) -> None:
        asked = prompt(2, 4 * BLOCK)
        replicas.a.generate(asked)
        own = replicas.a.generate(asked)
        loaded = until_cached(replicas.b, asked, 3 * BLOCK)
        assert loaded["tokens"] == own["tokens"]

    def test_prompt_logprobs_are_computed_and_not_counted_as_a_miss(self, replicas: Replicas) -> None:
        asked = prompt(1, 700)
        before = replicas.b.ask("metrics")
        replicas.b.generate(asked, params={"prompt_logprobs": 1})
        after = replicas.b.ask("metrics")
        assert after["vllm:kvferry_ineligible"] == before.get("vllm:kvferry_ineligible", 0) + 1
        assert after.get("vllm:kvferry_misses") == before.get("vllm:kvferry_misses")

    def test_salts_separate_users(self, replicas: Replicas) -> None:
        asked = prompt(1, 700)
        replicas.b.reset()
        assert replicas.b.generate(asked, salt="someone else")["cached"] == 0

    def test_a_malformed_salt_is_an_error_or_uncached_and_the_engine_lives(self, replicas: Replicas) -> None:
        asked = prompt(1, 700)
        for salt in ("x" * 100_000, "@/\\\0", " "):  # vLLM's own client cannot send what is not Unicode
            with contextlib.suppress(EngineError):
                assert replicas.a.generate(asked, salt=salt)["cached"] == 0
        assert replicas.a.generate(asked)["cached"] == 640

    def test_adapters_are_told_apart_by_content(self, replicas: Replicas, models: Path) -> None:
        asked, path = prompt(3, 500), [str(models / f"adapter{n}") for n in (1, 2)]
        plain = replicas.a.generate(asked)
        first = replicas.a.generate(asked, adapter=["x", 1, path[0]])
        assert first["cached"] == 0
        own = replicas.a.generate(asked, adapter=["x", 1, path[0]])
        same = until_cached(replicas.b, asked, 384, adapter=["another name", 7, path[0]])
        other = replicas.b.generate(asked, adapter=["x", 8, path[1]])
        assert (own["tokens"], other["cached"]) == (same["tokens"], 0)
        assert plain["tokens"] != first["tokens"] or other["tokens"] != first["tokens"]

    def test_an_abort_right_after_the_start_leaves_nothing_behind(self, replicas: Replicas) -> None:
        asked = prompt(4, 900)
        replicas.a.generate(asked)
        for steps in (1, 2, 3):
            replicas.b.ask("start_and_abort", prompt=asked, steps=steps)
            replicas.b.reset()
        assert until_cached(replicas.b, asked, 896)["tokens"] == replicas.a.generate(asked)["tokens"]

    def test_requests_survive_a_stopped_and_a_killed_node_and_reuse_comes_back(
        self, replicas: Replicas, node: NodeProcess
    ) -> None:
        asked = prompt(1, 700)
        own = replicas.a.generate(asked)
        replicas.b.reset()
        node.pause()
        began = time.monotonic()
        assert len(replicas.b.generate(asked)["tokens"]) == 8
        assert time.monotonic() - began < 60
        node.resume()
        node.kill()
        replicas.b.reset()
        assert len(replicas.b.generate(asked)["tokens"]) == 8
        node.start()
        again = prompt(5, 700)
        replicas.a.generate(again)  # from now on an own hit, which is stored again in the new node
        replicas.b.reset()
        until_cached(replicas.b, again, 640, helper=replicas.a, node=node)
        replicas.b.reset()
        loaded = until_cached(replicas.b, asked, 640, helper=replicas.a, node=node)
        assert loaded["tokens"] == own["tokens"]

    def test_a_restarted_engine_is_warm_and_scarce_blocks_preempt_without_harm(
        self, replicas: Replicas
    ) -> None:
        asked = prompt(5, 700)
        own = replicas.a.generate(asked)
        replicas.b.close()
        fresh = replicas.start("c", cores="1", num_gpu_blocks_override=14, max_model_len=1024).ready()
        assert until_cached(fresh, asked, 640)["tokens"] == own["tokens"]
        many = [{"prompt": prompt(10 + n, 500), "params": {"max_tokens": 150}} for n in range(6)]
        scarce = [found["tokens"] for found in fresh.ask("generate", many=many)]
        assert [len(tokens) for tokens in scarce] == [150] * 6
        fresh.reset()
        assert fresh.ask("metrics")["vllm:num_preemptions"] > 0


@pytest.fixture
def engine_of(node: NodeProcess, models: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(model: str, *, cores: str, **more: Any) -> Engine:
        options = arguments(models / model, node.socket, **more)
        started.append(Engine(model, directory=tmp_path, cores=cores, arguments=options))
        return started[-1].ready()

    yield start
    for engine in started:
        engine.close()


class TestOtherEngines:
    def test_an_engine_that_cannot_be_served_runs_uncached_with_one_warning(
        self, engine_of: Callable[..., Engine]
    ) -> None:
        engine = engine_of("llama", cores="0", enable_prefix_caching=False)
        asked = prompt(1, 700)
        tokens = engine.generate(asked)["tokens"]
        engine.reset()
        assert engine.generate(asked) == {"tokens": tokens, "cached": 0}
        warnings = [line for line in engine.text().splitlines() if "served without the shared cache" in line]
        assert len(warnings) == 1
        assert "prefix caching switched off" in warnings[0]
