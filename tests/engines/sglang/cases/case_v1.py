"""KV pages by SGLang's factory and host pools: what one instance stored another reads, and nothing else."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from tests.engines.sglang.cases import rig


@pytest.fixture
def checkpoint(tmp_path: Path, stack: ExitStack) -> Path:
    found = rig.model(tmp_path / "model")
    stack.enter_context(rig.serving(found))
    return found


@pytest.fixture
def socket(tmp_path: Path, stack: ExitStack, checkpoint: Path) -> Path:
    return rig.start_node(tmp_path / "host", stack).settings.socket_path


@pytest.mark.parametrize("layout", rig.LAYOUTS)
def test_what_one_backend_stored_another_reads_byte_for_byte(
    layout: str, socket: Path, stack: ExitStack
) -> None:
    _, here = rig.mha_pool(layout)
    _, there = rig.mha_pool(layout)
    writer = rig.storage(socket, here, stack)
    reader = rig.storage(socket, there, stack)
    rig.scramble(here)
    indices = rig.slots(here, 5)
    names = rig.hashes(5)
    assert reader.batch_exists(names) == 0
    assert writer.batch_set_v1(names, indices, HiCacheStorageExtraInfo()) == [True] * 5
    assert reader.batch_exists([*names, *rig.hashes(1, seed=2)]) == 5
    rig.slots(there, 2)  # so that the pages lie elsewhere
    target = rig.slots(there, 5)
    assert reader.batch_get_v1(names, target, HiCacheStorageExtraInfo()) == [True] * 5
    assert rig.page_bytes(there, target) == rig.page_bytes(here, indices)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latent_pages_come_back_byte_for_byte(layout: str, socket: Path, stack: ExitStack) -> None:
    _, here = rig.mla_pool(layout)
    _, there = rig.mla_pool(layout)
    writer = rig.storage(socket, here, stack, is_mla_model=True, tp_rank=0, tp_size=2)
    reader = rig.storage(socket, there, stack, is_mla_model=True, tp_rank=1, tp_size=2)
    rig.scramble(here)
    indices = rig.slots(here, 4)
    names = rig.hashes(4)
    assert writer.batch_set_v1(names, indices) == [True] * 4
    target = rig.slots(there, 4)
    assert reader.batch_exists(names) == 4
    assert reader.batch_get_v1(names, target) == [True] * 4
    assert rig.page_bytes(there, target) == rig.page_bytes(here, indices)


def test_pages_in_one_block_come_back_byte_for_byte(socket: Path, stack: ExitStack) -> None:
    _, here = rig.mha_pool("page_unified")
    _, there = rig.mha_pool("page_unified")
    rig.scramble(here)
    names, indices, target = rig.hashes(3), rig.slots(here, 3), rig.slots(there, 3)
    assert rig.storage(socket, here, stack).batch_set_v1(names, indices) == [True] * 3
    assert rig.storage(socket, there, stack).batch_get_v1(names, target) == [True] * 3
    assert torch.equal(there.kv_buffer[:3].view(torch.uint8), here.kv_buffer[:3].view(torch.uint8))
    assert not torch.count_nonzero(there.kv_buffer[3:].view(torch.uint8))


def test_only_the_named_pages_are_written(socket: Path, stack: ExitStack) -> None:
    _, here = rig.mha_pool()
    _, there = rig.mha_pool()
    writer = rig.storage(socket, here, stack)
    reader = rig.storage(socket, there, stack)
    rig.scramble(here)
    names = rig.hashes(3)
    assert all(writer.batch_set_v1(names, rig.slots(here, 3)))
    rig.scramble(there, seed=7)
    others = rig.slots(there, 4)
    before = rig.page_bytes(there, others)
    assert all(reader.batch_get_v1(names, rig.slots(there, 3)))
    assert rig.page_bytes(there, others) == before


def test_a_page_that_is_missing_ends_what_is_loaded(socket: Path, stack: ExitStack) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    names = rig.hashes(6)
    indices = rig.slots(host, 6)
    assert store.batch_set_v1(names[:3], indices[: 3 * rig.PAGE]) == [True] * 3
    assert store.batch_exists(names) == 3
    assert store.batch_get_v1(names, indices) == [True, True, True, False, False, False]
    assert store.exists(names[0])
    assert not store.exists(names[5])


def test_answers_have_the_types_that_the_threads_rely_on(socket: Path, stack: ExitStack) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack, enable_storage_metrics=True)
    names, indices = rig.hashes(2), rig.slots(host, 2)
    answers = [store.batch_set_v1(names, indices), store.batch_get_v1(names, indices)]
    assert all(type(answer) is list and {type(one) for one in answer} == {bool} for answer in answers)
    assert type(store.batch_exists(names)) is int
    assert type(store.exists(names[0])) is bool
    assert (store.get("x"), store.batch_get(["x"]), store.set("x"), store.batch_set(["x"])) == (
        None,
        [None],
        False,
        False,
    )


@pytest.mark.parametrize(
    "wrong",
    [torch.arange(rig.PAGE), torch.arange(2 * rig.PAGE) + 3, torch.arange(2 * rig.PAGE) + (1 << 40)],
    ids=["too few", "no whole pages", "outside"],
)
def test_slots_that_are_not_pages_of_the_pool_are_misses(
    wrong: torch.Tensor, socket: Path, stack: ExitStack
) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    names = rig.hashes(2)
    assert store.batch_set_v1(names, wrong) == [False, False]
    assert store.batch_set_v1(names, rig.slots(host, 2)) == [True, True]
    assert store.batch_get_v1(names, wrong) == [False, False]


def test_names_that_are_no_page_hashes_are_misses(socket: Path, stack: ExitStack) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    for name in ("", "x" * 64, "A" * 64, "a" * 63):
        assert store.batch_exists([name]) == 0
        assert store.batch_set_v1([name], rig.slots(host, 1)) == [False]
    names = rig.hashes(1)
    assert store.batch_set_v1(names, rig.slots(host, 1)) == [True]  # and the next call is served


def test_an_error_of_our_own_is_a_miss_and_switches_the_backend_off(
    socket: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    names, indices = rig.hashes(2), rig.slots(host, 2)
    assert store.batch_set_v1(names, indices) == [True, True]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    store._pools["kv"].load = broken
    assert store.batch_get_v1(names, indices) == [False, False]
    assert "please report it" in caplog.text
    assert store.batch_exists(names) == 0
    assert store.batch_set_v1(names, indices) == [False, False]
    assert store.batch_exists_v2(names).kv_hit_pages == 0
    store.clear()
