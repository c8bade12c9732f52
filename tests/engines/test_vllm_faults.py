"""Real engines while a part of the fleet breaks: right answers, failures with names, reuse that returns."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.engines.fault_rig import CHUNK_BYTES, CHUNKS, WAIT_S, Fault, Rig
from tests.engines.vllm_engines import make_models

from kvferry.testing.faults import Corrupt
from kvferry.testing.proxy import Proxy
from kvferry.testing.servers import must, start_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    models = make_models(tmp_path_factory.mktemp("models"), "heavy")
    directory = tmp_path_factory.mktemp("rig")
    with ExitStack() as stack:
        yield Rig(directory, models / "heavy", stack)


def _start_node(rig: Rig) -> None:
    if not rig.node.running:  # it may run still, when a test failed
        rig.node.start()


def _stop_valkey(rig: Rig) -> None:
    rig.valkey.pause()


def _continue_valkey(rig: Rig) -> None:
    rig.valkey.resume()
    _tier_is_up(rig)


def _kill_valkey(rig: Rig) -> None:
    """Its port is closed too: connections are refused."""
    rig.proxy.close()
    rig.valkey.stop()


def _restart_valkey(rig: Rig) -> None:
    _kill_valkey(rig)  # it may run still, when a test failed
    rig.valkey = start_server(rig.valkey.log.parent, port=rig.valkey.port)
    rig.proxy = Proxy(("127.0.0.1", rig.valkey.port), port=rig.proxy.port)
    _tier_is_up(rig)


def _tier_is_up(rig: Rig) -> None:
    rig.node.wait_for(lambda: rig.tier_state() == "up", what="Valkey being used again", timeout_s=WAIT_S)


def _corrupt_values(rig: Rig) -> None:
    """One byte of every stored value; on its way, for those that are under way."""
    rig.proxy.replies.once(Corrupt(CHUNK_BYTES, 1))
    for key in rig.valkey.key_names():
        at = int(str(must(rig.valkey.ask("STRLEN", key)))) // 2
        byte = must(rig.valkey.ask("GETRANGE", key, str(at), str(at)))
        assert isinstance(byte, bytes)
        must(rig.valkey.ask("SETRANGE", key, str(at), bytes([(byte[0] + 1) % 256])))


FAULTS = {
    "node killed": Fault(
        breaks=lambda rig: rig.node.kill() and None,
        mends=_start_node,
        before=frozenset({"node-down"}),
        during=frozenset({"node-down"}),
    ),
    "node stopped": Fault(
        breaks=lambda rig: rig.node.pause(),
        mends=lambda rig: rig.node.resume(),
        before=frozenset({"timeout"}),
        during=frozenset({"stalled", "deadline"}),
    ),
    "Valkey stopped": Fault(
        breaks=_stop_valkey,
        mends=_continue_valkey,
        before=frozenset({"deadline", "tier-down"}),
        during=frozenset({"stalled", "deadline", "failed", "tier-down"}),
    ),
    "Valkey refused": Fault(
        breaks=_kill_valkey,
        mends=_restart_valkey,
        before=frozenset({"tier-down"}),
        during=frozenset({"failed", "tier-down"}),
    ),
    "Valkey corrupted": Fault(
        breaks=_corrupt_values,
        mends=lambda rig: rig.proxy.heal(),
        before=frozenset({"corrupt"}),
        during=frozenset({"corrupt"}),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_part_that_breaks_before_a_load_costs_the_load_alone(rig: Rig, name: str) -> None:
    fault = FAULTS[name]
    try:
        asked, found = rig.ask_before(fault)
        assert rig.right(asked, found)
        assert found.failures
        assert found.failures.keys() <= fault.before
        assert found.misses == 0
    finally:
        fault.mends(rig)
    rig.until_reused(asked)
    rig.at_rest()


@pytest.mark.parametrize("name", FAULTS)
def test_a_part_that_breaks_during_a_load_costs_the_rest_of_the_load(rig: Rig, name: str) -> None:
    fault = FAULTS[name]
    try:
        asked, found = rig.ask_during(fault)
        assert found.loaded_chunks < CHUNKS
        assert rig.shared_blocks() >= found.loaded_chunks
        assert rig.right(asked, found)
        assert found.failures
        assert found.failures.keys() <= fault.during
        assert found.misses == 0
    finally:
        fault.mends(rig)
    rig.until_reused(asked)
    rig.at_rest()
    assert rig.shared_blocks() >= CHUNKS


def _restart_node(rig: Rig) -> None:
    rig.node.restart()


RESTART = Fault(_restart_node, lambda rig: None, during=frozenset({"node-down", "node-restarted"}))


def test_the_first_request_after_a_restart_is_served_by_the_new_node(rig: Rig) -> None:
    asked, found = rig.ask_before(RESTART)
    assert (found.loaded_chunks, found.failures, found.misses) == (CHUNKS, {}, 0)
    assert rig.right(asked, found)


def test_the_first_prompt_after_a_restart_is_stored_in_the_new_node(rig: Rig) -> None:
    rig.node.restart()
    asked = rig.stored()
    rig.until_reused(asked)


def test_what_an_engine_still_has_itself_is_stored_again_in_a_restarted_node(rig: Rig) -> None:
    asked = rig.stored()
    rig.valkey.ask("FLUSHALL")
    rig.node.restart()
    rig.a.generate(asked)
    rig.view.wait_saved(parts=CHUNKS, timeout_s=WAIT_S)


def test_a_node_restarted_during_a_load_costs_the_rest_of_the_load(rig: Rig) -> None:
    asked, found = rig.ask_during(RESTART)
    assert rig.right(asked, found)
    assert found.failures
    assert found.failures.keys() <= RESTART.during
    assert found.misses == 0
    rig.until_reused(asked)
    rig.at_rest()


def _fill_valkey(rig: Rig) -> None:
    must(rig.valkey.ask("CONFIG", "SET", "maxmemory-policy", "noeviction"))
    must(rig.valkey.ask("CONFIG", "SET", "maxmemory", "1"))


def _make_room(rig: Rig) -> None:
    must(rig.valkey.ask("CONFIG", "SET", "maxmemory", "0"))


FULL = Fault(_fill_valkey, _make_room)


@pytest.mark.parametrize("during", [False, True])
def test_a_valkey_that_is_full_takes_nothing_and_loads_go_on(rig: Rig, during: bool) -> None:
    try:
        asked, found = rig.ask_during(FULL) if during else rig.ask_before(FULL)
        assert (found.loaded_chunks, found.failures, found.misses) == (CHUNKS, {}, 0)
        assert rig.right(asked, found)
        rig.reference(asked, CHUNKS)  # A computes and stores it under other names

        def refused() -> bool:
            return sum(rig.view.status()["counters"]["store_failed"].values()) >= CHUNKS

        rig.node.wait_for(refused, what="the stores being refused and counted", timeout_s=WAIT_S)
        assert rig.tier_state() == "up"
    finally:
        _make_room(rig)
    again = rig.stored()
    rig.until_reused(again)


def test_an_engine_killed_during_a_load_gives_back_all_it_held(rig: Rig) -> None:
    asked = rig.killed_during()
    _only_a_is_left(rig)
    rig.b.close()
    rig.b = rig.engine("c", "1").ready()
    rig.until_reused(asked)
    rig.b.kill()
    _only_a_is_left(rig)


def _only_a_is_left(rig: Rig) -> None:
    """The node knows A's two connections, and holds nothing for anybody."""
    rig.node.wait_for(lambda: len(rig.view.status()["engines"]) == 2, what="the dead engine being gone")
    rig.at_rest()
