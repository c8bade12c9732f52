"""Orders of events that the node's machine seldom meets, step by step in its world."""

from collections.abc import Iterator

import pytest
from tests.node.machine_clients import Clients
from tests.node.machine_held import Loading
from tests.node.machine_tier import Value
from tests.node.machine_world import CHECKSUMS, CONTENT, DIGESTS, KEYS, ODD, WIDE

from kvferry.node import search
from kvferry.node.saves import RESERVATION_LEASE_S
from kvferry.node.state import Namespace
from kvferry.node.wire import Answer, Corrupt, Reason, Role
from kvferry.tiers.contract import Outcome


@pytest.fixture
def model() -> Iterator[Clients]:
    """Three engines, and a tier that has everything."""
    made = Clients(with_tier=True)
    assert made.tier is not None
    made.tier.values.update((key, Value(key, CONTENT[key], CHECKSUMS[key])) for key in KEYS)
    for number in range(3):
        for role in (Role.SCHEDULER, Role.WORKER):
            made.peers.append(made.world.connect(role, f"engine {number}"))
    try:
        yield made
        made.rest()
    finally:
        made.world.close()


def load(model: Clients, who: int, space: Namespace, chunks: list[bytes]) -> Loading:
    """A load of all of these chunks, to which every part's worker listens."""
    assert model.tier is not None
    before = set(model.loads)
    probe = model.ask(who, space, chunks)
    if probe is not None:
        model.tier.answer(probe, None, 0)
    model.check()
    (started,) = (loading for load_id, loading in model.loads.items() if load_id not in before)
    assert len(started.chunks) == len(chunks)
    for part in space.parts:
        model.join(who, started, part)
    model.check()
    return started


def fetch_all(model: Clients) -> None:
    """The tier brings what it was asked for, and what it is asked for then."""
    assert model.tier is not None
    while model.tier.fetches:
        for fetch in list(model.tier.fetches):
            model.tier.finish(fetch, None)
        model.check()


def test_a_load_that_finds_the_pool_full_on_its_way_is_counted(model: Clients) -> None:
    assert model.tier is not None
    streaming = load(model, 0, WIDE, DIGESTS[:6])
    load(model, 1, ODD, DIGESTS[:4])
    fetch_all(model)
    probe = model.ask(2, ODD, DIGESTS[5:9])
    assert probe is not None
    for at in list(streaming.places):  # in one turn of the loop with the start of the third load
        model.copy(0, streaming, at)
    model.tier.answer(probe, None, 0)
    model.check()
    assert model.world.state.counters.failed["pool-full"] == 1


def test_a_part_called_corrupt_while_another_waits_for_its_fetch_is_counted(model: Clients) -> None:
    assert model.tier is not None
    first = load(model, 0, WIDE, DIGESTS[:2])
    second = load(model, 1, WIDE, DIGESTS[:2])
    values = dict(model.tier.values)
    model.tell(Role.WORKER, 0, Corrupt(load_id=first.load_id, part=0, chunk=0))
    model.check()
    model.tier.values.update(values)  # removed there, and stored again by another host
    for fetch in list(model.tier.fetches):
        model.tier.finish(fetch, None)
    model.check()
    assert second.end == 0
    assert model.world.state.counters.failed["gone"] == 1


def test_a_cancelled_fetch_that_ends_as_its_last_waiter_gives_up_is_counted(model: Clients) -> None:
    assert model.tier is not None
    model.end(load(model, 0, WIDE, DIGESTS[:1]))
    model.check()
    second = load(model, 1, WIDE, DIGESTS[:1])
    model.clock.now = second.deadline
    for fetch in list(model.tier.fetches):
        model.tier.finish(fetch, Outcome.LATE)
    model.check()
    assert model.world.state.counters.failed["deadline"] > 0


def test_a_slot_that_is_asked_for_again_while_it_is_overdue_is_declined_and_counted(model: Clients) -> None:
    wanted = DIGESTS[:1]
    assert model.reserve(0, ODD, 0, prefix=(), wanted=wanted)
    model.clock.now += RESERVATION_LEASE_S
    model.check()
    model.reserve(0, ODD, 0, prefix=(), wanted=wanted)
    model.check()
    assert model.world.state.counters.reserve_declined == {"overdue": 1}
    assert model.reserve(1, ODD, 0, prefix=(), wanted=wanted)
    model.check()


def test_a_prefix_longer_than_a_lookup_may_ask_for_is_a_limit_and_no_miss(
    model: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_PROBED_PARTS", 4)
    assert model.tier is not None
    probe = model.ask(0, WIDE, DIGESTS[:6])
    assert probe is not None
    assert len(probe.refs) == 4
    model.tier.answer(probe, None, 0)
    model.world.settle()
    (answer,) = (m for m in model.peer(Role.SCHEDULER, 0).inbox if isinstance(m, Answer))
    assert (answer.count, answer.reason) == (2, Reason.LIMIT)
    counters = model.world.state.counters
    assert (counters.failed["limit"], counters.missed_chunks) == (1, 0)
    model.check()


def test_a_prompt_that_names_a_chunk_twice_costs_nobody_else_the_fetch(model: Clients) -> None:
    assert model.tier is not None
    twice = load(model, 0, ODD, [DIGESTS[0], DIGESTS[1], DIGESTS[0]])
    model.clock.now += 0.5
    other = load(model, 1, ODD, DIGESTS[:1])
    assert other.deadline > twice.deadline
    for fetch in list(model.tier.fetches):
        if fetch.item.ref.key.chunk == DIGESTS[0]:
            model.tier.finish(fetch, Outcome.LATE)
    model.check()
    assert (twice.end, other.end) == (0, 1)
    fetch_all(model)
    assert other.given == {(0, 0)}
