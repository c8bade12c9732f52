"""Beneath LMCache's own serde wrapper, which stores other bytes than those of the layout it asks for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`LoggingHandler` in:DeprecationWarning"),  # LMCache's, on late imports
]

SERDE = {"type": "fp8"}


@pytest.fixture
def rig() -> Any:
    from tests.engines.lmcache import rig

    return rig


@pytest.fixture
def wrapped() -> Iterator[Callable[[Any], Any]]:
    """Puts LMCache's fp8 serde before an adapter."""
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    l1 = L1Manager(L1ManagerConfig(memory_config=memory))
    made: list[Any] = []

    def wrap(adapter: Any) -> Any:
        serde = create_serde_processor(SerdeConfig(type="fp8", kwargs={}))
        made.append(SerdeL2AdapterWrapper(adapter, serde, l1))
        return made[-1]

    yield wrap
    for wrapper in made:
        wrapper.close()
    l1.close()


def test_what_a_serde_made_is_found_and_loaded_where_the_same_serde_is_named(
    rig: Any, wrapped: Callable[[Any], Any], valkey: Server
) -> None:
    import torch

    one, other = (wrapped(rig.loaded(valkey, serde=SERDE)) for _ in range(2))
    sent = rig.thing(None)
    values = torch.arange(sent.get_size() // 2, dtype=torch.float32) % 100
    sent.raw_data.copy_(values.to(torch.bfloat16).view(torch.uint8))
    assert rig.store(one, [rig.key(1)], [sent]).is_successful()
    assert sum(len(reply) for reply in _values(valkey)) < 0.6 * sent.get_size()
    assert rig.look_up(other, [rig.key(1), rig.key(2)], rig.desc()) == [0]
    into = rig.thing(None)
    assert rig.load(other, [rig.key(1)], [into]) == [0]
    found = into.raw_data.view(torch.bfloat16).float()
    assert torch.allclose(found, values, rtol=0.1, atol=0.5)


def test_what_a_serde_made_is_never_found_without_it(
    rig: Any, wrapped: Callable[[Any], Any], valkey: Server
) -> None:
    one, plain = wrapped(rig.loaded(valkey, serde=SERDE)), rig.loaded(valkey)
    try:
        assert rig.store(one, [rig.key(1)], [rig.thing(None)]).is_successful()
        assert rig.look_up(plain, [rig.key(1)], rig.desc()) == []
        assert rig.load(plain, [rig.key(1)], [rig.thing(None)]) == []
    finally:
        plain.close()


def _values(server: Server) -> list[bytes]:
    replies = [server.ask("GET", name) for name in server.key_names()]
    return [reply for reply in replies if isinstance(reply, bytes)]
