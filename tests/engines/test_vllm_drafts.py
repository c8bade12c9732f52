"""Speculative decoding on real engines: the drafts' KV is stored and loaded with the model's own.

Random drafts are hardly ever accepted. What is checked is that nothing of them reaches an answer, that their
blocks hold the computed bytes again, and that as much is reused as with a hit of the engine's own.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, make_models
from tests.engines.vllm_life import MODELS, life_engine
from tests.engines.vllm_requests import BLOCK, REUSE_S, prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

DRAFTS = 2


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("drafts"), "draft", "eagle", "mtp", module=MODELS)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module", params=["eagle", "draft_model", "mtp"])
def engine(
    request: pytest.FixtureRequest,
    node: NodeProcess,
    models: Path,
    drafts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    method, model = request.param, models / "llama"
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "mtp":  # whose one head is in the model's own checkpoint
        model, speculative["num_speculative_tokens"] = drafts / "mtp", 1
    else:
        speculative["model"] = str(drafts / method.removesuffix("_model"))
    started = life_engine(
        method, model, node, tmp_path_factory.mktemp("engine"), speculative_config=speculative
    )
    try:
        yield started.ready()
    finally:
        started.close()


def test_a_load_gives_what_an_own_hit_gives_drafts_included(engine: Engine) -> None:
    asked = prompt(1, 700)
    _generate_and_store(engine, asked)
    own = engine.generate(asked, params={"max_tokens": 40})
    computed = engine.digests()
    engine.reset()
    engine.ask("scrub")
    loaded = until_cached(engine, asked, own["cached"], params={"max_tokens": 40})
    assert loaded["tokens"] == own["tokens"]
    assert len(computed & engine.digests()) >= own["cached"] // BLOCK
    metrics = engine.ask("metrics")
    assert metrics["vllm:spec_decode_num_drafts"] > 0
    assert metrics["vllm:kvferry_loaded_tokens"] > 0


def test_answers_whose_drafts_were_refused_are_stored_as_answered(engine: Engine) -> None:
    asked = prompt(2, 200)
    answer = _generate_and_store(engine, asked, params={"max_tokens": 250})["tokens"]
    turn = [*asked, *answer, *prompt(3, 50)]
    own = engine.generate(turn)
    engine.reset()
    engine.ask("scrub")
    assert until_cached(engine, turn, own["cached"])["tokens"] == own["tokens"]


def _generate_and_store(engine: Engine, asked: list[int], **options: Any) -> dict[str, Any]:
    """And see the last chunk stored: an own hit, which stops a block early, may be lengthened by a load."""
    before = _stored_chunks(engine)
    found = engine.generate(asked, **options)
    chunks = (len(asked) + len(found["tokens"])) // BLOCK
    give_up = time.monotonic() + REUSE_S
    while _stored_chunks(engine) < before + chunks:
        assert time.monotonic() < give_up
        engine.generate(prompt(4, 10))  # counts come with a step
    return found


def _stored_chunks(engine: Engine) -> int:
    return int(engine.ask("metrics").get("vllm:kvferry_stored_chunks", 0))
