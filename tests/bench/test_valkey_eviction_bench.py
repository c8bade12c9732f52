"""The benchmark of Valkey's eviction: what it tells a real server is what the server then goes by."""

import argparse
import json

import pytest

from kvferry.bench.valkey_eviction import command, costs
from kvferry.bench.valkey_eviction.arms import ARMS
from kvferry.bench.valkey_eviction.mixes import Mix, chats_and_scan
from kvferry.bench.valkey_eviction.replay import Fleet, Replay, Tally
from kvferry.bench.valkey_eviction.shelf import server_shelf
from kvferry.bench.valkey_eviction.steering import Expiring, Stamped, Use
from kvferry.errors import MisconfiguredError
from kvferry.traces.policies import Policy


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def mix() -> Mix:
    return chats_and_scan(conversations=12, length_s=900.0)


def test_a_small_run_reports_every_arm_and_the_exact_policies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mix: Mix
) -> None:
    monkeypatch.setattr(command, "chats_and_scan", lambda: mix)
    monkeypatch.setattr(costs, "KEYS", 500)
    small = (
        "--chunks",
        "2000",
        "--stripes",
        "2",
        "--samples",
        "64",
        "--only",
        "noeviction,lru,kvferry",
    )
    assert command.main(parse(*small, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["arm"]: row for row in report["rows"]}
    assert list(rows) == ["exact lru", "exact optimum", "noeviction", "lru", "kvferry"]
    assert rows["noeviction"]["rejected"] > 0
    assert rows["lru"]["rejected"] == rows["kvferry"]["rejected"] == 0
    assert all(0 < row["hit"] <= rows["exact optimum"]["hit"] for row in rows.values())
    assert all(abs(rows[arm]["held_chunks"] - 2000) < 200 for arm in ("lru", "kvferry"))
    assert {cost["command"] for cost in report["costs"]} == {"TOUCH", "PEXPIRE", "SET", "PSETEX"}
    text = command.render(command.Report(rows=[command.Row(**rows["lru"]), command.Row(**rows["exact lru"])]))
    assert all(len(line) <= 100 for line in text.splitlines())


def test_an_hour_of_idle_time_is_an_hour_to_the_server() -> None:
    with server_shelf(Stamped("allkeys-lru"), chunks=100, stripes=1, samples=5, end_s=7200.0) as shelf:
        shelf.mark([(7, Use(3600.0, 0, 0, stored=True)), (8, Use(7200.0, 0, 0, stored=True))])
        asked = [b"OBJECT IDLETIME %d:0\r\n" % chunk for chunk in (7, 8)]
        older, newer = (int(reply[1:]) for reply in shelf._pipeline.ask(asked))
    assert abs(older - newer - 3600) < 30  # its clock ticks once a second, later where it is busy


def test_looking_does_not_count_as_a_use() -> None:
    with server_shelf(Stamped("allkeys-lru"), chunks=100, stripes=2, samples=5, end_s=7200.0) as shelf:
        shelf.mark([(7, Use(0.0, 0, 0, stored=True))])
        assert shelf.held([7, 8]) == [True, False]
        assert shelf._server.ask("OBJECT", "IDLETIME", "7:0") >= 7000  # type: ignore[operator]


def test_a_chunk_behind_a_hole_is_an_orphan() -> None:
    with server_shelf(Expiring(), chunks=100, stripes=2, samples=64, end_s=100.0) as shelf:
        replay = Replay((), Fleet(1, 1), stripes=2, refreshes=True)
        replay._parent.update({0: -1, 1: 0, 2: 1, 3: 2})
        shelf.mark((chunk, Use(0.0, chunk, 0, stored=True)) for chunk in range(4))
        shelf._server.ask("DEL", "1:1")
        tally = Tally()
        replay._check(shelf, tally)
    assert (tally.held, tally.orphans) == (7, 5)


def test_the_exact_optimum_bounds_the_exact_lru(mix: Mix) -> None:
    for chunks in (50, 500):
        assert mix.exact(Policy.LRU, chunks) <= mix.exact(Policy.OPTIMUM, chunks)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--only", "lru,best"), "'best'"),
        (("--samples", "65"), "65"),
        (("--chunks", "many"), "many"),
        (("--no-mix",), "nothing to replay"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(MisconfiguredError, match=problem):
        command.main(parse(*words))


def test_every_arm_says_what_it_does() -> None:
    assert all(arm.line and arm.steering().policy for arm in ARMS.values())
