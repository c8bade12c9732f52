"""Outages, accounting and the end of the adapter, as LMCache's controllers meet them."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.lmcache.test_adapter import eventually
from tests.servers import Server, free_ports, running_server, start_server

from kvferry.testing.census import Census, left_since

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`LoggingHandler` in:DeprecationWarning"),  # LMCache's, on late imports
]

Open = Callable[..., Any]
BRIEF = {"lookup_deadline_ms": 300, "load_deadline_ms": 300, "store_deadline_ms": 300}
BOUND_S = 20.0
"""Far beyond every deadline here, and far below what an unbounded wait would take."""


@pytest.fixture
def rig() -> Any:
    from tests.engines.lmcache import rig

    return rig


@pytest.fixture
def frail() -> Iterator[Server]:
    """A server of the test's own, which it may stop."""
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


def _nothing_works_but_ends(rig: Any, adapter: Any) -> None:
    keys = [rig.key(n) for n in range(8)]
    began = time.monotonic()
    assert rig.look_up(adapter, keys, rig.desc()) == []
    into = [rig.thing(None) for _ in keys]
    assert rig.load(adapter, keys, into) == []
    result = rig.store(adapter, keys, [rig.thing(n + 100) for n in range(8)])
    assert not result.is_successful()
    adapter.delete(keys)
    assert time.monotonic() - began < BOUND_S
    at_the_end = [rig.content(thing) for thing in into]
    assert at_the_end == [rig.content(thing) for thing in into]


def _works(rig: Any, adapter: Any, key: Any) -> bool:
    into = rig.thing(None)
    stored = rig.store(adapter, [key], [rig.thing(5)]).is_successful()
    return (
        stored and rig.load(adapter, [key], [into]) == [0] and rig.content(into) == rig.content(rig.thing(5))
    )


def test_a_stopped_valkey_is_a_miss_within_the_deadline_and_serves_again(
    rig: Any, opened: Open, frail: Server
) -> None:
    keys = [rig.key(n) for n in range(8)]
    one = opened(frail, **BRIEF)
    assert rig.store(opened(frail), keys, [rig.thing(n) for n in range(8)]).is_successful()
    frail.pause()
    _nothing_works_but_ends(rig, one)
    assert one.report_status()["is_healthy"], "an outage is no reason to restart LMCache"
    eventually(lambda: one.report_status()["state"] == "down", "the outage is shown")
    frail.resume()
    eventually(lambda: _works(rig, one, rig.key(50)), "it serves again")
    into = [rig.thing(None) for _ in keys]
    eventually(lambda: rig.load(one, keys, into) == list(range(8)), "what was stored before is still there")
    assert [rig.content(thing) for thing in into] == [rig.content(rig.thing(n)) for n in range(8)]


def test_a_killed_valkey_is_a_miss_and_another_in_its_place_serves(
    rig: Any, opened: Open, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    first = start_server(tmp_path, port=port)
    try:
        one = opened(first, **BRIEF)
    finally:
        first.stop()
    _nothing_works_but_ends(rig, one)
    second = start_server(tmp_path, port=port)
    try:
        eventually(lambda: _works(rig, one, rig.key(51)), "it serves again")
    finally:
        one.close()
        second.stop()


def test_a_valkey_that_comes_later_is_found(rig: Any, opened: Open, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    one = opened(f"valkey://127.0.0.1:{port}", **BRIEF)
    _nothing_works_but_ends(rig, one)
    status = one.report_status()
    assert (status["is_healthy"], status["state"]) == (True, "down")
    assert str(port) in status["detail"]["connection"]
    server = start_server(tmp_path, port=port)
    try:
        eventually(lambda: _works(rig, one, rig.key(52)), "it is found")
        assert one.report_status()["state"] == "up"
    finally:
        one.close()
        server.stop()


def test_a_wrong_setting_stops_the_start_with_one_line(rig: Any, valkey: Server) -> None:
    for params, complaint in (
        ({"fetch_conections": 2}, "did you mean fetch_connections"),
        ({"valkey_password_file": "/nonexistent"}, "nonexistent"),
    ):
        with pytest.raises(Exception, match=complaint) as caught:
            rig.loaded(valkey, **params)
        assert "\n" not in str(caught.value)
    with running_server(password="right") as server, pytest.raises(Exception, match=r"password|NOAUTH"):
        rig.loaded(f"valkey://127.0.0.1:{server.port}")


def test_closing_in_the_middle_ends_every_touch_of_lmcaches_memory(rig: Any, valkey: Server) -> None:
    before = Census.now()
    shape = (8, 512, 512)
    one = rig.loaded(valkey)
    keys = [rig.key(n) for n in range(12)]
    assert rig.store(one, keys, [rig.thing(n, shape) for n in range(12)]).is_successful()
    into = [rig.thing(None, shape) for _ in keys]
    one.submit_load_task(keys, into)
    one.submit_store_task([rig.key(n + 100) for n in range(12)], into)
    one.submit_lookup_and_lock_task(keys, {})
    closers = [threading.Thread(target=one.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(BOUND_S)
        assert not closer.is_alive()
    at_the_end = [rig.content(thing) for thing in into]
    time.sleep(0.1)  # long enough for a late byte to show; none can come
    assert at_the_end == [rig.content(thing) for thing in into]
    ours = [name for name in left_since(before) if "kvferry" in name or "eventfd" in name]
    assert not ours


def test_listeners_hear_of_every_object_once_with_its_bytes(rig: Any, opened: Open, valkey: Server) -> None:
    one, told = opened(valkey), rig.Told()
    one.register_listener(told)
    keys = [rig.key(1), rig.key(2, cache_salt="alice")]
    things = [rig.thing(1), rig.thing(2)]
    nbytes = things[0].get_size()
    assert rig.store(one, keys, things).is_successful()
    assert told.stored == [(keys[0], nbytes), (keys[1], nbytes)]
    assert rig.store(one, keys[:1], things[:1]).is_successful()
    assert told.stored[2:] == [(keys[0], 0)], "stored again, it takes no more room"
    usage = one.get_usage()
    assert usage.total_bytes_used == 2 * nbytes
    assert dict(usage.bytes_by_cache_salt) == {"": nbytes, "alice": nbytes}
    assert rig.load(one, keys, [rig.thing(None), rig.thing(None)]) == [0, 1]
    eventually(lambda: told.accessed == keys, "loads are told")
    one.delete(keys[1:])
    assert told.deleted == keys[1:]
    assert one.get_usage().total_bytes_used == nbytes
    assert rig.look_up(one, keys, rig.desc()) == [0]


def test_what_valkey_evicted_leaves_the_account_when_it_is_missed(
    rig: Any, opened: Open, valkey: Server
) -> None:
    one, told = opened(valkey), rig.Told()
    one.register_listener(told)
    assert rig.store(one, [rig.key(1)], [rig.thing(1)]).is_successful()
    valkey.ask("FLUSHALL")
    assert rig.load(one, [rig.key(1)], [rig.thing(None)]) == []
    eventually(lambda: told.deleted == [rig.key(1)], "it is told")
    assert one.get_usage().total_bytes_used == 0


def test_lmcaches_own_eviction_leaves_locked_objects_alone(rig: Any, opened: Open, valkey: Server) -> None:
    one = opened(valkey, max_capacity_gb=1)
    assert one.supports_global_eviction
    keys = [rig.key(1), rig.key(2)]
    assert rig.store(one, keys, [rig.thing(1), rig.thing(2)]).is_successful()
    assert rig.look_up(one, keys[:1], rig.desc()) == [0]
    one.delete(keys)
    assert rig.look_up(one, keys, rig.desc()) == [0]
    one.submit_unlock(keys[:1])
    one.delete(keys[:1])
    assert rig.look_up(one, keys[:1], rig.desc()) == [0], "it was locked twice"
    one.submit_unlock(keys[:1] * 2)
    one.delete(keys[:1])
    assert rig.look_up(one, keys, rig.desc()) == []


def test_nothing_that_lmcache_passes_raises_or_fills_the_log(
    rig: Any, opened: Open, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    one = opened(valkey)
    nowhere = [rig.thing(None, (0, 4)) for _ in range(100)]
    keys = [rig.key(n) for n in range(100)]
    assert not rig.store(one, keys, nowhere).is_successful()
    assert rig.load(one, keys, nowhere) == []
    assert [record.message for record in caplog.records if record.name == "kvferry.lmcache"] == [
        "not stored or loaded: an object of 0 bytes: between 1 and 1073741824 are stored"
    ]
    odd = [
        rig.key(1, model_name="m" * 5000, cache_salt="\udcff"),
        rig.key(2, kv_rank=-1),
        rig.key(3, object_group_id=1 << 70),
    ]
    nothing = rig.thing(None, (0, 4))
    assert rig.load(one, odd[:1], [nothing]) == []
    rig.look_up(one, odd, rig.desc())
    rig.store(one, odd, [rig.thing(n) for n in range(3)])
    rig.load(one, odd, [rig.thing(None) for _ in odd])
    one.submit_unlock(odd)
    one.delete(odd)


def test_a_listing_of_keys_is_not_offered(rig: Any, opened: Open, valkey: Server) -> None:
    with pytest.raises(NotImplementedError):
        opened(valkey).list_l2_keys()
