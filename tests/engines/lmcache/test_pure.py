"""The adapter's parts that need no LMCache: settings, books, results, memory, the way to Valkey."""

import ctypes
import mmap
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.lmcache.batches import Batch
from kvferry.engines.lmcache.books import LOCK_S, Holdings, Locks
from kvferry.engines.lmcache.compat import engine_format
from kvferry.engines.lmcache.link import Link
from kvferry.engines.lmcache.memory import HUGE_BYTES, Layouts, advise_huge_pages, view
from kvferry.engines.lmcache.outbox import Outbox
from kvferry.engines.lmcache.settings import KEYS, parse_settings
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import FetchResult, Outcome
from kvferry.tiers.valkey.greeting import UnreachableServersError

URL = "valkey://cache.internal:6379"


# -- settings ----------------------------------------------------------------------------------


def test_a_url_is_all_that_is_needed() -> None:
    found = parse_settings({"valkey": URL}, environ={})
    assert str(found.valkey) == URL
    assert (found.domain, found.lookup_s, found.load_s, found.store_s) == ("default", 1.0, 5.0, 30.0)
    assert (found.fetch_connections, found.store_connections, found.serde) == (None, 2, "")


def test_every_setting_arrives(tmp_path: Path) -> None:
    for name, text in (("password", "s3cret"), ("keys", "ab" * 32)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    given_params = {
        "valkey": URL,
        "valkey_password_file": str(tmp_path / "password"),
        "domain": "prod",
        "domain_key_file": "/run/key",
        "encryption_key_file": str(tmp_path / "keys"),
        "lookup_deadline_ms": 100,
        "load_deadline_ms": 200,
        "store_deadline_ms": 300,
        "fetch_connections": 2,
        "store_connections": 3,
        "serde": {"type": "fp8", "a": 1},
        "weights": "rev1",
        "max_capacity_gb": 1.5,
    }
    assert set(given_params) == set(KEYS)
    found = parse_settings(given_params, environ={})
    assert found.valkey.password == "s3cret"
    assert "s3cret" not in repr(found)
    assert (found.domain, found.domain_key_file, found.weights) == ("prod", Path("/run/key"), "rev1")
    assert found.encryption_keys is not None
    assert (found.lookup_s, found.load_s, found.store_s) == (0.1, 0.2, 0.3)
    assert (found.fetch_connections, found.store_connections) == (2, 3)
    assert found.serde == '{"a":1,"type":"fp8"}'
    assert found.capacity_bytes == 3 << 29


def test_a_password_of_the_environment_is_used() -> None:
    found = parse_settings({"valkey": URL}, environ={"KVFERRY_VALKEY_PASSWORD": "s3cret"})
    assert found.valkey.password == "s3cret"


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({}, "valkey is missing"),
        ({"valkey": 6379}, "valkey is missing"),
        ({"valkey": "http://x"}, "valkey"),
        ({"valkey": "valkey://:s3cret@host"}, "can be read by every user"),
        ({"valkey": URL, "domains": "x"}, "did you mean domain"),
        ({"valkey": URL, "load_deadline_ms": 0}, "load_deadline_ms"),
        ({"valkey": URL, "load_deadline_ms": "5"}, "whole number"),
        ({"valkey": URL, "fetch_connections": True}, "whole number"),
        ({"valkey": URL, "fetch_connections": 1000}, "outside 1 to 16"),
        ({"valkey": URL, "max_capacity_gb": -1}, "no number of GiB"),
        ({"valkey": URL, "serde": "fp8"}, "no serde"),
        ({"valkey": URL, "weights": ""}, "weights"),
        ({"valkey": URL, "encryption_key_file": "/nonexistent"}, "encryption_key_file"),
        ({"valkey": URL, "valkey_password_file": "/nonexistent"}, "Valkey's password"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MisconfiguredError, match=complaint) as caught:
        parse_settings(params, environ={})
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("found", ["0.4.9", "0.6.0", "1.0", "unknown", ""])
def test_another_lmcache_is_refused(found: str) -> None:
    with pytest.raises(MisconfiguredError, match="outside the range"):
        engine_format(found)


def test_builds_of_one_minor_version_share() -> None:
    assert {engine_format(found) for found in ("0.5.6", "0.5.7+cu13", "0.5.10")} == {"0.5"}


# -- books -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("sg"), st.lists(st.integers(0, 9), max_size=6))), st.integers(1, 6))
def test_what_is_told_of_holdings_always_adds_up(steps: list[tuple[str, list[int]]], limit: int) -> None:
    holdings: Holdings[int] = Holdings(limit)
    total = 0
    for verb, keys in steps:
        if verb == "s":
            added, forgotten = holdings.stored(keys, [key + 1 for key in keys])
            assert added.keys == keys
            total += sum(added.sizes) - sum(forgotten.sizes)
        else:
            total -= sum(holdings.gone(keys).sizes)
        held = [size for key in range(10) if (size := holdings.nbytes(key)) is not None]
        assert len(held) <= limit
        assert total == sum(held)


def test_locks_count_and_expire() -> None:
    locks: Locks[str] = Locks()
    locks.lock(["a", "a", "b"], 0.0)
    locks.unlock(["a", "c"])
    assert locks.locked("a", 1.0)
    locks.unlock(["a"])
    assert not locks.locked("a", 1.0)
    assert locks.locked("b", LOCK_S - 1)
    assert not locks.locked("b", LOCK_S + 1)


def test_locks_that_nobody_returns_take_no_room_for_ever() -> None:
    locks: Locks[int] = Locks(limit=3)
    locks.lock(list(range(5)), 0.0)
    assert [locks.locked(key, 1.0) for key in range(5)] == [False, False, True, True, True]
    locks.lock([9], LOCK_S + 1)
    assert [locks.locked(key, LOCK_S + 1) for key in (3, 4, 9)] == [False, False, True]


# -- results -----------------------------------------------------------------------------------


def test_a_result_is_announced_and_taken_once() -> None:
    outbox: Outbox[str] = Outbox()
    poller = select.poll()
    poller.register(outbox.fd, select.POLLIN)
    assert not poller.poll(0)
    outbox.put(7, "seven")
    outbox.put(8, "eight")
    assert poller.poll(0)
    assert os.eventfd_read(outbox.fd) == 2
    assert (outbox.take(7), outbox.take(7), outbox.take(9)) == ("seven", None, None)
    assert (outbox.take_all(), outbox.take_all()) == ({8: "eight"}, {})
    outbox.close()
    outbox.close()
    outbox.put(9, "nine")  # from a thread that was late


def test_results_that_nobody_fetches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engines.lmcache.outbox.MAX_RESULTS", 2)
    outbox: Outbox[int] = Outbox()
    for task in range(5):
        outbox.put(task, task)
    assert outbox.take_all() == {3: 3, 4: 4}
    outbox.close()


def test_a_batch_ends_once_with_its_outcomes_in_place() -> None:
    ended: list[list[Outcome]] = []
    outcomes = [Outcome.REFUSED] * 4
    batch = Batch(outcomes, [0, 2, 3], lambda found: ended.append(list(found)))
    batch.fetched(2, FetchResult(Outcome.OK, ()))
    batch.done(0, Outcome.MISS)
    assert not ended
    batch.done(1, Outcome.OK)
    assert ended == [[Outcome.MISS, Outcome.REFUSED, Outcome.OK, Outcome.OK]]


# -- memory ------------------------------------------------------------------------------------


def _thing(memory: bytearray, physical: int, meta: Any = None) -> Any:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    return SimpleNamespace(data_ptr=address, metadata=meta, get_physical_size=lambda: physical)


def test_a_view_is_the_memory_itself_and_no_more_of_it() -> None:
    memory = bytearray(100)
    found = view(_thing(memory, 64), 10)
    assert (found.nbytes, found.format, found.readonly) == (10, "B", False)
    found[:] = b"x" * 10
    assert memory == b"x" * 10 + bytes(90)
    with pytest.raises(RefusedError, match="with a layout of 65"):
        view(_thing(memory, 64), 65)


def test_an_object_that_is_not_in_host_memory_is_refused() -> None:
    class OnDisk:
        metadata = None

        @property
        def data_ptr(self) -> int:
            raise NotImplementedError("not addressable")

        def get_physical_size(self) -> int:
            return 10

    with pytest.raises(RefusedError, match="not addressable: give LMCache"):
        view(OnDisk(), 10)
    on_gpu = _thing(bytearray(10), 10)
    on_gpu.raw_data = SimpleNamespace(is_cpu=False)
    with pytest.raises(RefusedError, match="outside host memory"):
        view(on_gpu, 10)


def test_layouts_follow_the_object_even_where_its_lists_are_reused() -> None:
    layouts = Layouts()
    kind = SimpleNamespace(itemsize=2)
    meta = SimpleNamespace(shapes=[(2, 3)], dtypes=[kind])
    thing = SimpleNamespace(metadata=meta)
    first = layouts.of(thing)
    assert layouts.of(thing) is first
    meta.shapes[0] = (2, 4)
    assert layouts.of(thing).nbytes == 16
    single = SimpleNamespace(metadata=SimpleNamespace(shape=(5,), dtype=kind))
    assert layouts.of(single).shapes == ((5,),)


def test_advice_on_huge_pages_never_fails() -> None:
    memory = bytearray(3 * HUGE_BYTES)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    assert advise_huge_pages(address, len(memory)) in (True, False)
    assert not advise_huge_pages(address, 4096)
    assert not advise_huge_pages(1 << 40, 4 * HUGE_BYTES)


def test_memory_is_marked_for_huge_pages() -> None:
    with mmap.mmap(-1, 4 * HUGE_BYTES) as memory:
        held = ctypes.c_ubyte.from_buffer(memory)
        address = ctypes.addressof(held)
        del held
        if advise_huge_pages(address, len(memory)):  # a kernel may have none
            start = -(-address // HUGE_BYTES) * HUGE_BYTES
            assert "hg" in _flags_at(start)


def _flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            first, last = (int(end, 16) for end in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


# -- the way to Valkey -------------------------------------------------------------------------


class _Connecting:
    """Fails as often as told, then gives a tier."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.tried = threading.Event()

    def __call__(self) -> MemoryTier:
        if self._failures:
            raise self._failures.pop(0)
        self.tried.set()
        return MemoryTier()


def _eventually(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_server_that_is_down_is_asked_again_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    wrong = MisconfiguredError("the password is wrong")
    connecting = _Connecting(UnreachableServersError("down"), UnreachableServersError("down"), wrong, wrong)
    link = Link(connecting, retry_s=0.01)
    assert (link.tier, link.complaint) == (None, "down")
    _eventually(lambda: link.tier is not None)
    assert link.complaint == ""
    assert [record.message for record in caplog.records].count("the password is wrong") == 1
    link.close()
    link.close()


def test_what_no_waiting_cures_is_raised() -> None:
    with pytest.raises(MisconfiguredError, match="wrong"):
        Link(_Connecting(MisconfiguredError("wrong")))


def test_a_link_may_be_closed_while_it_waits() -> None:
    link = Link(_Connecting(*[UnreachableServersError("down")] * 1000), retry_s=60.0)
    link.close()
    assert link.tier is None
