"""Policies to compare with."""

import pytest

from kvferry.errors import BrokenError
from kvferry.router.contract import Asked, Ended, Guide, Key, Usage
from kvferry.router.policies import LeastLoad, RoundRobin

WORKERS = ("a", "b", "c")


def asked(length: int = 400, name: bytes = b"k") -> Asked:
    return Asked(request_id="r", model="m", keys=(Key(name, length),))


@pytest.fixture(params=[RoundRobin, LeastLoad])
def guide(request: pytest.FixtureRequest) -> Guide:
    made: Guide = request.param()
    return made


def worker_counts(guide: Guide) -> dict[str, dict[str, int]]:
    workers = guide.statistics()["workers"]
    assert isinstance(workers, dict)
    return workers


def test_equal_requests_are_spread_over_all_workers(guide: Guide) -> None:
    chosen = [guide.begin(asked(), among=WORKERS, now=0.0).worker for _ in range(9)]
    assert {worker: chosen.count(worker) for worker in WORKERS} == {"a": 3, "b": 3, "c": 3}


def test_only_the_workers_given_are_chosen(guide: Guide) -> None:
    assert {guide.begin(asked(), among=["b"], now=0.0).worker for _ in range(5)} == {"b"}


@pytest.mark.parametrize("how", Ended)
@pytest.mark.parametrize("began", [False, True])
def test_however_a_request_ends_its_load_is_returned_once(guide: Guide, how: Ended, *, began: bool) -> None:
    flight = guide.begin(asked(), among=["a"], now=0.0)
    assert worker_counts(guide)["a"]["waiting_tokens"] == 100
    if began:
        flight.first_byte(1.0)
        flight.first_byte(1.1)
        flight.token(1.2)
        assert worker_counts(guide)["a"]["waiting_tokens"] == 0
        assert worker_counts(guide)["a"]["decoding"] == 1
    flight.end(how, 2.0, Usage(100, 40, 3))
    counts = worker_counts(guide)["a"]
    assert (counts["requests"], counts["waiting_tokens"], counts["decoding"]) == (0, 0, 0)
    with pytest.raises(BrokenError):
        flight.end(how, 2.0)
    assert worker_counts(guide)["a"] == counts


def test_a_removed_worker_is_forgotten_with_its_last_request(guide: Guide) -> None:
    guide.worker_added("a")
    flight = guide.begin(asked(), among=["a"], now=0.0)
    guide.worker_lost("a")
    assert worker_counts(guide)["a"]["requests"] == 1
    flight.end(Ended.FAILED, 1.0)
    assert "a" not in worker_counts(guide)


def test_least_load_avoids_the_worker_with_a_long_prefill() -> None:
    guide = LeastLoad()
    long = guide.begin(asked(400_000), among=["a", "b"], now=0.0)
    others = {guide.begin(asked(), among=["a", "b"], now=0.0).worker for _ in range(20)}
    assert others == {"a", "b"} - {long.worker}


def test_nothing_to_choose_from_is_a_defect(guide: Guide) -> None:
    with pytest.raises(BrokenError):
        guide.begin(asked(), among=[], now=0.0)
