"""Real shared memory: sealed, nameless, seen by every mapping, gone when the last view is."""

import array
import errno
import fcntl
import gc
import mmap
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.errors import ClosedError, MisconfiguredError, RefusedError
from kvferry.pool import pages
from kvferry.pool.arena import Arena, ArenaMapping
from kvferry.pool.memory import available_bytes
from kvferry.pool.prepare import PrepareThread

MIB = 1 << 20
POOL = 8 * MIB


def mappings() -> int:
    """How many mappings of pools this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-test")


@pytest.fixture
def arena() -> "Arena":
    return Arena.create(POOL, name="kvferry-test")


def test_nobody_who_holds_the_descriptor_can_resize_it(arena: Arena) -> None:
    left, right = socket.socketpair()
    with left, right:
        socket.send_fds(left, [b"x"], [arena.fd])
        _, fds, _, _ = socket.recv_fds(right, 1, 1)
    (theirs,) = fds
    for size in (0, POOL - MIB, POOL + MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(theirs, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(theirs, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    client = ArenaMapping.attach(theirs, POOL)
    os.close(theirs)
    client.view(POOL - 3, 3)[:] = b"end"
    assert bytes(arena.view(POOL - 3, 3)) == b"end"
    client.close()
    arena.close()


def test_two_mappings_see_the_same_bytes_at_aligned_addresses(arena: Arena) -> None:
    client = ArenaMapping.attach(arena.fd, arena.nbytes)
    assert client.address != arena.address
    assert client.address % pages.HUGE_BYTES == arena.address % pages.HUGE_BYTES == 0
    for offset in (0, 12345, POOL - 7):
        client.view(offset, 7)[:] = b"%07d" % offset
        assert bytes(arena.view(offset, 7)) == b"%07d" % offset
    client.close()
    arena.close()


def test_another_process_sees_the_bytes(arena: Arena) -> None:
    program = (
        "import sys; from kvferry.pool.arena import ArenaMapping\n"
        "m = ArenaMapping.attach(int(sys.argv[1]), int(sys.argv[2])); v = m.view(100, 4)\n"
        "assert bytes(v) == b'ping'; v[:] = b'pong'"
    )
    arena.view(100, 4)[:] = b"ping"
    subprocess.run(
        [sys.executable, "-c", program, str(arena.fd), str(POOL)],
        check=True,
        pass_fds=[arena.fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )
    assert bytes(arena.view(100, 4)) == b"pong"
    arena.close()


def test_closing_leaves_the_memory_until_the_last_view_is_gone(arena: Arena) -> None:
    view = arena.view(4096, 16)
    view[:] = b"0123456789abcdef"
    part = view[4:8]
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.view(0, 1)
    assert arena.mapped and mappings() == 1
    view.release()
    assert bytes(part) == b"4567" and arena.mapped
    del view, part
    gc.collect()
    assert not arena.mapped and mappings() == 0


def test_nothing_is_left_behind(arena: Arena) -> None:
    before = set(os.listdir("/proc/self/fd"))
    shared = set(os.listdir("/dev/shm"))
    assert mappings() == 1
    for _ in range(5):
        other = Arena.create(POOL, name="kvferry-test")
        client = ArenaMapping.attach(other.fd, POOL)
        client.view(0, 3)[:] = b"abc"
        client.close()
        other.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert set(os.listdir("/dev/shm")) == shared
    assert mappings() == 1
    arena.close()
    assert mappings() == 0


def test_views_write_through_without_copying(arena: Arena) -> None:
    read, write = os.pipe()
    os.write(write, b"from a descriptor")
    assert os.readv(read, [arena.view(2 * MIB, 17)]) == 17
    os.close(read)
    os.close(write)
    assert bytes(arena.view(2 * MIB, 17)) == b"from a descriptor"
    view = arena.view(0, 8)
    assert not view.readonly and view.contiguous and view.format == "B" and view.itemsize == 1
    view.cast("d")[0] = 1.5
    assert array.array("d", bytes(view))[0] == 1.5
    del view
    arena.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, POOL + 1), (POOL, 1), (4, -1)])
def test_a_view_outside_the_pool_is_refused(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(RefusedError, match="outside"):
        arena.view(offset, nbytes)
    arena.close()


def test_what_is_not_a_sealed_pool_of_that_size_is_refused(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="expected"):
        ArenaMapping.attach(arena.fd, POOL + pages.HUGE_BYTES)
    arena.close()
    unsealed = os.memfd_create("kvferry-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, POOL)
    with pytest.raises(RefusedError, match="seals 0x0"):
        ArenaMapping.attach(unsealed, POOL)
    os.close(unsealed)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(POOL)
        with pytest.raises(RefusedError, match="not a pool"):
            ArenaMapping.attach(file.fileno(), POOL)
    with pytest.raises(RefusedError, match="not a pool"):
        ArenaMapping.attach(file_closed := 999_999, POOL)
    assert file_closed


def test_a_pool_larger_than_the_memory_is_refused_before_anything_is_taken() -> None:
    fds = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MisconfiguredError, match="make the pool smaller"):
        Arena.create(1 << 46)
    with pytest.raises(MisconfiguredError, match="positive"):
        Arena.create(0)
    assert set(os.listdir("/proc/self/fd")) == fds


def test_the_size_is_rounded_up_to_huge_pages() -> None:
    arena = Arena.create(3 * MIB)
    assert arena.nbytes == 4 * MIB
    arena.close()


def test_preparation_faults_everything_in_and_changes_nothing(arena: Arena) -> None:
    arena.view(5, 3)[:] = b"abc"
    thread = PrepareThread(arena, step_bytes=2 * MIB, duty=1.0)
    assert not thread.statistics().done
    thread.start()
    assert thread.join(60)
    statistics = thread.statistics()
    assert statistics.done
    if "populate" not in statistics.refused:
        assert statistics.populated_bytes == POOL
        assert os.fstat(arena.fd).st_blocks * 512 == POOL
    assert statistics.huge_bytes <= statistics.populated_bytes
    assert bytes(arena.view(5, 3)) == b"abc"
    thread.close()
    arena.close()


def test_preparation_can_be_stopped_and_the_arena_closed_under_it() -> None:
    arena = Arena.create(64 * MIB, name="kvferry-test")
    thread = PrepareThread(arena, step_bytes=2 * MIB, duty=0.01)
    thread.start()
    arena.close()
    thread.close()
    thread.close()
    assert mappings() == 0
    late = PrepareThread(arena)
    late.start()
    assert late.join(10) and late.statistics().populated_bytes == 0
    PrepareThread(arena).close()


@pytest.mark.parametrize("refused", ["hugepage", "populate", "collapse"])
def test_a_kernel_that_does_not_know_an_advice_is_no_obstacle(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    number = {
        "hugepage": "MADV_HUGEPAGE",
        "populate": "MADV_POPULATE_WRITE",
        "collapse": "MADV_COLLAPSE",
    }[refused]
    monkeypatch.setattr(pages, number, 9999)  # madvise really answers EINVAL
    thread = PrepareThread(arena, step_bytes=2 * MIB, duty=1.0)
    thread.start()
    assert thread.join(60)
    statistics = thread.statistics()
    assert statistics.refused[refused] >= 1
    assert f"{refused}: {errno.errorcode[errno.EINVAL]}" in statistics.refused
    if refused != "hugepage":
        assert statistics.huge_bytes == 0
    arena.view(0, 1)[0] = 7
    thread.close()
    arena.close()


@pytest.mark.parametrize(("step", "duty"), [(0, 0.5), (MIB, 0.5), (2 * MIB, 0.0), (2 * MIB, 1.5)])
def test_impossible_preparation_settings_are_refused(arena: Arena, step: int, duty: float) -> None:
    with pytest.raises(MisconfiguredError):
        PrepareThread(arena, step_bytes=step, duty=duty)
    arena.close()


def test_a_mapping_that_the_kernel_refuses_is_a_setting_that_is_wrong() -> None:
    with pytest.raises(MisconfiguredError, match="cannot map"):
        pages.map_shared(-1, pages.HUGE_BYTES)
    with pytest.raises(MisconfiguredError, match="cannot map"):
        pages.map_shared(-1, 1 << 62)


def write_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\n"}
GROUP_2 = {"proc/self/cgroup": "0::/a/b\n"}
GROUP_1 = {"proc/self/cgroup": "9:name=systemd:/x\n4:memory:/a\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 1000 * 1024),
        ({**MEMINFO, **GROUP_2, "sys/fs/cgroup/a/b/memory.max": "max\n"}, 1000 * 1024),
        (
            {
                **MEMINFO,
                **GROUP_2,
                "sys/fs/cgroup/a/memory.max": "500000\n",
                "sys/fs/cgroup/a/memory.current": "300000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100000\n",
            },
            300000,
        ),
        (
            {
                **MEMINFO,
                **GROUP_1,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500000\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "600000\n",
            },
            0,
        ),
        ({**MEMINFO, "proc/self/cgroup": "0::/../../x\n"}, 1000 * 1024),
    ],
)
def test_available_memory_is_the_least_of_machine_and_groups(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert available_bytes(write_root(tmp_path, files)) == expected


def test_available_memory_of_this_machine_is_known_and_below_its_total() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def test_core_dumps_leave_the_pool_out(arena: Arena) -> None:
    engines = ArenaMapping.attach(arena.fd, arena.nbytes)
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    flags = [entry.partition("VmFlags:")[2].split() for entry in entries if "memfd:kvferry-test" in entry]
    engines.close()
    arena.close()
    assert len(flags) >= 1  # the kernel may have joined two
    assert all("dd" in found for found in flags)
