"""Draft layers keep KV that depends on the next token: a load ends a block early, as an own hit does."""

import pytest

from kvferry.engines.planning import ChunkGeometry, plan_load
from kvferry.identity.geometry import GroupKind, KvGroup

FULL = (KvGroup(GroupKind.FULL, 16, stages=(), block_bytes=(), kv_heads=1),)


@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("local_tokens", [0, 16, 48])
def test_the_last_block_of_a_load_is_computed_anew(chunk_tokens: int, local_tokens: int) -> None:
    drafts = ChunkGeometry(16, chunk_tokens, FULL, drafts=True)
    first = local_tokens // chunk_tokens
    load = plan_load(drafts, first_chunk=first, count=256 // chunk_tokens - first, local_tokens=local_tokens)
    assert load is not None
    assert load.local_tokens + load.external_tokens == 256 - 16


@pytest.mark.parametrize("local_tokens", [240, 256])
def test_what_an_own_hit_would_leave_out_is_not_loaded(local_tokens: int) -> None:
    drafts, plain = ChunkGeometry(16, 64, FULL, drafts=True), ChunkGeometry(16, 64, FULL)
    assert plan_load(drafts, first_chunk=0, count=4, local_tokens=local_tokens) is None
    assert (plan_load(plain, first_chunk=0, count=4, local_tokens=local_tokens) is None) == (
        local_tokens == 256
    )
