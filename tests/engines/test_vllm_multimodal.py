"""A real engine that takes sounds and keeps KV in 8 bits: what it computed is found by content and place.

A sound of 10 seconds is 250 tokens.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, make_models
from tests.engines.vllm_life import MODELS, life_engine
from tests.engines.vllm_requests import BLOCK, REUSE_S, prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

AUDIO, BEGIN, END = 3, 4, 5
FIRST_WORD = 6
SECONDS, SOUND_TOKENS = 10, 250


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def engine(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("listener")
    started = life_engine(
        "listener",
        make_models(directory, "listener", module=MODELS) / "listener",
        node,
        directory,
        skip_tokenizer_init=False,
        limit_mm_per_prompt={"audio": 2},
        skip_mm_profiling=True,
        kv_cache_dtype="fp8",
    )
    try:
        yield started.ready()
    finally:
        started.close()


def _words(seed: int, tokens: int) -> list[int]:
    return [max(token, FIRST_WORD) for token in prompt(seed, tokens)]


def _with_sound(seed: int, *, before: int = 100, after: int = 250) -> list[int]:
    """A prompt with one sound in it: ``before + SOUND_TOKENS + after`` and two marks."""
    words = _words(seed, before + after)
    return [*words[:before], BEGIN, AUDIO, END, *words[before:]]


def _listen(engine: Engine, asked: list[int], sound: int, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.ask("listen", prompt=asked, sounds=[[sound, SECONDS]], **options)
    return found


def _until_heard(engine: Engine, asked: list[int], sound: int, cached: int, **options: Any) -> dict[str, Any]:
    """Ask until that much was reused: stores finish a moment after the answer."""
    tries = 0
    while True:
        found = _listen(engine, asked, sound, **options)
        tries += 1
        if found["cached"] == cached:
            return found
        assert tries < REUSE_S, f"{found['cached']} tokens reused of {cached}: {engine.ask('metrics')}"
        engine.reset()


def test_kv_in_8_bits_is_stored_and_loaded_as_it_is(engine: Engine) -> None:
    asked = _words(1, 700)
    engine.generate(asked)
    own = engine.generate(asked)
    computed = engine.digests()
    engine.reset()
    engine.ask("scrub")
    assert until_cached(engine, asked, 640)["tokens"] == own["tokens"]
    assert len(computed & engine.digests()) >= 640 // BLOCK
    assert "'fp8'" in engine.text() or "fp8" in engine.text()


def test_beams_are_those_of_own_hits(engine: Engine) -> None:
    """Of text: vLLM searches beams with a tokenizer only."""
    asked = _words(6, 500)
    engine.generate(asked)
    own = engine.ask("beams", prompt=asked, width=2, tokens=4)
    engine.reset()
    until_cached(engine, asked, 3 * BLOCK)
    engine.reset()
    before = engine.ask("metrics")["vllm:kvferry_loaded_tokens"]
    assert engine.ask("beams", prompt=asked, width=2, tokens=4) == own
    assert engine.ask("metrics")["vllm:kvferry_loaded_tokens"] > before


def test_a_prompt_with_a_sound_is_loaded_and_says_the_same_as_with_an_own_hit(engine: Engine) -> None:
    asked = _with_sound(2)
    cold = _listen(engine, asked, 1)
    assert (cold["prompt"], cold["cached"]) == (100 + 2 + SOUND_TOKENS + 250, 0)
    own = _listen(engine, asked, 1)
    engine.reset()
    loaded = _until_heard(engine, asked, 1, own["cached"])
    assert (loaded["tokens"], loaded["cached"]) == (own["tokens"], 4 * BLOCK)


def test_another_sound_shares_what_stands_before_it_and_no_more(engine: Engine) -> None:
    asked = _with_sound(3, before=200)
    _listen(engine, asked, 1)
    engine.reset()
    _until_heard(engine, asked, 1, 5 * BLOCK)
    engine.reset()
    other = _until_heard(engine, asked, 2, BLOCK)
    assert other["tokens"] == _listen(engine, asked, 2)["tokens"]


def test_the_same_sound_in_another_place_is_another_prefix(engine: Engine) -> None:
    here, there = _with_sound(4, before=100), _with_sound(4, before=101)
    _listen(engine, here, 1)
    engine.reset()
    _until_heard(engine, here, 1, 4 * BLOCK)
    engine.reset()
    assert _listen(engine, there, 1)["cached"] == 0


def test_what_a_client_calls_a_sound_does_not_count(engine: Engine) -> None:
    """One name for the content that is stored already, then the same name for another sound."""
    asked = _with_sound(5)
    own = _listen(engine, asked, 1)
    engine.reset()
    _until_heard(engine, asked, 1, 4 * BLOCK)
    engine.reset()
    named = _until_heard(engine, asked, 1, 4 * BLOCK, uuids=["mine"])
    assert named["tokens"] == own["tokens"] or named["tokens"] == _listen(engine, asked, 1)["tokens"]
    engine.reset()
    before = engine.ask("metrics").get("vllm:kvferry_ineligible", 0)
    engine.ask("forget_sounds")
    assert _listen(engine, asked, 2, uuids=["mine"])["cached"] == 0
    assert engine.ask("metrics")["vllm:kvferry_ineligible"] == before + 1
    engine.reset()
    assert _until_heard(engine, asked, 1, 4 * BLOCK)["tokens"] == named["tokens"]
