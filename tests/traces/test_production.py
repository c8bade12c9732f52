"""The production policy in the analysis is that of the pool."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pool.model import MIB, SPACE, catalogue, run
from tests.traces.brute import Path, paths
from tests.traces.test_policies import log_of, traces

from kvferry.identity.names import PartKey
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Declined, DeclineReason
from kvferry.traces import findings
from kvferry.traces.policies import Policy
from kvferry.traces.production import ProductionCache


class RealPool:
    """A pool of parts of one size, used as a node uses it, one request after the other."""

    def __init__(self, capacity: int) -> None:
        self._made: Catalogue = catalogue(capacity * MIB)
        self._names: dict[Path, bytes] = {}

    def request(self, keys: Sequence[int]) -> int:
        chunks = [self._names.setdefault(path, len(self._names).to_bytes(32, "big")) for path in paths(keys)]
        found = run(self._made, SPACE, chunks)
        self._made.touch(SPACE, chunks[:found])
        mark = self._made.refresh(SPACE, chunks)
        for chunk in chunks[found:]:
            key = PartKey(SPACE, chunk, 0)
            answer = self._made.reserve(key, MIB, 1, spare_from=mark)
            if isinstance(answer, Declined):
                assert answer.reason is DeclineReason.FULL
                break
            self._made.commit(key, 1, ())
        self._made.refresh(SPACE, chunks)
        return found


def compare(prompts: Sequence[Sequence[int]], capacity: int) -> None:
    pool, cache = RealPool(capacity), ProductionCache(capacity)
    log = log_of(prompts)
    for number, keys in enumerate(prompts):
        assert cache.request(log, number) == pool.request(keys), number


@given(prompts=traces(), capacity=st.sampled_from([8, 16, 24, 32]))
@settings(max_examples=60, deadline=None)
def test_hits_are_those_of_the_pool(prompts: list[list[int]], capacity: int) -> None:
    compare(prompts, capacity)


@given(data=st.data(), capacity=st.sampled_from([8, 16, 64, 128]))
@settings(max_examples=10, deadline=None)
def test_hits_are_those_of_the_pool_once_it_has_learned(data: st.DataObject, capacity: int) -> None:
    """Longer traces: conversations that go on, prompts that come once, and some that all begin with."""
    random = data.draw(st.randoms(use_true_random=False))
    share = data.draw(st.floats(0, 1))
    talks: list[list[int]] = []
    prompts = []
    for fresh in range(300):
        if talks and random.random() < share:
            keys = talks.pop(random.randrange(max(0, len(talks) - 12), len(talks)))
        else:
            keys = [random.randrange(3)]
        keys = [*keys, *range(1000 * fresh, 1000 * fresh + random.randrange(1, 8))][: 2 * capacity]
        talks.append(keys)
        prompts.append(keys)
    compare(prompts, capacity)


@pytest.mark.parametrize(("requests", "shown"), [(1, 9), (200, 5), (400, 2), (10_000, 1)])
def test_the_pool_is_followed_at_as_many_capacities_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, requests: int, shown: int
) -> None:
    monkeypatch.setattr(findings, "FOLLOWED", 1000)
    log = log_of([[number % 7, number] for number in range(requests)])
    rows = findings.by_capacity(log, capacities=range(1, 10), policies=list(Policy))
    followed = [place for place, row in enumerate(rows) if "production" in row]
    assert len(followed) == shown
    assert followed == [8 - place for place in reversed(followed)]  # evenly spread
    assert all("lru" in row and "optimum" in row for row in rows)
