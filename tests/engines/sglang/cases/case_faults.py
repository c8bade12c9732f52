"""Nodes that die, fall silent or are full, and what SGLang's threads make of it."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sglang.cases import rig
from tests.engines.sglang.cases.case_controller import alive, backed_up, prefetched
from tests.node.fleet import NodeProcess

from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.holdings import at_rest

# What a silent node may cost all calls together. Far above what is meant: it tells bounded from endless.
BOUND_S = 30.0


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, stack: ExitStack) -> Path:
    found = rig.model(tmp_path / "model")
    stack.enter_context(rig.serving(found))
    return found


def test_kill_9_of_the_node_costs_misses_and_the_threads_live(tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    socket = tmp_path / "host" / "node.sock"
    process = NodeProcess(socket)
    stack.callback(process.close)
    made = rig.controller(socket, *rig.mha_pool(), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 3)
    assert prefetched(made, 3) == (3 * rig.PAGE, held)
    process.signal(signal.SIGKILL)
    process.process.wait(WAIT_S)
    assert prefetched(made, 3) == (0, [])
    assert backed_up(made, 3, seed=2, stored=0)
    assert alive(made)
    again = NodeProcess(socket)
    stack.callback(again.close)
    assert made.storage_backend._pools["kv"].store.wait_connected(WAIT_S)
    assert backed_up(made, 3)
    assert prefetched(made, 3)[0] == 3 * rig.PAGE


def test_a_node_that_is_stopped_costs_bounded_time_and_serves_again(tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "host").mkdir(mode=0o700)
    socket = tmp_path / "host" / "node.sock"
    process = NodeProcess(socket)
    stack.callback(process.close)
    made = rig.controller(socket, *rig.mha_pool(), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 3)
    with rig.impatient():
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(50):
            assert prefetched(made, 3) == (0, [])
        assert backed_up(made, 3, seed=2, stored=0)
        assert time.monotonic() - began < BOUND_S
        assert alive(made)
        process.signal(signal.SIGCONT)
    eventually(lambda: made.storage_backend.batch_exists(rig.hashes(3)) == 3, "pages are found again")
    assert prefetched(made, 3) == (3 * rig.PAGE, held)


def test_a_full_pool_declines_pages_and_keeps_serving(tmp_path: Path, stack: ExitStack) -> None:
    node = rig.start_node(tmp_path / "host", stack, pool_bytes=8 << 20)
    pages = 600
    _, host = rig.mha_pool(slots=(pages + 1) * rig.PAGE, heads=16)
    store = rig.storage(node.settings.socket_path, host, stack)
    rig.scramble(host)
    indices = rig.slots(host, pages)
    names = rig.hashes(pages)
    held = store.batch_set_v1(names, indices)
    assert len(held) == pages
    found = store.batch_exists(names)
    target = rig.slots(host, found)
    got = store.batch_get_v1(names[:found], target)
    whole = sum(got)
    assert rig.page_bytes(host, target)[:whole] == rig.page_bytes(host, indices)[:whole]
    at_rest(node)
