"""One real engine through what happens in its life; every answer is compared with that of an own hit.

The engine prefills in steps of 256 tokens, schedules by priority and has few blocks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, make_models
from tests.engines.vllm_life import MODELS, life_engine, until_stored
from tests.engines.vllm_models import HIDDEN
from tests.engines.vllm_requests import prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEP_TOKENS = 256
BLOCKS = 24
TRIES = 20
FOREIGN = {
    "do_remote_prefill": True,
    "remote_engine_id": "elsewhere",
    "remote_block_ids": [[1, 2]],
    "kvferry": 5,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_models(tmp_path_factory.mktemp("life"), "other_llama", module=MODELS) / "other_llama"


@pytest.fixture(scope="module")
def engine(node: NodeProcess, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    started = life_engine(
        "life",
        models / "llama",
        node,
        tmp_path_factory.mktemp("engine"),
        max_num_batched_tokens=STEP_TOKENS,
        scheduling_policy="priority",
        num_gpu_blocks_override=BLOCKS,
        enable_prompt_embeds=True,
    )
    try:
        yield started.ready()
    finally:
        started.close()


def _own(engine: Engine, asked: list[int], **options: Any) -> list[int]:
    """The answer with a hit in the engine's own cache."""
    engine.generate(asked, **options)
    tokens: list[int] = engine.generate(asked, **options)["tokens"]
    return tokens


def _first_time(attempt: Callable[[int], int], wanted: int) -> bool:
    """With one of five seeds: a busy node may be too late for a prompt that is asked only once."""
    return any(attempt(seed) == wanted for seed in range(1000, 1005))


def test_a_prompt_of_many_steps_is_stored_and_loaded(engine: Engine) -> None:
    asked = prompt(1, 1500)
    own = _own(engine, asked)
    engine.reset()
    assert until_cached(engine, asked, 1408)["tokens"] == own


def test_an_answer_is_found_as_the_next_turns_prefix(engine: Engine, node: NodeProcess) -> None:
    def next_turn(seed: int) -> int:
        before, asked = node.chunks(), prompt(seed, 200)
        answer = engine.generate(asked, params={"max_tokens": 200})["tokens"]
        until_stored(node, before + 3)
        engine.reset()
        turn = [*asked, *answer, *prompt(seed + 1, 50)]
        found = engine.generate(turn)
        own = engine.generate(turn)
        assert found["tokens"] == own["tokens"] or not found["cached"]
        return int(found["cached"])

    assert _first_time(next_turn, 384)


def test_every_answer_of_one_request_is_that_of_an_own_hit(engine: Engine) -> None:
    asked = prompt(2, 500)
    own = _own(engine, asked)
    engine.reset()
    until_cached(engine, asked, 384)
    engine.reset()
    three = {"n": 3, "temperature": 1.0, "top_k": 1}
    assert engine.ask("generate_n", prompt=asked, params=three) == [own] * 3


def test_a_request_loads_no_more_than_it_allows(engine: Engine) -> None:
    asked = prompt(3, 500)
    until_cached(engine, asked, 384)

    def loaded(cap: Any) -> int:
        engine.reset()
        params = {"extra_args": {"kv_transfer_params": {"max_load_tokens": cap}}}
        return int(engine.generate(asked, params=params)["cached"])

    for cap, wanted in ((0, 0), (300, 256), (384, 384), (-1, 384), ("none", 384)):
        tries = []
        while wanted not in tries and len(tries) < TRIES:  # a busy node's answer may come too late
            tries.append(loaded(cap))
        assert set(tries) <= {0, wanted}
        assert wanted in tries


def test_transfer_parameters_for_other_connectors_change_nothing(engine: Engine) -> None:
    asked = prompt(4, 500)
    own = _own(engine, asked)
    engine.reset()
    params = {"extra_args": {"kv_transfer_params": FOREIGN}}
    assert until_cached(engine, asked, 384, params=params)["tokens"] == own


def test_prompt_embeddings_are_computed_and_counted_as_taking_no_part(
    engine: Engine, node: NodeProcess
) -> None:
    before, stored = engine.ask("metrics"), node.chunks()
    one = engine.ask("embeds", seed=1, tokens=400, width=HIDDEN)
    engine.reset()
    assert engine.ask("embeds", seed=1, tokens=400, width=HIDDEN) == one
    other = engine.ask("embeds", seed=2, tokens=400, width=HIDDEN)
    assert one["cached"] == other["cached"] == 0
    counted = "vllm:kvferry_ineligible"
    assert engine.ask("metrics")[counted] == before.get(counted, 0) + 3
    assert node.chunks() == stored


def test_what_is_preempted_for_priority_is_answered_and_what_it_stored_is_right(engine: Engine) -> None:
    """The urgent request grows until the engine takes blocks from the latest of the others."""
    many = [{"prompt": prompt(20 + n, 500), "params": {"max_tokens": 200}, "priority": 9} for n in range(3)]
    urgent = {"prompt": prompt(30, 1000), "params": {"max_tokens": 300}, "priority": 0}
    before = engine.ask("metrics").get("vllm:num_preemptions", 0)
    answers = engine.ask("late", many=many, urgent=urgent, steps=12)
    assert [len(tokens) for tokens in answers] == [200] * 3 + [300]
    assert engine.ask("metrics")["vllm:num_preemptions"] > before
    for one, cached in ((many[2], 384), (urgent, 896)):
        own = _own(engine, one["prompt"])
        engine.reset()
        assert until_cached(engine, one["prompt"], cached)["tokens"] == own


def test_a_storm_of_aborts_leaves_nothing_behind(engine: Engine, node: NodeProcess) -> None:
    for seed in (1, 2):
        many = [{"prompt": prompt(40 + n % 6, 300 + 100 * (n % 5))} for n in range(24)]
        engine.ask("storm", seed=seed, many=many, aborts=0.45)
        engine.reset()
    asked = prompt(40, 700)
    own = _own(engine, asked)
    engine.reset()
    assert until_cached(engine, asked, 640)["tokens"] == own
    node.wait_for(lambda: not node.statistics()["catalogue"]["pinned_bytes"], what="every lease to be back")


class TestNewGenerations:
    """These come last: what the engine computes from here on, others do not find."""

    def _hidden(self, engine: Engine, asked: list[int]) -> None:
        """Nothing of before is found; what is stored from now on is, by this engine."""
        assert engine.generate(asked)["cached"] == 0
        own = engine.generate(asked)["tokens"]
        engine.reset()
        assert until_cached(engine, asked, 640)["tokens"] == own

    def test_a_reset_with_the_connector_hides_what_was_stored(self, engine: Engine) -> None:
        asked = prompt(40, 700)
        engine.ask("reset", reset_connector=True)
        self._hidden(engine, asked)

    @pytest.mark.parametrize("level", [1, 2])
    def test_an_engine_that_slept_finds_nothing_of_before(self, engine: Engine, level: int) -> None:
        """vLLM says the same to a connector before a sleep as before a change of weights."""
        engine.ask("sleep", level=level)
        self._hidden(engine, prompt(40, 700))

    def test_other_weights_find_nothing_though_nobody_reset_the_connector(
        self, engine: Engine, other: Path, models: Path
    ) -> None:
        asked = prompt(40, 700)
        before = engine.generate(asked)["tokens"]
        for path in (other, models / "llama"):
            engine.reset()
            engine.ask("reload", path=str(path))
            after = engine.generate(asked)
            assert after["cached"] == 0
            assert after["tokens"] == engine.generate(asked, salt=f"nothing of {path.name}")["tokens"]
            assert (after["tokens"] == before) == (path != other)
            own = engine.generate(asked)["tokens"]
            engine.reset()
            assert until_cached(engine, asked, 640)["tokens"] == own
