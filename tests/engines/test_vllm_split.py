"""A prefill/decode split on real engines, the prefiller inside a MultiConnector beside two others.

The prefiller (kv_producer) has a connector in front of ours whose loads fail, and vLLM's own example
connector behind it. The decoder (kv_consumer) has ours alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, arguments
from tests.engines.vllm_life import life_engine, until_stored
from tests.engines.vllm_life_driver import PROMISE
from tests.engines.vllm_requests import BLOCK, prompt, until_cached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PREFILL = {"max_tokens": 1}


class Split(NamedTuple):
    """One engine per side."""

    node: NodeProcess
    prefiller: Engine
    decoder: Engine


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node"))
    process.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def split(node: NodeProcess, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    directory, model = tmp_path_factory.mktemp("engines"), models / "llama"
    ours = arguments(model, node.socket)["kv_transfer_config"]
    lossy = {
        "kv_connector": "LossyConnector",
        "kv_connector_module_path": "tests.engines.other_connector",
        "kv_role": "kv_both",
    }
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [lossy, {**ours, "kv_role": "kv_producer"}, example]},
    }
    prefiller = life_engine(
        "prefiller", model, node, directory, kv_transfer_config=several, disable_hybrid_kv_cache_manager=True
    )
    decoder = life_engine(
        "decoder", model, node, directory, kv_transfer_config={**ours, "kv_role": "kv_consumer"}, cores="1"
    )
    try:
        yield Split(node, prefiller.ready(), decoder.ready())
    finally:
        prefiller.close()
        decoder.close()


def _prefill(split: Split, asked: list[int], **params: Any) -> None:
    """What a proxy does first: one token on the prefiller, then wait until all of its chunks are stored."""
    before = split.node.chunks()
    split.prefiller.generate(asked, params={**PREFILL, **params})
    until_stored(split.node, before + len(asked) // BLOCK)


def test_the_decoder_loads_what_the_prefiller_stored_and_computes_the_tail(split: Split) -> None:
    asked = prompt(1, 700)
    _prefill(split, asked)
    own = split.prefiller.generate(asked)
    loaded = until_cached(split.decoder, asked, 640)
    assert loaded["tokens"] == own["tokens"]
    assert len(split.prefiller.digests() & split.decoder.digests()) >= 640 // BLOCK


def test_a_decoder_that_asks_before_the_prefiller_recomputes(split: Split) -> None:
    asked = prompt(2, 700)
    early = split.decoder.generate(asked)
    assert early["cached"] == 0
    assert len(early["tokens"]) == 8


def test_a_decoder_stores_nothing_and_a_prefiller_loads_nothing_of_ours(split: Split) -> None:
    asked = prompt(1, 700)
    split.decoder.generate(prompt(3, 700))
    split.prefiller.reset()
    split.prefiller.generate(asked)
    assert not split.decoder.ask("metrics").get("vllm:kvferry_stored_chunks")
    assert not split.prefiller.ask("metrics").get("vllm:kvferry_lookups")


def test_what_another_connector_loaded_is_answered_beside_ours(split: Split) -> None:
    asked = prompt(1, 700)
    own = split.prefiller.generate(asked)
    split.prefiller.reset()
    by_another = split.prefiller.generate(asked)
    assert by_another == {"tokens": own["tokens"], "cached": 640}


def test_what_another_connector_failed_to_load_is_not_stored(split: Split) -> None:
    """It spoils five blocks and says so with the step's result: the request computes them again."""
    asked, chunks, before = prompt(4, 700), split.node.chunks(), split.prefiller.ask("metrics")
    split.prefiller.generate(asked, params={"extra_args": {"kv_transfer_params": {PROMISE: 5}}})
    until_stored(split.node, chunks + 5)
    hits = "vllm:external_prefix_cache_hits"
    assert split.prefiller.ask("metrics")[hits] == before[hits] + 640
    own = split.prefiller.generate(asked)
    loaded = until_cached(split.decoder, asked, 640)
    assert loaded["tokens"] == own["tokens"]
    assert len(split.prefiller.digests() & split.decoder.digests()) >= 640 // BLOCK
