"""SGLang's HiCacheController with its threads, host pool and our storage over a node."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE
from tests.engines.sglang.cases import rig

from kvferry.node.node import Node
from kvferry.testing.holdings import at_rest


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack) -> Node:
    stack.enter_context(rig.serving(rig.model(tmp_path / "model")))
    return rig.start_node(tmp_path / "host", stack)


@pytest.fixture
def socket(node: Node) -> Path:
    return node.settings.socket_path


def backed_up(made: Any, pages: int, *, seed: int = 1, stored: int | None = None) -> list[bytes]:
    """Pages that the controller's own thread stores; what they held. stored: so many, if not all."""
    names = rig.hashes(pages, seed=seed)
    indices = rig.slots(made.mem_pool_host, pages)
    made.write_storage(indices, rig.tokens(pages, seed=seed), hash_value=names)
    wanted = pages if stored is None else stored
    assert rig.take(made.ack_backup_queue).completed_tokens == wanted * rig.PAGE
    held = rig.page_bytes(made.mem_pool_host, indices)
    made.mem_pool_host.free(indices)
    return held


def prefetched(made: Any, pages: int, *, seed: int = 1) -> tuple[int, list[bytes]]:
    """What its threads find of a prompt and bring: tokens found, bytes of the pages that came."""
    made.prefetch("request", rig.tokens(pages, seed=seed), None)
    operation = rig.take(made.prefetch_hit_queue)
    operation.host_indices = rig.slots(made.mem_pool_host, operation.storage_hit_count // rig.PAGE)
    made.prefetch_buffer.put(operation)
    completed = 0
    while not (ack := rig.take(made.ack_prefetch_queue)).completed_req:
        completed = max(completed, ack.completed_tokens or 0)
    indices = operation.host_indices[:completed]
    held = rig.page_bytes(made.mem_pool_host, indices)
    made.mem_pool_host.free(operation.host_indices)
    return operation.storage_hit_count, held


def alive(made: Any) -> bool:
    threads = (
        made.prefetch_thread,
        made.prefetch_io_aux_thread,
        made.prefetch_sync_thread,
        made.backup_thread,
    )
    return all(thread.is_alive() for thread in threads)


def test_what_one_controller_backs_up_another_prefetches(socket: Path, stack: ExitStack) -> None:
    here = rig.controller(socket, *rig.mha_pool(), stack)
    there = rig.controller(socket, *rig.mha_pool(), stack)
    assert here.page_get_func == here._page_get_zero_copy
    rig.scramble(here.mem_pool_host)
    held = backed_up(here, 6)
    rig.scramble(there.mem_pool_host, seed=9)
    assert prefetched(there, 8) == (6 * rig.PAGE, held)


def test_more_pages_than_one_batch_of_sglang_come_whole(socket: Path, stack: ExitStack) -> None:
    pages = STORAGE_BATCH_SIZE + 3
    made = rig.controller(socket, *rig.mha_pool(slots=(pages + 1) * rig.PAGE), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, pages)
    rig.scramble(made.mem_pool_host, seed=3)
    assert prefetched(made, pages) == (pages * rig.PAGE, held)


def test_sglangs_storage_metrics_are_of_its_own_type(socket: Path, stack: ExitStack) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    made = rig.controller(socket, *rig.mha_pool(), stack)
    backed_up(made, 4)
    prefetched(made, 4)
    found = made.storage_backend.get_stats()
    assert type(found) is StorageMetrics  # the scheduler asserts it
    assert (found.backup_pgs, found.prefetch_pgs) == ([4], [4])
    assert min(found.backup_bandwidth + found.prefetch_bandwidth) > 0
    assert made.storage_backend.get_stats() == StorageMetrics()


def test_a_node_that_ends_costs_misses_and_another_one_is_used(node: Node, stack: ExitStack) -> None:
    made = rig.controller(node.settings.socket_path, *rig.mha_pool(), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 3)
    node.close()
    assert prefetched(made, 3) == (0, [])
    indices = rig.slots(made.mem_pool_host, 3)
    made.write_storage(indices, rig.tokens(3, seed=2), hash_value=rig.hashes(3, seed=2))
    assert rig.take(made.ack_backup_queue).completed_tokens == 0
    assert alive(made)
    again = rig.start_node(node.settings.socket_path.parent, stack)
    assert made.storage_backend._pools["kv"].store.wait_connected(rig.WAIT_S)
    assert backed_up(made, 3) != held  # the memory of the first node is gone, and served again
    assert prefetched(made, 3)[0] == 3 * rig.PAGE
    assert again.statistics().counters.corrupt_parts == 0


def test_without_a_node_the_engine_starts_and_finds_nothing(tmp_path: Path, stack: ExitStack) -> None:
    stack.enter_context(rig.serving(rig.model(tmp_path / "model")))
    stack.enter_context(rig.impatient())
    made = rig.controller(tmp_path / "absent.sock", *rig.mha_pool(), stack)
    assert prefetched(made, 3) == (0, [])
    assert alive(made)


def test_bytes_that_changed_in_the_node_are_never_handed_over(node: Node, stack: ExitStack) -> None:
    made = rig.controller(node.settings.socket_path, *rig.mha_pool(), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 4)
    rig.damage(node, page=2)
    found, came = prefetched(made, 4)
    assert found == 4 * rig.PAGE
    assert came == held[:2]
    assert alive(made)


def test_detaching_leaves_no_thread_of_ours_and_attaching_again_finds_the_pages(
    socket: Path, stack: ExitStack
) -> None:
    made = rig.controller(socket, *rig.mha_pool(), stack)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 3)
    old = made.storage_backend
    made.detach_storage_backend()
    assert old.batch_exists(rig.hashes(3)) == 0
    made.attach_storage_backend(
        "dynamic", rig.PAGE, "small", storage_backend_extra_config=rig.extra_config(socket)
    )
    rig.scramble(made.mem_pool_host, seed=2)
    assert prefetched(made, 3) == (3 * rig.PAGE, held)


def test_a_wrong_setting_stops_the_attachment_with_one_line(socket: Path, stack: ExitStack) -> None:
    made = rig.controller(socket, *rig.mha_pool(), stack)
    made.detach_storage_backend()
    for wrong, said in (({"interface_v1": 0}, "interface_v1"), ({"sockt": "x"}, "did you mean socket?")):
        with pytest.raises(Exception, match=said):
            made.attach_storage_backend(
                "dynamic",
                storage_backend_extra_config={**rig.extra_config(socket), **wrong},
            )
        assert not made.enable_storage


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_every_write_policy_of_sglang_stores_and_finds(policy: str, socket: Path, stack: ExitStack) -> None:
    made = rig.controller(socket, *rig.mha_pool(), stack, write_policy=policy)
    rig.scramble(made.mem_pool_host)
    held = backed_up(made, 2)
    assert prefetched(made, 2) == (2 * rig.PAGE, held)


def test_a_prefetch_that_was_given_up_ends_with_its_last_acknowledgement(
    socket: Path, stack: ExitStack
) -> None:
    made = rig.controller(socket, *rig.mha_pool(), stack)
    backed_up(made, 4)
    operation = made.prefetch("request", rig.tokens(4), None)
    assert rig.take(made.prefetch_hit_queue) is operation
    operation.host_indices = rig.slots(made.mem_pool_host, 4)
    made.terminate_prefetch(operation)
    made.prefetch_buffer.put(operation)
    acks = [rig.take(made.ack_prefetch_queue)]
    while not acks[-1].completed_req:
        acks.append(rig.take(made.ack_prefetch_queue))
    assert [ack.completed_tokens for ack in acks[:-1]] == [0]
    assert alive(made)


def test_the_storage_holds_nothing_of_the_node_when_idle(node: Node, stack: ExitStack) -> None:
    made = rig.controller(node.settings.socket_path, *rig.mha_pool(), stack)
    backed_up(made, 5)
    prefetched(made, 5)
    at_rest(node)
    assert torch.count_nonzero(made.mem_pool_host.slot_used) == 0
