"""What was used lately, from one run of a keeper to the next."""

from pathlib import Path

import msgspec
import pytest
from tests.keeper.rig import EAGER, prompt

from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.remembered import MAX_FILE_BYTES, load, save
from kvferry.keeper.reuse import ReuseTable, Use, most_used
from kvferry.testing.memory_tier import MemoryTier

REFS = prompt("p", 24, nbytes=100)


def test_what_was_used_lately_outlives_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = ReuseTable(10)
    table.used(REFS[:3], 100.0)
    table.used(REFS[2:4], 200.0)
    file = tmp_path / "uses"
    save(file, table.all(), 210.0)
    save(file, table.all(), 210.0)
    assert (file.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o600, [file])
    again = ReuseTable(10)
    again.restore(load(file, 300.0))
    for within_s in (150.0, 250.0):
        asked = {"within_s": within_s, "max_bytes": 1 << 30, "namespace": None, "now": 300.0}
        assert most_used(again.all(), **asked) == most_used(table.all(), **asked)  # type: ignore[arg-type]
    smaller = ReuseTable(2)
    smaller.restore(load(file, 300.0))
    assert {use.ref for use in smaller.all()} == set(REFS[2:4])

    assert load(tmp_path / "none", 0.0) == []
    assert not caplog.records
    for damage in (b"", file.read_bytes()[:-5], b"\xc1" * 100, msgspec.msgpack.encode({"boot": 1})):
        file.write_bytes(damage)
        assert load(file, 0.0) == []
    assert len(caplog.records) == 4
    save(tmp_path / "no" / "directory", table.all(), 0.0)
    assert "could not be written" in caplog.text


def test_a_full_table_fits_into_the_room_that_is_left_for_it(tmp_path: Path) -> None:
    count = 1000
    save(tmp_path / "uses", [Use(ref, 1e8 / 3, 0.1) for ref in prompt("q", count, nbytes=1 << 29)], 1e8)
    assert (tmp_path / "uses").stat().st_size * Limits().reused_parts / count < MAX_FILE_BYTES


def test_a_keeper_that_is_closed_remembers(tmp_path: Path) -> None:
    for used in (REFS[:4], REFS[2:3]):
        keeper = Keeper(
            valkey=MemoryTier("valkey"),
            disk=MemoryTier("disk"),
            objects=None,
            limits=EAGER,
            uses=tmp_path / "uses",
        )
        keeper.used(used)
        found = keeper.most_reused(within_s=3600, max_bytes=1 << 30, namespace=None)
        keeper.close()
    assert found[0] == REFS[2]
    assert set(found) == set(REFS[:4])
