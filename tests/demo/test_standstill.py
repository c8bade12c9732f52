"""A start that stands still is noticed, written down, ended, and made once more."""

import sys
from pathlib import Path

import pytest

from kvferry.demo import fleet as fleet_module
from kvferry.demo import standstill
from kvferry.demo.fleet import Fleet, FleetSettings, ReplicaPlan
from kvferry.demo.processes import Child, Children, wait_until
from kvferry.demo.standstill import Watch, note_and_end
from kvferry.errors import RetryError

WAIT_S = 60.0
PYTHON = [sys.executable, "-S", "-c"]
STILL = [
    *PYTHON,
    "def stands_here():\n    import time; print('up', flush=True); time.sleep(600)\nstands_here()",
]
BUSY = [*PYTHON, "while True: pass"]
SERVES = [
    *PYTHON,
    "import http.server, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()",
]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Fleet(Fleet):
    """Its engine's first ``stuck`` starts stand still."""

    stuck = 1
    starts = 0

    def engine_command(self, plan: ReplicaPlan, port: int) -> list[str]:
        self.starts += 1
        return STILL if self.starts <= self.stuck else [*SERVES, str(port)]


class _Knows:
    """A watch that tells the two commands apart."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def stands_still(self) -> bool:
        return self.child.command == tuple(STILL)


def _fleet(said: list[str]) -> _Fleet:
    plans = (ReplicaPlan("A", 0, connected=False),)
    return _Fleet(FleetSettings(model=Path("none"), replicas=plans, ready_s=WAIT_S), say=said.append)


def test_a_silent_process_without_work_stands_still_when_the_time_is_over(tmp_path: Path) -> None:
    clock = _Clock()
    with Children(tmp_path) as children:
        child = children.start("still", STILL)
        wait_until(lambda: bool(child.tail()), what="its line", timeout_s=WAIT_S)
        watch = Watch(child, clock=clock)
        clock.now = standstill.STILL_S - 1
        assert not watch.stands_still()
        clock.now += standstill.LOOK_S + 1
        assert watch.stands_still()


def test_a_process_that_says_something_does_not_stand_still(tmp_path: Path) -> None:
    clock = _Clock()
    with Children(tmp_path) as children:
        child = children.start("still", STILL)
        wait_until(lambda: bool(child.tail()), what="its line", timeout_s=WAIT_S)
        watch = Watch(child, clock=clock)
        with child.log.open("a") as log:
            log.write("a line\n")
        clock.now = standstill.STILL_S + 1
        assert not watch.stands_still()


def test_a_process_that_works_does_not_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "STILL_CPU_S", 0.05)
    clock = _Clock()
    with Children(tmp_path) as children:
        child = children.start("busy", BUSY)
        watch = Watch(child, clock=clock)

        def looked() -> bool:
            clock.now += standstill.STILL_S  # a look too early says that it stands, until it has worked
            return not watch.stands_still()

        wait_until(looked, what="its work being seen", timeout_s=WAIT_S)


def test_the_log_says_where_it_stood(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("still", STILL, env={"PYTHONFAULTHANDLER": "1"})
        wait_until(lambda: bool(child.tail()), what="its line", timeout_s=WAIT_S)
        note_and_end(child)
        text = child.log.read_text()
    assert f"process {child.pid}, " in text
    assert f"  {child.pid} python" in text
    assert "stands_here" in text.partition("where its threads are")[2]
    assert child.exited()


def test_a_replica_whose_start_stands_still_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "Watch", _Knows)
    said: list[str] = []
    with _fleet(said) as fleet:
        fleet.start_replicas(["A"])
        assert fleet.replicas["A"].healthy()
        assert fleet.starts == 2
    assert any("stood still in its start" in line for line in said)


def test_a_second_standstill_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "Watch", _Knows)
    said: list[str] = []
    with _fleet(said) as fleet:
        fleet.stuck = 2
        with pytest.raises(RetryError, match="replica A stood still in its start twice"):
            fleet.start_replicas(["A"])
        log = (fleet.directory / "replica-A.log").read_text()
        fleet.keep_directory = False
    assert fleet.starts == 2
    assert log.count("it stands still") == 2
