"""A proxy or a process driver that does not do what it says is caught by the test of that name."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.testing import test_processes, test_proxy
from tests.testing.suites import failure_of
from tests.testing.test_proxy import Echo

from kvferry.testing import census, faults, proxy, relay
from kvferry.testing.census import leaves_nothing
from kvferry.testing.faults import Armed, Ending, Insert, Trigger, Way
from kvferry.testing.processes import Program
from kvferry.testing.proxy import Proxy
from kvferry.testing.relay import Link, Side

WAIT_S = 1.0


# -- proxies ---------------------------------------------------------------------------------------


class NeverFires(Trigger):
    def feed(self, data: bytes) -> list[bytes | Ending]:
        return [data]


class FiresLate(Trigger):
    """One byte too many passes."""

    def __init__(self, armed: Armed, *, seed: int) -> None:
        super().__init__(armed, seed=seed)
        self._left += 1


class FiresAlways(Trigger):
    """Every connection after the first is cut at once."""

    @property
    def over(self) -> bool:
        return False

    @over.setter
    def over(self, value: bool) -> None:
        pass


class ClosesInstead(Trigger):
    """A reset looks like an orderly end."""

    def feed(self, data: bytes) -> list[bytes | Ending]:
        found = super().feed(data)
        return [Ending.CLOSE if isinstance(piece, Ending) else piece for piece in found]


class CorruptsNothing(Trigger):
    def feed(self, data: bytes) -> list[bytes | Ending]:
        super().feed(data)
        return [data]


class SwallowsTheRest(Trigger):
    """What follows an insertion is lost."""

    def feed(self, data: bytes) -> list[bytes | Ending]:
        found = super().feed(data)
        return found[:-1] if isinstance(self._armed.fault, Insert) and len(found) > 1 else found


class Unseeded(Trigger):
    def __init__(self, armed: Armed, *, seed: int) -> None:
        super().__init__(armed, seed=int.from_bytes(os.urandom(8)))


class ReplacesOnce(Way):
    """A fault of every connection happens to one."""

    def always(self, fault: Any) -> Armed:
        return self.once(fault)


class NoLatency(Way):
    latency_s = property(lambda self: 0.0, lambda self, value: None)  # type: ignore[assignment]


class NoRate(Way):
    def reserve(self, nbytes: int, *, now: float) -> float:
        return now


class NoSlowClose(Way):
    close_delay_s = property(lambda self: 0.0, lambda self, value: None)  # type: ignore[assignment]


class NoBlackHole(Way):
    black_hole = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


class TellsBoth(Link):
    """Nothing is ever half open."""

    def vanish(self, side: Side) -> None:
        self.end(Ending.CLOSE)


class ResetsOneSide(Link):
    """A reset looks like an orderly end to the server."""

    def end(self, how: Ending) -> None:
        relay.shut(self.client, reset=how is Ending.RESET)
        super().end(Ending.CLOSE)


class StaysConnected(Proxy):
    """Lets connections live that it should refuse."""

    refusing = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


class HealsNothing(Proxy):
    def heal(self) -> None:
        pass


class KeepsItsSockets(Proxy):
    """Leaves its thread, its port and its connections behind."""

    def close(self) -> None:
        pass


STALL = "test_a_stall_at_a_byte_lasts_until_it_is_healed_or_released"
PROXIES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("Trigger", NeverFires, "test_a_cut_of_replies_lets_exactly_so_many_bytes_pass", {"after": 999}),
    ("Trigger", FiresLate, "test_a_cut_of_replies_lets_exactly_so_many_bytes_pass", {"after": 999}),
    ("Trigger", ClosesInstead, "test_a_cut_of_replies_lets_exactly_so_many_bytes_pass", {"after": 1}),
    (
        "Trigger",
        FiresLate,
        "test_a_cut_of_requests_lets_exactly_so_many_bytes_reach_the_server",
        {"after": 1},
    ),
    ("Trigger", FiresAlways, "test_a_cut_happens_once_and_counts_over_connections", {}),
    ("Way", ReplacesOnce, "test_a_fault_of_every_connection_counts_from_its_first_byte", {}),
    ("Trigger", CorruptsNothing, "test_corruption_changes_exactly_those_bytes", {"after": 5, "nbytes": 3}),
    ("Trigger", FiresLate, "test_corruption_changes_exactly_those_bytes", {"after": 5, "nbytes": 3}),
    ("Trigger", SwallowsTheRest, "test_inserted_bytes_come_between_and_none_is_lost", {}),
    ("Trigger", Unseeded, "test_random_bytes_are_a_function_of_the_seed", {}),
    ("Way", NoBlackHole, "test_a_black_hole_holds_bytes_and_gives_them_when_it_ends", {}),
    ("Way", NoBlackHole, "test_one_way_can_be_a_black_hole_alone", {}),
    ("Proxy", HealsNothing, STALL, {"ends": HealsNothing.heal}),
    ("Trigger", ClosesInstead, STALL, {"ends": Proxy.heal}),
    ("Link", TellsBoth, "test_a_server_that_vanishes_leaves_the_client_half_open", {}),
    ("Link", TellsBoth, "test_a_client_that_vanishes_leaves_the_server_half_open", {}),
    ("Link", TellsBoth, "test_vanishing_at_a_byte_lets_those_before_pass", {}),
    ("Way", NoLatency, "test_latency_delays_bytes_and_does_not_limit_their_rate", {}),
    ("Way", NoRate, "test_a_rate_holds_over_all_connections_together", {}),
    ("Way", NoSlowClose, "test_a_slow_close_delays_the_end_and_not_the_bytes", {}),
    ("Link", ResetsOneSide, "test_reset_reaches_both_sides_and_later_connections_work", {}),
    ("Proxy", StaysConnected, "test_while_refusing_no_connection_lives", {}),
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "defect", "test", "arguments"),
    PROXIES,
    ids=[f"{d.__name__}-{test[5:25]}" for _, d, test, _ in PROXIES],
)
def test_a_proxy_that_does_not_do_it_is_caught(
    name: str,
    defect: Any,
    test: str,
    arguments: dict[str, Any],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (faults, relay, proxy, test_proxy):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, defect)
    monkeypatch.setattr(test_proxy, "WAIT_S", WAIT_S)
    echo = Echo()
    stack.callback(echo.close)
    made = test_proxy.Proxy(("127.0.0.1", echo.port))
    stack.callback(made.close)
    client = socket.create_connection(("127.0.0.1", made.port), WAIT_S)
    stack.callback(client.close)
    given = {"how": Ending.RESET, "seen": "ConnectionResetError", **arguments}
    assert failure_of(getattr(test_proxy, test), proxy=made, client=client, echo=echo, **given)


def test_a_proxy_that_leaves_something_behind_is_caught(stack: ExitStack) -> None:
    with pytest.raises(AssertionError, match="thread kvferry-proxy"), leaves_nothing(settle_s=0.1):
        kept = KeepsItsSockets(("127.0.0.1", 1))
    stack.callback(Proxy.close, kept)


# -- processes -------------------------------------------------------------------------------------


class ReadyAtOnce(Program):
    """Returns before it is ready."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "ready": lambda: True})


class DoesNotStop(Program):
    def pause(self) -> None:
        pass


class DoesNotContinue(Program):
    def resume(self) -> None:
        pass

    def wait_for(self, done: Any, *, what: str, timeout_s: float = WAIT_S) -> None:
        super().wait_for(done, what=what, timeout_s=timeout_s)


class KillsItAlone(Program):
    """What it started lives on."""

    def kill(self) -> int:
        child = self._started()
        child.send_signal(signal.SIGKILL)
        self._child = None
        self.left = child
        return child._popen.wait()


class LeavesItRunning(Program):
    """Leaving the context ends nothing."""

    def __exit__(self, *_: object) -> None:
        pass


class LeavesWhatFailed(Program):
    """A program that did not get ready goes on."""

    def close(self) -> None:
        pass


class SaysNothing(Program):
    """An error without the log."""

    def tail(self, lines: int = 12) -> str:
        return ""

    def wait_for(self, done: Any, *, what: str, timeout_s: float = WAIT_S) -> None:
        try:
            super().wait_for(done, what=what, timeout_s=timeout_s)
        except Exception as error:
            raise type(error)(f"{self.name} failed") from None


class KillsInstead(Program):
    """Gives no time to end."""

    def terminate(self, *, grace_s: float = 0.0) -> int:
        return self.kill()


class StartsTwice(Program):
    """Forgets the one that runs."""

    @property
    def running(self) -> bool:
        return False


DRIVERS: list[tuple[type[Program], str]] = [
    (ReadyAtOnce, "test_start_returns_when_it_is_ready_and_leaving_ends_it"),
    (LeavesItRunning, "test_start_returns_when_it_is_ready_and_leaving_ends_it"),
    (SaysNothing, "test_a_program_that_ends_at_start_says_so_with_the_end_of_its_log"),
    (LeavesWhatFailed, "test_a_program_that_is_never_ready_is_ended_and_its_log_shown"),
    (DoesNotStop, "test_a_paused_program_stands_still_until_it_is_resumed"),
    (DoesNotContinue, "test_a_paused_program_stands_still_until_it_is_resumed"),
    (KillsItAlone, "test_kill_takes_all_that_it_started_with_it"),
    (KillsInstead, "test_terminate_gives_it_time_and_returns_its_exit_code"),
    (StartsTwice, "test_a_running_program_is_not_started_twice"),
]


@pytest.mark.parametrize(("defect", "test"), DRIVERS, ids=[defect.__name__ for defect, _ in DRIVERS])
def test_a_driver_that_does_not_do_it_is_caught(
    defect: type[Program], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    made: list[Program] = []

    def make(*arguments: Any, **options: Any) -> Program:
        made.append(defect(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(test_processes, "Program", make)
    monkeypatch.setattr(test_processes, "WAIT_S", WAIT_S)
    monkeypatch.setattr(census, "SETTLE_S", WAIT_S)

    def clean_up() -> None:
        for program in made:
            Program.close(program)
            left = getattr(program, "left", None)
            if left is not None:
                os.killpg(left.pid, signal.SIGKILL)

    stack.callback(clean_up)
    assert failure_of(getattr(test_processes, test), tmp_path=tmp_path)
