"""The breaker's state machine, on a clock of numbers."""

from kvferry.breaker import FAILURE, SILENCE, Breaker


def test_one_lost_connection_does_not_open_it_but_three_in_a_row_do() -> None:
    breaker = Breaker()
    assert [breaker.failed(FAILURE, 0.0) for _ in range(3)] == [False, False, True]
    assert breaker.is_open


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(FAILURE, 0.0)
        breaker.succeeded()
    assert not breaker.is_open


def test_silence_opens_it_at_once() -> None:
    breaker = Breaker()
    assert breaker.failed(SILENCE, 0.0)
    assert not breaker.failed(SILENCE, 0.0)  # already open
    assert breaker.opened == 1


def test_probes_come_later_and_later_up_to_a_bound() -> None:
    breaker = Breaker(min_wait_s=0.1, max_wait_s=0.4)
    breaker.failed(SILENCE, 10.0)
    waits = []
    now = 10.0
    for _ in range(5):
        due = breaker.next_probe_at()
        assert due is not None
        assert not breaker.probe_due(due - 0.001)
        assert breaker.probe_due(due)
        waits.append(round(due - now, 3))
        now = due
        breaker.probe_failed(now)
    assert waits == [0.1, 0.2, 0.4, 0.4, 0.4]


def test_a_good_probe_closes_it() -> None:
    breaker = Breaker()
    breaker.failed(SILENCE, 0.0)
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.next_probe_at() is None
