"""Policies to compare with."""

import pytest

from kvferry.errors import BrokenError
from kvferry.router.cache_aware import CacheAware, Thresholds
from kvferry.router.contract import Asked, Ended, Guide, Key, Usage
from kvferry.router.load import CountedFlight, Loads
from kvferry.router.policies import LeastLoad, RoundRobin, SessionAffinity

WORKERS = ("a", "b", "c")


def asked(length: int = 400, name: bytes = b"k") -> Asked:
    return Asked(request_id="r", model="m", keys=(Key(name, length),))


@pytest.fixture(params=[RoundRobin, LeastLoad, SessionAffinity, CacheAware])
def guide(request: pytest.FixtureRequest) -> Guide:
    made: Guide = request.param()
    return made


def worker_counts(guide: Guide) -> dict[str, dict[str, int]]:
    workers = guide.statistics()["workers"]
    assert isinstance(workers, dict)
    return workers


@pytest.mark.parametrize("policy", [RoundRobin, LeastLoad])
def test_equal_requests_are_spread_over_all_workers(policy: type[Guide]) -> None:
    guide = policy()
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


def prompt(*names: bytes) -> Asked:
    keys = tuple(Key(name, 100 * (place + 1)) for place, name in enumerate(names))
    return Asked(request_id="r", model="m", keys=keys)


def test_a_session_stays_while_its_worker_is_there() -> None:
    guide = SessionAffinity()

    def where(session: str, among: tuple[str, ...] = WORKERS) -> str:
        return guide.begin(Asked("r", "m", (), session=session), among=among, now=0.0).worker

    homes = {f"s{number}": where(f"s{number}") for number in range(60)}
    assert set(homes.values()) == set(WORKERS)
    assert all(where(session) == home for session, home in homes.items())
    without_a = {session: where(session, ("b", "c")) for session in homes}
    assert all(without_a[session] == home for session, home in homes.items() if home != "a")


def test_cache_aware_follows_a_shared_prefix() -> None:
    guide = CacheAware()
    first = guide.begin(prompt(b"1", b"2", b"3"), among=WORKERS, now=0.0).worker
    assert guide.begin(prompt(b"1", b"2", b"4"), among=WORKERS, now=0.0).worker == first
    elsewhere = {guide.begin(prompt(b"x%d" % n), among=WORKERS, now=0.0).worker for n in range(2)}
    assert elsewhere == set(WORKERS) - {first}


def test_cache_aware_takes_little_in_common_for_nothing() -> None:
    guide = CacheAware()
    first = guide.begin(prompt(b"1", b"2", b"3", b"4"), among=WORKERS, now=0.0).worker
    assert guide.begin(prompt(b"1", b"6", b"7", b"8"), among=WORKERS, now=0.0).worker != first


def test_cache_aware_leaves_a_worker_with_far_more_requests() -> None:
    guide = CacheAware(Thresholds(requests_apart=3, requests_ratio=1.5))
    chosen = [guide.begin(prompt(b"1"), among=("a", "b"), now=0.0).worker for _ in range(5)]
    assert len(set(chosen[:4])) == 1
    assert chosen[4] != chosen[0]


def test_cache_aware_forgets_a_worker_that_is_lost() -> None:
    guide = CacheAware()
    first = guide.begin(prompt(b"1"), among=WORKERS, now=0.0).worker
    guide.worker_lost(first)
    others = tuple(worker for worker in WORKERS if worker != first)
    assert guide.begin(prompt(b"1"), among=others, now=0.0).worker in others
    assert guide.begin(prompt(b"1"), among=WORKERS, now=0.0).worker in others


def test_the_record_of_cache_aware_is_bounded() -> None:
    guide = CacheAware(limit=10)
    for number in range(100):
        guide.begin(prompt(b"%d" % number), among=WORKERS, now=0.0).end(Ended.DONE, 1.0)
    assert len(guide._names) == 10
    assert sum(guide._recorded.values()) == 10 * 100


def test_expected_hits_and_prompts_are_counted_of_the_same_requests() -> None:
    loads = Loads()
    for usage in (None, Usage(100, 80, 5)):
        flight = CountedFlight("a", loads, prefill_tokens=10, hit_tokens=90)
        assert loads.of("a").hit_tokens_expected == 0
        flight.end(Ended.DONE, 1.0, usage)
    load = loads.of("a")
    assert (load.prompt_tokens, load.hit_tokens_expected, load.hit_tokens_seen) == (100, 90, 80)
