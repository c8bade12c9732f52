"""The sides of a prefill/decode split, over a real node: one stores, the other loads what it stored."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.sides import SideFleet

from kvferry.engines.vllm.compat import check_transfer_config
from kvferry.engines.vllm.roles import KvRole
from kvferry.errors import MisconfiguredError
from kvferry.testing.connector_contract import BLOCK_TOKENS, Prompt
from kvferry.testing.fake_engine import FakeEngine, FakeRequest

CHUNKS = 10


def _transfer(policy: str, role: str | None) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy, kv_role=role))


@pytest.mark.parametrize("role", list(KvRole))
def test_every_role_of_vllm_is_taken(role: KvRole) -> None:
    assert check_transfer_config(_transfer("recompute", role.value)) is role


def test_an_unknown_role_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(MisconfiguredError, match="kv_both, kv_producer, kv_consumer"):
        check_transfer_config(_transfer("recompute", "kv_neither"))


def test_the_policy_that_vllm_obeys_is_that_of_the_multi_connector_round_us() -> None:
    inner = _transfer("recompute", "kv_both")
    assert check_transfer_config(inner, outer=_transfer("recompute", "kv_both")) is KvRole.BOTH
    with pytest.raises(MisconfiguredError, match="of the MultiConnector is 'fail'"):
        check_transfer_config(inner, outer=_transfer("fail", "kv_both"))


@pytest.fixture
def fleet(tmp_path: Path, stack: ExitStack) -> SideFleet:
    return SideFleet(tmp_path, stack, chunk_blocks=1)


def _answer(fleet: SideFleet, engine: FakeEngine, name: str, prompt: Prompt, **fields: Any) -> FakeRequest:
    request = engine.add(prompt.request(name, **fields))
    engine.complete(request)
    fleet.settle(engine)
    return request


def test_a_decoder_loads_what_a_prefiller_stored_and_computes_only_the_tail(fleet: SideFleet) -> None:
    prefiller, decoder = fleet.engine(role=KvRole.PRODUCER), fleet.engine(role=KvRole.CONSUMER)
    prompt = Prompt(CHUNKS * BLOCK_TOKENS + 3)
    _answer(fleet, prefiller, "p", prompt, output_tokens=1)
    assert _answer(fleet, decoder, "d", prompt).external_tokens == CHUNKS * BLOCK_TOKENS
    assert fleet.scheduler(prefiller).counts.take()["stored_chunks"] == CHUNKS


def test_a_prefiller_never_loads_and_a_decoder_never_stores(fleet: SideFleet) -> None:
    prefiller, decoder = fleet.engine(role=KvRole.PRODUCER), fleet.engine(role=KvRole.CONSUMER)
    both = fleet.engine()
    prompt = Prompt(CHUNKS * BLOCK_TOKENS + 3)
    _answer(fleet, decoder, "d", prompt)
    assert _answer(fleet, both, "nothing there", prompt).external_tokens == 0
    assert _answer(fleet, prefiller, "p", prompt).external_tokens == 0
    assert "lookups" not in fleet.scheduler(prefiller).counts.take()
    assert "stored_chunks" not in fleet.scheduler(decoder).counts.take()


def test_a_decoder_that_asks_too_early_recomputes_what_is_not_there_yet(fleet: SideFleet) -> None:
    prefiller, decoder = fleet.engine(role=KvRole.PRODUCER), fleet.engine(role=KvRole.CONSUMER)
    release = fleet.hold_saves()
    prompt = Prompt(CHUNKS * BLOCK_TOKENS + 3)
    prefiller.complete(prefiller.add(prompt.request("p", output_tokens=1)))
    assert _answer(fleet, decoder, "early", prompt).external_tokens == 0
    release()
    fleet.settle(prefiller)
    assert decoder.pool.reset()
    assert _answer(fleet, decoder, "later", prompt).external_tokens == CHUNKS * BLOCK_TOKENS
