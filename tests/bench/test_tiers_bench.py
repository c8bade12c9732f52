"""The benchmark of tiers runs, verifies what it moved, and tells what it could not measure."""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.bench import tiers
from kvferry.bench.tier_beside import BesideRow
from kvferry.bench.tier_disk_upkeep import Upkeep
from kvferry.bench.tier_protection import Protected
from kvferry.config import NODE_SETTINGS
from kvferry.errors import MisconfiguredError
from kvferry.testing.expectations import eventually
from kvferry.testing.s3 import start_obstore
from kvferry.tiers.valkey.protection import Checksums
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.url import parse_url

SOURCE = Path(tiers.__file__).parents[1]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tiers.add_arguments(parser)
    return parser.parse_args(words)


def test_a_small_run_reports_both_directions_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "--parts",
        "0.5",
        "--rounds",
        "1",
        "--sample-mib",
        "2",
        "--only",
        "transfers",
        "--no-peers",
        "--json",
    )
    assert tiers.main(parse(*small)) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["operation"] for row in report["transfers"]] == ["GET", "SET"]
    assert all(row["ratio"] > 0 and set(row["gb_s"]) == {"bare", "kvferry"} for row in report["transfers"])


def test_the_table_marks_what_falls_short() -> None:
    row = tiers.Transfers(
        "GET", 2.5, {"bare": 2.0, "kvferry": 1.0}, {"bare": 0.1, "kvferry": 0.1}, 0.5, (0.4, 0.6)
    )
    text = tiers.render(tiers.Report(server="valkey 9", transfers=[row], not_measured={"allocator": "none"}))
    assert "short" in text
    assert "allocator: not measured: none" in text


def test_every_protection_is_measured_beside_the_unchecked_path(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rounds", "1", "--sample-mib", "2", "--only", "protection")
    assert tiers.main(parse(*small, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    found = [(row["operation"], row["protection"]) for row in report["protection"]]
    valkey = ["unchecked", "checksum", "AES-GCM"]
    tls = ["unchecked", "checksum", "TLS", "TLS + AES-GCM"]
    assert found == [(verb, name) for names in (valkey, tls) for verb in ("GET", "SET") for name in names]
    assert all(row["ratio"] == 1 for row in report["protection"] if row["protection"] == "unchecked")
    text = tiers.render(tiers.Report(protection=[Protected(**row) for row in report["protection"]]))
    assert "TLS + AES-GCM" in text
    assert {len(line) for line in text.splitlines() if line.startswith(("GET", "SET"))} == {102}


def test_the_disk_is_measured_beside_a_bare_loop(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--parts", "0.5,32", "--rounds", "1", "--sample-mib", "4", "--only", "disk")
    assert tiers.main(parse(*small, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["operation"], row["part_mib"]) for row in report["disk"]] == [("read", 0.5), ("write", 0.5)]
    upkeep = Upkeep(**report["disk_upkeep"])
    assert upkeep.amplification["0"] == 1.0 <= max(upkeep.amplification.values()) <= 2.0
    assert upkeep.indexed_parts == 1562
    text = tiers.render(tiers.Report(disk=[BesideRow(**row) for row in report["disk"]], disk_upkeep=upkeep))
    assert "kvferry" in text
    assert "1,562 parts of 2.5 MiB found again" in text
    assert text.count("0.5") >= 2


@pytest.fixture(scope="module")
def obstore() -> None:
    """Before anything is counted."""
    start_obstore()


def test_objects_are_measured_beside_bare_obstore(obstore: None, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--parts", "0.5,32", "--rounds", "1", "--sample-mib", "4", "--only", "objects")
    assert tiers.main(parse(*small, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    found = [(row["operation"], row["part_mib"]) for row in report["objects"]]
    assert found == [("read", 0.5), ("write", 0.5)]
    text = tiers.render(tiers.Report(objects=[BesideRow(**row) for row in report["objects"]]))
    assert "kvferry" in text
    assert text.count("0.5") >= 2


def test_what_copies_cost_a_reader_is_measured_beside_a_reader_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--rounds", "1", "--sample-mib", "16", "--only", "keeper", "--json"]
    assert tiers.main(parse(*options)) == 0
    found = json.loads(capsys.readouterr().out)["keeper"]
    assert found["alone_gb_s"] > 0
    assert found["flushing_gb_s"] > 0
    assert found["cpu_ratio"] > 0  # a turn whose copies do not all arrive is an error


def test_no_setting_leads_to_the_unchecked_path() -> None:
    names = {setting.name for setting in NODE_SETTINGS}
    assert {name for name in names if "encrypt" in name or "check" in name} == {"encryption_key_file"}
    assert isinstance(ValkeySettings(parse_url("valkey://localhost")).protection, Checksums)
    sources = [path for path in SOURCE.rglob("*.py") if "bench" not in path.parts]
    assert not [path.name for path in sources if "Unchecked" in path.read_text()]


@pytest.mark.parametrize(
    "words", [("--parts", "big"), ("--parts", "0"), ("--rounds", "0"), ("--only", "transfers,everything")]
)
def test_wrong_arguments_are_one_line(words: tuple[str, ...]) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        tiers.main(parse(*words))
    assert "\n" not in str(caught.value)


def test_a_stopped_run_leaves_no_server() -> None:
    small = ("--parts", "0.5", "--rounds", "1000", "--sample-mib", "1", "--only", "transfers", "--no-peers")
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry", "bench", "tiers", *small],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline().startswith("parts of")
        started = _descendants(run.pid)
        assert started
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 130
        assert "Traceback" not in run.stderr.read()
        eventually(lambda: not any(map(_runs, started)), "the end of its servers")


def _descendants(ancestor: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = [ancestor]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it ended while we looked
                found += [int(word) for word in task.read_text().split()]
    return found[1:]


def _runs(pid: int) -> bool:
    """Whether it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
