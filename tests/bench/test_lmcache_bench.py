"""The benchmark of LMCache's adapters runs them all, and believes only what LMCache itself has verified."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from kvferry.bench import lmcache
from kvferry.errors import BrokenError, MisconfiguredError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    lmcache.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.engine
def test_lmcaches_own_bench_verifies_ours_beside_resp_and_valkey(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--turns", "1", "--rounds", "2", "--keys", "6", "--arms", "kvferry,resp,valkey,bare", "--json")
    assert lmcache.main(parse(*small)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_measured"] == {}
    assert [row["operation"] for row in report["operations"]] == ["load", "store"]
    for row in report["operations"]:
        assert set(row["gb_s"]) == {"kvferry", "resp", "valkey", "bare"}
        assert set(row["ratio"]) == {"resp", "valkey", "bare"}
        assert min(row["gb_s"].values()) > 0


def test_the_table_marks_what_falls_short() -> None:
    loads = lmcache.Compared("load", {"kvferry": 3.0, "resp": 2.0}, {"resp": 1.5}, {"resp": (1.4, 1.6)})
    stores = lmcache.Compared("store", {"kvferry": 1.0, "resp": 2.0}, {"resp": 0.5}, {"resp": (0.4, 0.6)})
    lines = lmcache.render(
        lmcache.Report(operations=[loads, stores], not_measured={"valkey": "glide_sync is not installed"})
    ).splitlines()
    assert [line.endswith("short") for line in lines if line.startswith(("load", "store"))] == [False, True]
    assert lines[-1] == "valkey: not measured: glide_sync is not installed"


def test_the_limit_is_measured_without_lmcache_and_nothing_is_wanted_of_it() -> None:
    report = lmcache.Report(turns=1, rounds=2, keys=3, data_kib=64)
    lmcache.run(report, [], bare=True)
    assert all(row.gb_s["bare"] > 0 for row in report.operations)
    limit = lmcache.Compared("load", {"kvferry": 1.0, "bare": 2.0}, {"bare": 0.5}, {"bare": (0.4, 0.6)})
    assert lmcache.render(lmcache.Report(operations=[limit])).splitlines()[-1].endswith("0.40-0.60")


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("print('All 4 keys data verified OK.'); raise SystemExit(1)", "ended with 1"),
        ("print('nothing was compared')", "ended with 0"),
        ("print('data verified OK'); write(4, 3)", "Load: only 3 objects"),
    ],
)
def test_a_run_that_lmcache_did_not_verify_whole_is_no_measurement(
    script: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prelude = (
        "import json, sys\n"
        "def write(stored, loaded):\n"
        "    done = {'Store': stored, 'Load': loaded}\n"
        "    found = {o: dict(operation=o, total_success=n, duration_p50_ms=1.0) for o, n in done.items()}\n"
        "    open(sys.argv[sys.argv.index('--output') + 1], 'w').write(json.dumps({'metrics': found}))\n"
    )
    package = tmp_path / "lmcache" / "cli"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text(prelude + script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = lmcache.Report(turns=1, rounds=1, keys=4, data_kib=64)
    with pytest.raises(BrokenError, match=complaint):
        lmcache.run(report, [arm for arm in lmcache.ARMS if arm.name == "resp"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(("--turns", "0"), "between 1 and"), (("--arms", "redis"), "arms are kvferry, resp")],
)
def test_wrong_arguments_are_named(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(MisconfiguredError, match=complaint):
        lmcache.main(parse(*words))


def test_without_lmcache_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(MisconfiguredError, match="not installed"):
        lmcache.main(parse())
