"""The router benchmark: what it says is what happened, and what went wrong is no figure."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.bench.router import choice, client, latency, report, routers
from kvferry.bench.router.bodies import Bodies
from kvferry.bench.router.choice import Comparison, Mocks, Outcome, best
from kvferry.bench.router.client import Sample, Stream
from kvferry.bench.router.latency import Cell, Load, Run
from kvferry.bench.router.memory import Growth, Talks
from kvferry.bench.router.replicas import Slowed
from kvferry.bench.router.report import Report
from kvferry.bench.router.routers import CACHE_AWARE, DIRECT, OURS, Arm, Route, Thresholds
from kvferry.bench.router.traffic import Mix, plan
from kvferry.bench.router.usage import cpu_s, resident_bytes
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.testing.proxy import Proxy
from kvferry.testing.worker import WorkerSettings
from kvferry.testing.worker_fleet import RemoteWorker, running_workers


async def _nothing() -> None: ...


client.run(_nothing())  # the first loop of uvloop opens a pipe for the whole process
LOAD = Load(streams=2, nbytes=4096, tokens=3, step_s=0.0)
MIX = Mix(conversations=4, rate=100.0, turns=2, prefix=2000, question=60, answer=60, tokens=2, think_s=0.02)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[RemoteWorker, ...]]:
    with running_workers(WorkerSettings(), WorkerSettings(name="b"), directory=tmp_path) as found:
        yield found


def direct(workers: tuple[RemoteWorker, ...]) -> Route:
    return Route(DIRECT, tuple(worker.url for worker in workers))


def test_a_delay_in_the_way_shows_as_added_time(workers: tuple[RemoteWorker, ...]) -> None:
    delay_s = 0.05
    with Proxy(("127.0.0.1", workers[0].settings.port)) as proxy:
        proxy.replies.latency_s = delay_s
        slow = Route(Arm("slow", "ours"), (f"http://127.0.0.1:{proxy.port}",))
        cell = Cell(LOAD)
        for route in (direct(workers), slow):
            cell.runs[route.arm.name] = [latency.once(route, LOAD, seconds=0.3, seed=1)]
    assert cell.median("slow", "ttft_p50_s") >= delay_s
    assert cell.added_s("slow", "ttft_p50_s") == pytest.approx(
        cell.median("slow", "ttft_p50_s") - cell.median("direct", "ttft_p50_s")
    )
    assert cell.added_s("direct", "ttft_p99_s") == 0


def test_every_request_and_token_is_counted_once(workers: tuple[RemoteWorker, ...]) -> None:
    run = latency.once(direct(workers), LOAD, seconds=0.3, seed=1)
    served = [worker.statistics() for worker in workers]
    requests = sum(one["requests"] for one in served)
    assert all(one["requests"] for one in served)
    assert 0 < run.requests <= requests
    assert run.tokens_s / run.requests_s == pytest.approx(LOAD.tokens)
    assert sum(one["output_tokens"] for one in served) == requests * LOAD.tokens


@pytest.mark.parametrize("fault", [{"status": 503}, {"die_after": 2}])
def test_a_failed_request_is_no_figure(workers: tuple[RemoteWorker, ...], fault: dict[str, int]) -> None:
    workers[1].behave(**fault)
    with pytest.raises(BrokenError, match="a request failed"):
        latency.once(direct(workers), LOAD, seconds=0.1, seed=1)


def test_the_end_of_a_head_is_not_taken_for_that_of_the_answer() -> None:
    async def asked() -> tuple[bool, int]:
        stream = Stream()
        sent: list[bytes] = []
        stream.connection_made(_Transport(sent))  # type: ignore[arg-type]
        asking = asyncio.create_task(stream.ask(b"head", b"body"))
        await asyncio.sleep(0)
        stream.data_received(b"HTTP/1.1 200 OK\r\nX-Request-Id: 10\r\n\r\n")
        for _ in range(10):
            await asyncio.sleep(0)
        early = asking.done()
        stream.data_received(b"c\r\ndata: {}\n\n\r\n")
        stream.data_received(b"0\r\n\r\n")
        assert await asking == ""
        return early, stream.events

    assert client.run(asked()) == (False, 1)


class _Transport:
    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def write(self, data: bytes) -> None:
        self._sent.append(data)


def test_bodies_differ_and_are_about_as_long_as_was_asked_for() -> None:
    bodies = Bodies(16 << 10, seed=1, max_tokens=5)
    found = [bodies.next() for _ in range(100)]
    assert len(set(found)) == 100
    assert all(0.75 * (16 << 10) < len(body) < 1.25 * (16 << 10) for body in found)
    first, second = (json.loads(body)["messages"] for body in found[:2])
    assert first[0] == second[0]
    assert first[-1] != second[-1]


def test_a_plan_is_the_same_for_all_arms_but_for_its_tag() -> None:
    one, again, tagged = plan(MIX, seed=3), plan(MIX, seed=3), plan(MIX, seed=3, tag="[0001] ")
    other = plan(MIX, seed=3, tag="[0002] ")
    assert one == again != plan(MIX, seed=4)
    assert [turn.at for turn in one] == sorted(turn.at for turn in tagged)
    assert [len(turn.body) for turn in tagged] == [len(turn.body) for turn in other]
    prompts = [json.loads(turn.body)["messages"][0]["content"] for turn in (tagged[0], other[0])]
    assert [prompt[:7] for prompt in prompts] == ["[0001] ", "[0002] "]
    assert prompts[0][7:] == prompts[1][7:]


def test_an_outcome_counts_what_the_workers_saw(tmp_path: Path) -> None:
    engine = WorkerSettings(prefill_token_s=1e-6, block_characters=64)
    with running_workers(engine, engine, directory=tmp_path) as workers:
        mocks = Mocks(workers, tmp_path, "", MIX)
        found = mocks.run(Arm("ours", "ours", "round_robin", options=("--feed", "none")), seed=1)
        served = [worker.statistics() for worker in workers]
    assert found.requests == MIX.conversations * MIX.turns == sum(found.workers)
    assert [one["requests"] for one in served] == list(found.workers)
    prompts, hits = (sum(one[what] for one in served) for what in ("prompt_tokens", "engine_tokens"))
    assert found.hit == pytest.approx(hits / prompts)
    assert found.mean_s > 0


def test_a_slow_worker_shows_in_the_times_of_who_uses_it(tmp_path: Path) -> None:
    prefill_s = 1e-4
    engine = WorkerSettings(prefill_token_s=prefill_s, cache_blocks=0)
    turns = plan(MIX, seed=1)
    with running_workers(engine, directory=tmp_path) as (worker,):
        worker.behave(slow=5.0)
        samples = client.run(client.open_loop(worker.url, [(turn.at, turn.body) for turn in turns]))
    found = choice.outcome(DIRECT, 1, turns, samples, [0, len(turns)])
    tokens = min(sample.prompt_tokens for sample in samples)
    assert found.mean_s >= 5.0 * prefill_s * tokens
    assert 0 < found.p50_s <= found.p99_s


def test_an_outcome_with_a_failure_is_none() -> None:
    turns = plan(MIX, seed=1)[:2]
    samples = [Sample(0.0, 0.1, 0.2, 2, 10, 0), Sample(0.0, 0.0, 0.0, 0, error="connection lost")]
    with pytest.raises(BrokenError, match="connection lost"):
        choice.outcome(DIRECT, 1, turns, samples, [1, 1])


def test_thresholds_are_judged_by_mean_and_tail_together() -> None:
    tried = [
        (Thresholds(0.1), 1.0, 9.0),
        (Thresholds(0.2), 1.2, 3.0),
        (Thresholds(0.3), 5.0, 2.9),
    ]
    assert best(tried) == Thresholds(0.2)


def test_processor_time_and_memory_are_those_of_the_whole_group() -> None:
    code = "import subprocess, sys; x = bytearray(64 << 20); subprocess.run([sys.executable, '-c', %r])"
    inner = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code % inner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"burnt\n"
        assert cpu_s(process.pid) >= 0.3
        assert resident_bytes(process.pid) >= 64 << 20
        process.stdin.write(b"\n")
    assert cpu_s(process.pid) == 0


def test_a_slowed_process_stands_still_and_goes_on_afterwards() -> None:
    code = "print('up', flush=True)\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            states = set()
            until = time.monotonic() + 30
            with Slowed(process.pid, share=0.5, period_s=0.02):
                while not {"T", "R"} <= states and time.monotonic() < until:
                    states.add(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
            assert {"T", "R"} <= states
            before = cpu_s(process.pid)
            while cpu_s(process.pid) < before + 0.1 and time.monotonic() < until:
                time.sleep(0.01)
            assert cpu_s(process.pid) >= before + 0.1
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _run(ttft_s: float, cpu_request_s: float = 0.001) -> Run:
    return Run(ttft_s, ttft_s, cpu_request_s, 100, 100.0, 100.0, 1000.0)


def _outcome(arm: Arm, mean_s: float, p99_s: float) -> Outcome:
    return Outcome(arm.name, 1, 100, mean_s, mean_s, p99_s, 0.5, (60, 40), mean_s)


def test_what_is_short_of_what_was_wanted_is_said_and_nothing_else() -> None:
    load = Load(64, 16 << 10, 40, 0.025)
    runs = {DIRECT.name: [_run(0.001, 0)], OURS.name: [_run(0.0015)], CACHE_AWARE.name: [_run(0.0016)]}
    good = Cell(load, runs)
    assert report.shortfalls(Report(latency=[good])) == []
    late = Cell(load, {**runs, OURS.name: [_run(0.0025, 0.002)]})
    said = report.shortfalls(Report(latency=[late]))
    assert len(said) == 4  # above a millisecond, p50, p99, CPU
    assert all("64 streams of 16 KiB" in line for line in said)
    shared = Comparison("shared tier", outcomes=[_outcome(OURS, 0.7, 0.7), _outcome(CACHE_AWARE, 1.0, 1.0)])
    assert report.shortfalls(Report(choices=[shared])) == [
        "shared tier: p99 TTFT 0.70 of cache_aware's, wanted 0.6"
    ]
    alone = Comparison("no shared tier", outcomes=shared.outcomes)
    assert report.shortfalls(Report(choices=[alone])) == []
    grown = Growth(OURS.name, (0, 10, 20, 30), (100, 100, 110, 120))
    assert len(report.shortfalls(Report(memory=[grown]))) == 1
    whole = Report(latency=[late], choices=[shared], memory=[grown], tokens=[good], saturated=[good])
    assert report.terminal(whole).count("short: ") == len(whole.document()["short"]) == 6
    assert json.loads(json.dumps(whole.document()))["choices"][0]["arms"]["kvferry"]["mean_s"] == 0.7


def test_talks_share_no_prefix() -> None:
    talks = Talks()
    first, second = (json.loads(talks.next())["messages"] for _ in range(2))
    assert first[0] != second[0]
    assert len(first) == 20


def test_a_missing_peer_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("KVFERRY_VLLM_ROUTER", raising=False)
    with pytest.raises(MisconfiguredError, match=r"locks/vllm-router\.txt"):
        routers.vllm_router(None)
