"""While everything is broken on purpose no byte is wrong and nothing is left; and planted bugs are found."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.bench.chaos import command, report
from kvferry.bench.chaos.audit import Audit, judge
from kvferry.bench.chaos.contents import Contents, Prompts, namespace_of
from kvferry.bench.chaos.driver import decks
from kvferry.bench.chaos.faults import KILLS, Fault, FaultKind
from kvferry.bench.chaos.fleet import Plan
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import JournalReader, JournalWriter, Kind, Operation
from kvferry.bench.chaos.run import Outcome, run
from kvferry.bench.chaos.soak import Series, trends
from kvferry.bench.chaos.tally import Late, Tally
from kvferry.errors import MisconfiguredError
from kvferry.identity.header import pack_header
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import checksum, stripe_plan
from kvferry.tiers.valkey.jobs import stripe_key

SOURCE = Path(__file__).parents[2] / "src"

# Exchanges where two chunks lie, together with their checksums: every check of the client passes.
CROSSED_NODE = """
import msgspec
from kvferry.node import server, wire

encode = server.encode
def crossed(message):
    if isinstance(message, wire.Answer):
        first, *others = [place for place in message.ready if place.part == 0][:2] or [None]
        if others:
            one = msgspec.structs.replace(first, offset=others[0].offset, checksums=others[0].checksums)
            ready = tuple(one if place is first else place for place in message.ready)
            message = msgspec.structs.replace(message, ready=ready)
    return encode(message)
server.encode = crossed

from kvferry.cli.main import run
run()
"""


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    """Of this process."""
    heart = Heartbeat()
    yield heart
    heart.close()


def told(outcome: Outcome) -> str:
    """What a failure should show."""
    return report.render(outcome)


def test_no_byte_is_wrong_and_nothing_is_left_after_faults_of_every_kind() -> None:
    outcome = run(Plan(kills=3, seed=20, pace_s=0.8))
    assert outcome.good, told(outcome)
    assert {fault.kind for fault in outcome.faults} == set(FaultKind), told(outcome)
    assert outcome.tally.operations["load"]["complete"] > 0, told(outcome)
    assert outcome.tally.chunks["valkey"] > 0, told(outcome)
    assert outcome.audit.right > 0, told(outcome)
    assert json.dumps(report.document(outcome))


def test_a_flipped_byte_is_found() -> None:
    outcome = run(Plan(kills=0, seed=21, warm_requests=20, settle_s=5.0, plant="flip"))
    assert not outcome.good
    assert any("loaded from" in note for note in outcome.tally.notes), told(outcome)


def test_a_reservation_that_is_never_given_back_is_found() -> None:
    outcome = run(Plan(kills=0, seed=21, warm_requests=5, settle_s=2.0, plant="leak-reservation"))
    assert not outcome.good
    assert any("reserved slots" in leak for leak in outcome.leaks), told(outcome)


def test_a_node_that_hands_out_other_bytes_under_right_checksums_is_found(tmp_path: Path) -> None:
    shim = tmp_path / "node.py"
    shim.write_text(CROSSED_NODE)
    outcome = run(
        Plan(
            kills=0, seed=22, warm_requests=20, settle_s=1.0, node_command=(sys.executable, str(shim), "node")
        )
    )
    assert outcome.tally.wrong > 0, told(outcome)


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    """Everything it starts has its directory, which lies under TMPDIR, in its arguments."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    command_line = [sys.executable, "-m", "kvferry", "bench", "chaos", "--seed", "23"]
    with subprocess.Popen(command_line, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "kills" in process.stderr.readline()  # the first line of progress: all is started
        assert running_under(tmp_path)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == command.EXIT_INTERRUPTED
    assert "has been stopped" in said
    give_up = time.monotonic() + 20
    while running_under(tmp_path) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not running_under(tmp_path)
    assert not list(tmp_path.iterdir())


def running_under(directory: Path) -> list[str]:
    """Command lines that name it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in line:
                found.append(line)
    return found


def test_a_deck_has_every_other_fault_and_the_kills_that_were_asked_for() -> None:
    found = [kind for deck in decks(19, random.Random(1)) for kind in deck]
    assert sum(kind in KILLS for kind in found) == 19
    assert set(found) == set(FaultKind)


def test_a_line_that_a_kill_cut_short_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.read() == []
    first = JournalWriter(path)
    first.write(Operation(kind=Kind.LOAD, outcome="complete"))
    os.write(first._fd, b'{"kind":"lo')
    first.close()
    second = JournalWriter(path)
    second.write(Operation(kind=Kind.LOOKUP, outcome="hit"))
    second.close()
    assert [operation.outcome for operation in reader.read()] == ["complete", "hit"]
    assert reader.torn == 1


def test_contents_differ_in_every_part_and_stripe_and_are_the_same_in_every_process() -> None:
    digests = Prompts(3, namespace_of(3).namespace, conversations=4, lasts_s=10.0)
    prompt = digests.pick(random.Random(0), 0.0)
    one, other = Contents(3), Contents(3)
    found = {one.of(digest, part) for digest in prompt.digests for part in (0, 1)}
    assert len(found) == 2 * len(prompt.digests)
    assert found == {other.of(digest, part) for digest in prompt.digests for part in (0, 1)}


def test_reuse_is_credited_to_the_fault_whose_part_it_shows_to_be_back(heartbeat: Heartbeat) -> None:
    faults = [
        Fault(FaultKind.NODE_KILL, "node-0", 1.0, node=0, lifted=2.0),
        Fault(FaultKind.ENGINE_KILL, "engine-1", 1.0, engine=1, lifted=2.0),
        Fault(FaultKind.FLUSH, "valkey-2", 1.0, lifted=2.0),
        Fault(FaultKind.NODE_STOP, "node-0", 5.0, node=0),
    ]
    tally = Tally(heartbeat)
    early = Operation(kind=Kind.LOAD, outcome="complete", began=1.5, took_s=1.0, tier="memory")
    tally.add(early, engine=0, node=0, faults=faults)
    assert [fault.reuse_s for fault in faults] == [None] * 4
    later = Operation(kind=Kind.LOAD, outcome="complete", began=3.0, took_s=1.0, tier="memory")
    tally.add(later, engine=0, node=0, faults=faults)
    assert [fault.reuse_s for fault in faults] == [2.0, None, None, None]
    valkey = Operation(kind=Kind.LOAD, outcome="complete", began=3.0, took_s=2.0, tier="valkey")
    tally.add(valkey, engine=1, node=0, faults=faults)
    assert [fault.reuse_s for fault in faults] == [2.0, 3.0, 3.0, None]


def test_an_answer_is_late_by_what_is_past_its_bound_and_both_figures_are_told(heartbeat: Heartbeat) -> None:
    tally = Tally(heartbeat)
    late = Operation(kind=Kind.RESERVE, outcome="full", began=0.0, took_s=3.0, bound_s=1.0, lost_s=1.9)
    tally.add(late, engine=0, node=0, faults=[])
    found = tally.lateness["reserve"]
    assert (found.over, found.over_beyond) == (1, 0)
    assert found.worst_late_s == 2.0
    assert found.worst_beyond_s == pytest.approx(0.1)
    assert Late("load", "", 1.0, 1.0, 0.0, 0.75, stopped=False, during=()).beyond_s == 0.25


def test_an_answer_to_an_engine_that_was_stopped_meanwhile_is_counted_apart(heartbeat: Heartbeat) -> None:
    tally = Tally(heartbeat)
    stop = Fault(FaultKind.ENGINE_STOP, "engine-1", 1.0, engine=1, lifted=4.0, ended=4.0)
    late = Operation(kind=Kind.LOAD, outcome="complete", began=0.5, took_s=3.0, bound_s=1.0)
    tally.add(late, engine=1, node=0, faults=[stop])
    tally.add(late, engine=2, node=0, faults=[stop])
    found = tally.lateness["load"]
    assert (found.answers, found.over, found.over_stopped) == (2, 1, 1)


def test_time_in_which_a_process_did_not_run_is_noticed(tmp_path: Path) -> None:
    """A process that is stopped and goes on says by itself that it lost the time between."""
    script = """
import sys, time
from kvferry.bench.chaos.heartbeat import Heartbeat
heart = Heartbeat()
began = time.monotonic()
print("up", flush=True)
sys.stdin.readline()
print(heart.lost_s(began, time.monotonic()), flush=True)
heart.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        assert float(process.stdout.readline()) > 0.4


def test_a_figure_that_grows_is_not_flat_and_one_that_only_warms_up_is() -> None:
    series = Series()
    for at in range(100):
        series.add(10.0 * at, 5, {"descriptors": 20 + at / 4, "threads": min(at, 9), "anonymous_kb": 30_000})
    found = {trend.figure: trend for trend in trends("node-0", series)}
    assert [found[name].flat for name in ("descriptors", "threads", "anonymous_kb")] == [False, True, True]
    assert found["descriptors"].slope_h == pytest.approx(90.0)
    series.pids.add(6)
    assert trends("node-0", series) == []


def test_a_soak_does_not_take_the_options_of_a_run() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(MisconfiguredError, match="--kills"):
        command.main(parser.parse_args(["--soak", "60", "--kills", "3"]))
    with pytest.raises(MisconfiguredError, match="--seed"):
        command.main(parser.parse_args(["--seed", "many"]))


def test_what_a_reader_would_accept_and_is_not_right_counts_as_wrong_in_the_audit() -> None:
    """Damage that a checksum finds is no wrong byte; other bytes under a matching checksum are."""
    contents = Contents(5)
    key = PartKey(bytes(16), bytes(32), 1)
    right = contents.of(key.chunk, key.part)
    (stripe,) = stripe_plan(len(right))
    name = stripe_key(key, 0)

    def value(payload: bytes) -> bytes:
        head = pack_header(
            key, part_bytes=len(right), stripe=stripe, stripe_count=1, checksum=checksum(payload)
        )
        return head + payload

    found = Audit()
    judge(found, name, value(right), contents)
    judge(found, name, value(right)[:-1], contents)
    judge(found, name, bytes([1]) + value(right)[1:], contents)
    assert (found.right, found.damaged, found.wrong) == (1, 2, [])
    judge(found, name, value(bytes(len(right))), contents)
    judge(found, b"other:key", b"", contents)
    assert len(found.wrong) == 2


def test_a_recovery_during_which_another_engine_was_down_did_not_stand_alone() -> None:
    kill = Fault(FaultKind.NODE_KILL, "node-0", 1.0, node=0, lifted=2.0, ended=3.0, reuse_s=5.0)
    flush = Fault(FaultKind.FLUSH, "valkey-1", 3.0, lifted=3.0, ended=3.3, reuse_s=0.1)
    stop = Fault(FaultKind.ENGINE_STOP, "engine-2", 4.0, engine=2, lifted=6.0, ended=6.3, reuse_s=0.2)
    assert report.stood_alone(kill, [kill, flush])
    assert not report.stood_alone(kill, [kill, flush, stop])
    assert report.stood_alone(stop, [kill, flush, stop])
