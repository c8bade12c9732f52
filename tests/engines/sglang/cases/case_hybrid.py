"""Models with pools beside the KV pages: windows, recurrent states, pools that only number pages."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.engines.sglang.cases import rig

from kvferry.errors import MisconfiguredError
from kvferry.testing.holdings import at_rest

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES


@pytest.fixture
def socket(tmp_path: Path, stack: ExitStack) -> Path:
    stack.enter_context(rig.serving(rig.model(tmp_path / "model")))
    return rig.start_node(tmp_path / "host", stack).settings.socket_path


def moved(name: PoolName, keys: list[str], indices: Any, policy: PoolHitPolicy = ALL) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=indices, hit_policy=policy)


def asked(name: PoolName, pages: int, policy: PoolHitPolicy) -> PoolTransfer:
    """As SGLang asks: only how many pages it would want is known."""
    return PoolTransfer(name=name, keys=["__placeholder__"] * pages, hit_policy=policy)


class Engine:
    """KV pages, windows and recurrent states, by the interface of pools."""

    def __init__(self, socket: Path, stack: ExitStack, **fields: Any) -> None:
        _, self.kv = rig.mha_pool()
        _, self.swa = rig.mha_pool("layer_first", heads=4)
        self.mamba = rig.mamba_pool(side_state=bool(fields.pop("side_state", False)))
        sides = {PoolName.KV: self.kv, PoolName.SWA: self.swa, PoolName.MAMBA: self.mamba}
        self.storage = rig.storage(socket, self.kv, stack, sides=sides, **fields)
        for seed, pool in enumerate((self.kv, self.swa, self.mamba)):
            rig.scramble(pool, seed)

    def put(self, pool: Any, name: PoolName, keys: list[str]) -> list[bytes]:
        indices = rig.slots(pool, len(keys))
        transfer = moved(name, keys, indices, ALL if name == PoolName.KV else TRAILING)
        assert self.storage.batch_set_v2([transfer]) == {name: [True] * len(keys)}
        return rig.page_bytes(pool, indices)

    def get(self, pool: Any, name: PoolName, keys: list[str]) -> list[bytes]:
        indices = rig.slots(pool, len(keys))
        found = self.storage.batch_get_v2([moved(name, keys, indices)])
        assert found == {name: [True] * len(keys)}
        return rig.page_bytes(pool, indices)


def test_states_of_another_type_of_one_size_are_not_found(socket: Path, stack: ExitStack) -> None:
    names, found = rig.hashes(2), []
    for temporal in (torch.float16, torch.bfloat16, torch.float16):
        states, (_, pages) = rig.mamba_pool(temporal=temporal), rig.mha_pool()
        storage = rig.storage(socket, pages, stack, sides={PoolName.KV: pages, PoolName.MAMBA: states})
        found.append(storage._pools["mamba"].reach(names))
        transfer = moved(PoolName.MAMBA, names, rig.slots(states, 2), TRAILING)
        assert storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True, True]}
    assert found == [0, 0, 2]


def test_every_pool_of_a_hybrid_model_comes_back_byte_for_byte(socket: Path, stack: ExitStack) -> None:
    here, there = Engine(socket, stack), Engine(socket, stack)
    names = rig.hashes(4)
    held = [
        here.put(here.kv, PoolName.KV, names),
        here.put(here.swa, PoolName.SWA, names[2:]),
        here.put(here.mamba, PoolName.MAMBA, names[3:]),
    ]
    for pool in (there.kv, there.swa, there.mamba):
        rig.scramble(pool, 77)
    assert held == [
        there.get(there.kv, PoolName.KV, names),
        there.get(there.swa, PoolName.SWA, names[2:]),
        there.get(there.mamba, PoolName.MAMBA, names[3:]),
    ]


def test_states_with_side_states_are_stored_whole(socket: Path, stack: ExitStack) -> None:
    here, there = Engine(socket, stack, side_state=True), Engine(socket, stack, side_state=True)
    names = rig.hashes(1)
    held = here.put(here.mamba, PoolName.MAMBA, names)
    rig.scramble(there.mamba, 77)
    assert there.get(there.mamba, PoolName.MAMBA, names) == held
    plain = Engine(socket, stack)  # a model without them keeps another kind of page
    assert plain.storage._pools["mamba"].reach(names) == 0


def test_a_hit_ends_where_every_pool_can_go_on(socket: Path, stack: ExitStack) -> None:
    engine = Engine(socket, stack)
    names = rig.hashes(6)
    wants = [asked(PoolName.SWA, 2, TRAILING), asked(PoolName.MAMBA, 1, TRAILING)]
    assert engine.storage.batch_exists_v2(names, wants) == PoolTransferResult(0, {}, [])
    engine.put(engine.kv, PoolName.KV, names[:5])
    nothing = engine.storage.batch_exists_v2(names, wants)
    assert (nothing.kv_hit_pages, nothing.extra_pool_hit_pages) == (0, {PoolName.KV: 5})
    engine.put(engine.swa, PoolName.SWA, names[1:4])  # a window before 3 and before 4
    engine.put(engine.mamba, PoolName.MAMBA, [names[2]])  # a state at 3
    engine.put(engine.mamba, PoolName.MAMBA, [names[4]])  # and one at 5
    hit = engine.storage.batch_exists_v2(names, wants)
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (3, [3])
    assert hit.extra_pool_hit_pages[PoolName.KV] == 5
    only_states = engine.storage.batch_exists_v2(names, wants[1:])
    assert (only_states.kv_hit_pages, only_states.restorable_prefix_pages) == (5, [5])


def test_a_window_far_before_the_end_is_found(socket: Path, stack: ExitStack) -> None:
    engine = Engine(socket, stack)
    names = rig.hashes(16)
    engine.put(engine.kv, PoolName.KV, names)
    engine.put(engine.swa, PoolName.SWA, names[:2])
    hit = engine.storage.batch_exists_v2(names, [asked(PoolName.SWA, 2, TRAILING)])
    assert (hit.kv_hit_pages, hit.extra_pool_hit_pages) == (2, {PoolName.KV: 16, PoolName.SWA: 2})


def test_several_ranks_are_told_every_boundary(socket: Path, stack: ExitStack) -> None:
    engine = Engine(socket, stack, tp_size=2)
    names = rig.hashes(6)
    engine.put(engine.kv, PoolName.KV, names)
    for page in (1, 2, 5):
        engine.put(engine.mamba, PoolName.MAMBA, [names[page]])
    hit = engine.storage.batch_exists_v2(names, [asked(PoolName.MAMBA, 1, TRAILING)])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (6, [2, 3, 6])


def test_a_pool_that_is_needed_throughout_bounds_the_hit(socket: Path, stack: ExitStack) -> None:
    engine = Engine(socket, stack)
    names = rig.hashes(4)
    engine.put(engine.kv, PoolName.KV, names)
    engine.put(engine.swa, PoolName.SWA, names[:2])
    hit = engine.storage.batch_exists_v2(names, [asked(PoolName.SWA, 4, ALL)])
    assert (hit.kv_hit_pages, hit.extra_pool_hit_pages[PoolName.SWA]) == (2, 2)
    blocks = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert engine.storage.batch_exists_v2(names, [blocks]).kv_hit_pages == 4


def test_a_window_with_a_gap_is_a_miss_of_the_pages_after_it(socket: Path, stack: ExitStack) -> None:
    engine = Engine(socket, stack)
    names = rig.hashes(3)
    engine.put(engine.swa, PoolName.SWA, names[:1])
    engine.put(engine.swa, PoolName.SWA, names[2:])
    indices = rig.slots(engine.swa, 3)
    found = engine.storage.batch_get_v2([moved(PoolName.SWA, names, indices)])
    assert found == {PoolName.SWA: [True, False, False]}


def test_states_of_ranks_are_kept_apart_though_their_latents_are_shared(
    socket: Path, stack: ExitStack
) -> None:
    names = rig.hashes(2)
    stores = []
    for rank in (0, 1):
        _, latent = rig.mla_pool()
        sides = {PoolName.KV: latent, PoolName.MAMBA: rig.mamba_pool()}
        stores.append(
            (
                rig.storage(socket, latent, stack, sides=sides, is_mla_model=True, tp_rank=rank, tp_size=2),
                latent,
                sides[PoolName.MAMBA],
            )
        )
    (first, latent, states), (second, _, other_states) = stores
    assert first.batch_set_v1(names, rig.slots(latent, 2)) == [True, True]
    transfer = moved(PoolName.MAMBA, names[1:], rig.slots(states, 1), TRAILING)
    assert first.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
    wants = [asked(PoolName.MAMBA, 1, TRAILING)]
    assert first.batch_exists_v2(names, wants).kv_hit_pages == 2
    assert second.batch_exists(names) == 2
    assert second.batch_exists_v2(names, wants).kv_hit_pages == 0
    mine = moved(PoolName.MAMBA, names[1:], rig.slots(other_states, 1), TRAILING)
    assert second.batch_set_v2([mine]) == {PoolName.MAMBA: [True]}
    assert second.batch_exists_v2(names, wants).kv_hit_pages == 2


def test_a_pool_that_only_numbers_pages_is_found_like_any_other(socket: Path, stack: ExitStack) -> None:
    anchor = LogicalHostPool(rig.SLOTS, rig.PAGE)
    _, compressed = rig.mha_pool()
    sides = {PoolName.KV: anchor, PoolName.DEEPSEEK_V4_C4: compressed}
    store = rig.storage(socket, anchor, stack, sides=sides)
    names = rig.hashes(3)
    wants = [asked(PoolName.DEEPSEEK_V4_C4, 3, ALL)]
    assert store.batch_exists_v2(names, wants).kv_hit_pages == 0
    rig.scramble(compressed)
    indices = rig.slots(compressed, 3)
    assert store.batch_set_v2([moved(PoolName.DEEPSEEK_V4_C4, names, indices)]) == {
        PoolName.DEEPSEEK_V4_C4: [True] * 3
    }
    assert store.batch_set_v1(names, rig.slots(anchor, 3)) == [True] * 3
    assert store.batch_exists_v2(names, wants).kv_hit_pages == 3
    assert store.batch_get_v1(names, rig.slots(anchor, 3)) == [True] * 3


def test_transfers_of_unknown_pools_or_without_slots_are_misses(socket: Path, stack: ExitStack) -> None:
    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    names = rig.hashes(2)
    assert store.batch_set_v1(names, rig.slots(host, 2)) == [True, True]
    unknown = moved(PoolName.DRAFT, names, rig.slots(host, 2))
    empty = PoolTransfer(name=PoolName.KV, keys=names)
    for answer in (store.batch_set_v2([unknown, empty]), store.batch_get_v2([unknown, empty])):
        assert answer == {PoolName.DRAFT: [False, False], PoolName.KV: [False, False]}
    assert store.batch_exists_v2(names, [asked(PoolName.DRAFT, 2, ALL)]).kv_hit_pages == 0
    assert store.batch_exists_v2(names).kv_hit_pages == 2


def test_a_pool_whose_pages_are_divided_among_ranks_stops_the_start(socket: Path, stack: ExitStack) -> None:
    _, host = rig.mha_pool()
    host.placement = object()
    with pytest.raises(MisconfiguredError, match="divided among ranks"):
        rig.storage(socket, host, stack)


def test_sglangs_hybrid_controller_backs_up_and_prefetches_states(tmp_path: Path, stack: ExitStack) -> None:
    stack.enter_context(rig.serving(rig.model(tmp_path / "model")))
    node = rig.start_node(tmp_path / "host", stack)
    here = rig.hybrid_controller(node.settings.socket_path, stack)
    there = rig.hybrid_controller(node.settings.socket_path, stack)
    pages, names = 4, rig.hashes(4)
    for seed, pool in enumerate((here.kv, here.states)):
        rig.scramble(pool, seed)
    indices, state = rig.slots(here.kv, pages), rig.slots(here.states, 1)
    here.made.write_storage(
        indices,
        RadixKey(rig.tokens(pages)),
        hash_value=names,
        extra_pools=[moved(PoolName.MAMBA, names[-1:], state, TRAILING)],
    )
    written = rig.take(here.made.ack_backup_queue)
    assert written.completed_tokens == pages * rig.PAGE
    assert written.pool_storage_result.extra_pool_hit_pages == {PoolName.MAMBA: 1}

    wanted = asked(PoolName.MAMBA, 1, TRAILING)
    there.made.prefetch(CacheRequestHandle("r", 0), RadixKey(rig.tokens(6)), None, extra_pools=[wanted])
    operation = rig.take(there.made.prefetch_hit_queue)
    assert operation.storage_hit_count == pages * rig.PAGE
    operation.host_indices = rig.slots(there.kv, pages)
    wanted.host_indices = rig.slots(there.states, 1)
    there.made.prefetch_buffer.put(operation)
    acks = [rig.take(there.made.ack_prefetch_queue)]
    while not acks[-1].completed_req:
        acks.append(rig.take(there.made.ack_prefetch_queue))
    assert max(ack.completed_tokens or 0 for ack in acks) == pages * rig.PAGE
    assert [ack.pool_hits["mamba"] for ack in acks if ack.pool_hits] == [1]
    assert rig.page_bytes(there.kv, operation.host_indices) == rig.page_bytes(here.kv, indices)
    assert rig.page_bytes(there.states, wanted.host_indices) == rig.page_bytes(here.states, state)
    at_rest(node)
