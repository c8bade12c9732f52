"""Feeds and what was sent, put together: who holds how much of a prompt."""

from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.feed.picture import Picture
from kvferry.feed.wire import (
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Gone,
    Held,
    Level,
    Prompt,
    Rate,
    Result,
    Space,
    Speed,
)
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Asked, Ended, Key, Usage
from kvferry.router.knowledge import Held as Tokens
from kvferry.router.knowledge import Knowledge
from kvferry.router.knowledge.knowledge import ASSUMED_SHORTFALL
from kvferry.router.knowledge.nodes import MAX_SPACES
from kvferry.router.knowledge.seen import Mark
from kvferry.router.knowledge.sent import MAX_SENT, Sent, SentRequests

CHUNK = 100
MARK = Mark(0, 0.0, 0, 0.0)


def digests(name: str, chunks: int) -> bytes:
    return b"".join(blake2b(f"{name} {n}".encode(), digest_size=32).digest() for n in range(chunks))


def asked(name: str, request_id: str = "r") -> Asked:
    """1,000 tokens, with a name at each 100 of them."""
    keys = tuple(Key(f"{name} {n}".encode(), 400 * n) for n in range(1, 11))
    return Asked(request_id, "m", keys)


@pytest.fixture
def knowledge() -> Knowledge:
    made = Knowledge()
    for node in "ab":
        made.met(f"n{node}", behind="valkey")
        made.apply(f"n{node}", Space(1, b"s" * 16, "m", CHUNK, 5000))
        made.apply(f"n{node}", EngineUp(1, "e", 1, 100_000))
    return made


def linked(knowledge: Knowledge, name: str = "p", worker: str = "wa", request_id: str = "r1") -> None:
    """A request of that prompt went to the worker, and its node told of it."""
    knowledge.sent(asked(name, request_id), knowledge.worker(worker), new_tokens=1000)
    node = f"n{worker[1]}"
    knowledge.apply(node, Prompt(1, 1, f"chatcmpl-{request_id}-0badc0de", digests(name, 10), 1000, 0))


def held(knowledge: Knowledge, worker: str, name: str = "p") -> Tokens:
    sight = knowledge.look(asked(name), (1 << 20) - 1)
    return knowledge.held(knowledge.worker(worker), sight)[0]


def test_what_is_sent_is_expected_there_and_nowhere_else(knowledge: Knowledge) -> None:
    knowledge.sent(asked("p"), knowledge.worker("wa"), new_tokens=1000)
    less = 1000 - int(ASSUMED_SHORTFALL)
    assert held(knowledge, "wa") == (less, less, less)
    assert held(knowledge, "wb") == (0, 0, 0)


def test_a_shared_tier_serves_all_hosts_behind_it_and_no_other(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    knowledge.apply("na", Held(Level.VALKEY, 0, 1, digests("p", 6)))
    assert held(knowledge, "wb") == (0, 0, 600)
    assert held(knowledge, "wa") == (1000, 1000, 1000)
    knowledge.met("nb", behind="another")
    assert held(knowledge, "wb") == (0, 0, 0)


def test_host_memory_and_shared_tiers_follow_on_each_other(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    every = digests("p", 10)
    knowledge.apply("nb", Held(Level.MEMORY, 0, 1, every[: 32 * 4]))
    knowledge.apply("na", Held(Level.VALKEY, 0, 1, every[32 * 3 : 32 * 8]))
    assert held(knowledge, "wb") == (0, 400, 800)
    knowledge.apply("nb", Gone(Level.MEMORY, 0, 1, every[32 : 32 * 2]))
    assert held(knowledge, "wb") == (0, 100, 100)


def test_any_node_can_say_that_a_shared_chunk_is_gone(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    knowledge.apply("na", Held(Level.VALKEY, 0, 1, digests("p", 10)))
    knowledge.apply("nb", Gone(Level.VALKEY, 0, 1, digests("p", 10)[32 * 5 :]))
    assert held(knowledge, "wb").shared == 500
    knowledge.apply("nb", Cleared(Level.VALKEY, 0))
    assert held(knowledge, "wb").shared == 0
    knowledge.apply("na", Held(Level.VALKEY, 0, 1, digests("p", 2)))
    assert held(knowledge, "wb").shared == 200


def test_another_routers_requests_tell_what_an_engine_holds(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    knowledge.apply("nb", Prompt(1, 1, "chatcmpl-theirs-0badc0de", digests("p", 7), 700, 0))
    assert held(knowledge, "wb").engine == 700


def test_what_an_engine_holds_ends_with_its_cache(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    knowledge.apply("nb", EngineUp(1, "e", 1, 800))
    knowledge.apply("nb", Prompt(1, 1, "x", digests("p", 7), 700, 0))
    knowledge.apply("nb", Prompt(1, 1, "y", digests("z", 4), 400, 0))
    assert held(knowledge, "wb").engine == 400  # four of eight, the tail went first


def test_an_engine_that_goes_takes_what_it_held_along(knowledge: Knowledge) -> None:
    linked(knowledge)
    assert held(knowledge, "wa").engine == 1000
    knowledge.apply("na", EngineDown(1))
    assert held(knowledge, "wa") == (0, 0, 0)


def test_a_worker_that_is_lost_holds_nothing_but_its_host_does(knowledge: Knowledge) -> None:
    linked(knowledge)
    knowledge.apply("na", Held(Level.MEMORY, 0, 1, digests("p", 3)))
    knowledge.worker_lost("wa")
    assert held(knowledge, "wa") == (0, 0, 0)
    knowledge.near("wa", "na")
    assert held(knowledge, "wa") == (0, 300, 300)


def test_a_lost_feed_takes_nothing_away_and_a_new_state_replaces_the_old(knowledge: Knowledge) -> None:
    linked(knowledge, "q", "wb", "r2")
    linked(knowledge)
    knowledge.apply("nb", Held(Level.MEMORY, 0, 1, digests("p", 3)))
    knowledge.lost("nb")
    assert held(knowledge, "wb").memory == 300
    knowledge.reset("nb")
    assert held(knowledge, "wb").memory == 0
    knowledge.apply("nb", Space(7, b"s" * 16, "m", CHUNK, 5000))
    knowledge.apply("nb", EngineUp(3, "e", 7, 100_000))
    knowledge.apply("nb", Held(Level.MEMORY, 0, 7, digests("p", 2)))
    assert held(knowledge, "wb").memory == 200


def test_a_worker_is_told_apart_from_another_engine_of_its_host(knowledge: Knowledge) -> None:
    knowledge.apply("na", EngineUp(2, "e2", 1, 100_000))
    linked(knowledge)
    knowledge.sent(asked("p", "r9"), knowledge.worker("wc"), new_tokens=1000)
    knowledge.apply("na", Prompt(2, 1, "cmpl-r9-0-0badc0de", digests("p", 10), 1000, 0))
    knowledge.apply("na", EngineDown(2))
    assert held(knowledge, "wa").engine == 1000
    assert held(knowledge, "wc").engine == 0


def test_rates_and_speeds_are_those_of_the_workers_host_and_engine(knowledge: Knowledge) -> None:
    linked(knowledge)
    knowledge.apply("na", Rate(Level.VALKEY, 0.01, 5e8))
    knowledge.apply("na", Speed(1, 0.1, 0.2, 0.3))
    worker = knowledge.worker("wa")
    assert knowledge.tiers(worker)[Level.VALKEY].bytes_per_s == 5e8
    model = knowledge.prefill(worker)
    assert model is not None and model.base_s == 0.1
    assert not knowledge.tiers(knowledge.worker("wb"))
    assert knowledge.prefill(knowledge.worker("wb")) is None


@pytest.mark.parametrize(
    "event",
    [
        Prompt(9, 1, "x", b"", 5, 0),
        Prompt(1, 9, "x", b"", 5, 0),
        Prompt(1, 1, "x", b"odd", 5, 0),
        Prompt(1, 1, "", b"", 0, 0),
        Result(9, "x", 1, 1, 1, 1, ""),
        Held(Level.ENGINE, 9, 1, digests("p", 1)),
        Gone(Level.OBJECTS, 0, 9, digests("p", 1)),
        Cleared(Level.ENGINE, 9),
        EngineDown(9),
        Speed(9, 0, 0, 0),
        EngineUp(5, "e", 77, 0),
        Space(3, b"t" * 16, "m", 0, 0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_about_what_was_never_explained_change_nothing(knowledge: Knowledge, event: AnyEvent) -> None:
    linked(knowledge)
    before = held(knowledge, "wa"), held(knowledge, "wb")
    knowledge.apply("na", event)
    knowledge.apply("stranger", event)
    assert (held(knowledge, "wa"), held(knowledge, "wb")) == before


def test_ids_that_cannot_be_linked_leave_what_was_sent(knowledge: Knowledge) -> None:
    knowledge.sent(asked("p", "r1"), knowledge.worker("wa"), new_tokens=1000)
    knowledge.apply("na", Prompt(1, 1, "an-id-of-its-own", digests("p", 10), 1000, 0))
    assert held(knowledge, "wa").engine == 1000 - int(ASSUMED_SHORTFALL)


EVENTS = st.one_of(
    st.builds(
        lambda kind, level, name, count: kind(level, 1, 1, digests(name, count)),
        st.sampled_from([Held, Gone]),
        st.sampled_from(Level),
        st.sampled_from("pq"),
        st.integers(0, 10),
    ),
    st.builds(lambda level: Cleared(level, 1), st.sampled_from(Level)),
    st.builds(
        lambda name, count: Prompt(1, 1, "x", digests(name, count), count * CHUNK, 0),
        st.sampled_from("pq"),
        st.integers(0, 10),
    ),
)


@settings(max_examples=runs(60), deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(["na", "nb"]), EVENTS), max_size=25))
def test_an_event_that_comes_twice_is_as_good_as_once(events: list[tuple[str, AnyEvent]]) -> None:
    made = []
    for times in (1, 2):
        knowledge = Knowledge()
        for node in ("na", "nb"):
            knowledge.met(node, behind="valkey")
            knowledge.apply(node, Space(1, b"s" * 16, "m", CHUNK, 5000))
            knowledge.apply(node, EngineUp(1, "e", 1, 2000))
        linked(knowledge)
        linked(knowledge, "q", "wb", "r2")
        for node, event in events:
            for _ in range(times):
                knowledge.apply(node, event)
        made.append([held(knowledge, worker, name) for worker in ("wa", "wb") for name in "pq"])
    assert made[0] == made[1]
    for tokens in made[0]:
        assert tokens.engine <= tokens.memory <= tokens.shared <= 1000


@pytest.mark.parametrize(
    ("engine_id", "found"),
    [
        ("r1", True),
        ("chatcmpl-r1", True),
        ("chatcmpl-r1-0badc0de", True),
        ("cmpl-r1-0-0badc0de", True),
        ("cmpl-r1-0", True),
        ("cmpl-r1-1-0badc0de", False),
        ("resp_r1-0badc0de", True),
        ("chatcmpl-r11", False),
    ],
)
def test_an_id_is_found_inside_what_the_engine_makes_of_it(engine_id: str, *, found: bool) -> None:
    sent = SentRequests()
    sent.add("r1", Sent("w", "m", (), MARK))
    assert (sent.told(engine_id) is not None) is found


def test_an_id_that_looks_wrapped_itself_is_found() -> None:
    for own in ("a-12345678", "chatcmpl-x-3", "cmpl-y-0-0badc0de"):
        sent = SentRequests()
        sent.add(own, Sent("w", "m", (), MARK))
        assert sent.told(f"chatcmpl-{own}-deadbeef")


def test_requests_on_their_way_are_bounded() -> None:
    sent = SentRequests(limit_names=1000)
    for number in range(MAX_SENT + 50):
        sent.add(str(number), Sent("w", "m", (), MARK))
    assert len(sent) == MAX_SENT
    for number in range(500):
        sent.add(f"k{number}", Sent("w", "m", tuple(Key(b"", 0) for _ in range(10)), MARK))
    assert len(sent) == 100


def test_the_only_engine_of_a_host_is_its_only_worker_until_shown_otherwise(knowledge: Knowledge) -> None:
    linked(knowledge)
    knowledge.near("wb", "nb")
    knowledge.apply("nb", Prompt(1, 1, "theirs", digests("p", 4), 400, 0))
    assert held(knowledge, "wb").engine == 400
    knowledge.near("wc", "nb")
    knowledge.sent(asked("q", "r2"), knowledge.worker("wc"), new_tokens=1000)
    knowledge.apply("nb", Prompt(1, 1, "cmpl-r2-0-0badc0de", digests("q", 10), 1000, 0))
    assert held(knowledge, "wb").engine == 0
    assert held(knowledge, "wc").engine == 400


def test_what_engines_compute_again_of_a_hit_is_learned(knowledge: Knowledge) -> None:
    knowledge.sent(asked("p"), knowledge.worker("wa"), new_tokens=1000)
    for _ in range(100):
        knowledge.hit_seen(held(knowledge, "wa").engine, 936)
    assert held(knowledge, "wa").engine == pytest.approx(936, abs=3)
    for _ in range(100):
        knowledge.hit_seen(held(knowledge, "wa").engine, 100)  # a miss is none of it
    assert held(knowledge, "wa").engine == pytest.approx(936, abs=3)


def test_a_node_that_says_what_its_engine_had_shows_an_empty_cache_though_all_was_loaded(
    knowledge: Knowledge,
) -> None:
    """An answer's cached_tokens has what was loaded in it."""
    linked(knowledge)
    for number in range(2, 4):
        expected = held(knowledge, "wa").engine
        request, worker = asked("p", f"r{number}"), knowledge.worker("wa")
        mark = knowledge.sent(request, worker, new_tokens=1, engine_tokens=expected)
        engine_id = f"chatcmpl-r{number}-0badc0de"
        assert held(knowledge, "wa").engine > 900
        knowledge.apply("na", Prompt(1, 1, engine_id, digests("p", 10), 1000, 0))
        knowledge.judged(worker, mark, expected_tokens=expected, cached_tokens=990)
    assert held(knowledge, "wa", "p").engine == 0


@pytest.mark.parametrize("own", [False, True], ids=["Valkey", "disks of their own"])
def test_hosts_that_come_and_go_leave_nothing_behind(knowledge: Knowledge, own: bool) -> None:
    for number in range(200):
        node, url = f"node{number}", f"w{number}"
        knowledge.near(url, node)
        knowledge.met(node, behind=f"disk {number}" if own else "valkey")
        knowledge.apply(node, Space(1, b"s" * 16, "m", CHUNK, 5000))
        knowledge.apply(node, EngineUp(1, "e", 1, 100_000))
        knowledge.apply(node, Held(Level.MEMORY, 0, 1, digests("p", 10)))
        knowledge.apply(node, Held(Level.DISK if own else Level.VALKEY, 0, 1, digests("p", 10)))
        knowledge.sent(asked("p", f"r{number}"), knowledge.worker(url), new_tokens=1000)
        late = Prompt(1, 1, f"chatcmpl-r{number}-0badc0de", digests("p", 10), 1000, 0)
        if number % 2:
            knowledge.worker_lost(url)
            knowledge.apply(node, late)
            knowledge.lost(node)
        else:
            knowledge.lost(node)
            knowledge.worker_lost(url)
    assert set(knowledge.told.nodes) == {"na", "nb"}
    assert len(knowledge._workers) == 0
    assert max(knowledge.told.holders._masks.values()).bit_length() < 200
    assert len(knowledge.told.holders._bits) < 10
    assert knowledge.told._shared_bits.bit_count() <= 1


def test_a_hosts_own_disk_serves_it_alone_and_makes_it_a_candidate(knowledge: Knowledge) -> None:
    linked(knowledge)
    linked(knowledge, "q", "wb", "r2")
    for node in ("na", "nb"):
        knowledge.met(node, behind=f"disk {node}")
    knowledge.apply("nb", Held(Level.DISK, 0, 1, digests("p", 6)))
    assert held(knowledge, "wb") == (0, 0, 600)
    sight = knowledge.look(asked("p"), 0)
    assert knowledge.worker("wb").number in knowledge.holding(sight, most=12, turn=0)


def test_namespaces_of_yesterday_make_room_for_those_of_today(knowledge: Knowledge) -> None:
    """An engine whose weights are updated has a new one each time."""
    for number in range(2, 3 * MAX_SPACES):
        knowledge.apply("na", Space(number, number.to_bytes(16, "big"), "m", CHUNK, 5000))
        knowledge.apply("na", EngineUp(1, "e", number, 100_000))
    knowledge.near("wa", "na")
    knowledge.sent(asked("p", "r1"), knowledge.worker("wa"), new_tokens=1000)
    knowledge.apply("na", Prompt(1, number, "chatcmpl-r1-0badc0de", digests("p", 10), 1000, 0))
    sight = knowledge.look(asked("p"), 1)
    assert [depths.link.chunks for depths in sight.depths.values()] == [10]
    assert len(knowledge.told.numbered) <= MAX_SPACES


def test_an_engine_that_says_zero_for_its_speed_is_not_infinitely_fast(knowledge: Knowledge) -> None:
    linked(knowledge)
    knowledge.apply("na", Speed(1, 0.0, 0.001, 0.0))
    assert knowledge.prefill(knowledge.worker("wa")) is not None
    knowledge.apply("na", Speed(1, 0.0, 0.0, 0.0))
    assert knowledge.prefill(knowledge.worker("wa")) is None


def test_a_worker_gets_neither_the_cache_nor_its_size_of_one_that_had_its_number(
    knowledge: Knowledge,
) -> None:
    knowledge.capacity("wx", 5000)
    number = knowledge.worker("wx").number
    knowledge.worker_lost("wx")
    assert knowledge.worker("wy").number == number
    assert knowledge.seen.cache(number).capacity > 5000


def test_a_shared_tier_that_was_cleared_shares_nothing_when_its_bit_is_somebody_elses(
    knowledge: Knowledge,
) -> None:
    knowledge.apply("na", Held(Level.VALKEY, 0, 1, digests("p", 2)))
    assert knowledge.told._shared_bits
    knowledge.apply("na", Cleared(Level.VALKEY, 0))
    assert not knowledge.told._shared_bits


def test_what_one_node_put_into_a_shared_tier_another_may_find_gone(knowledge: Knowledge) -> None:
    """The other never knew of it: that it is gone is news all the same."""
    linked(knowledge)
    knowledge.near("wb", "nb")
    one, other = Picture(), Picture()
    for event in one.apply(Held(Level.VALKEY, 0, 1, digests("p", 10))):
        knowledge.apply("na", event)
    assert held(knowledge, "wb").shared == 1000
    for event in other.apply(Gone(Level.VALKEY, 0, 1, digests("p", 10)[4 * 32 :])):
        knowledge.apply("nb", event)
    assert held(knowledge, "wb").shared == 400


def test_a_node_that_died_is_not_believed_after_the_first_load_that_it_does_not_bring(
    knowledge: Knowledge,
) -> None:
    guide = CostGuide(knowledge, random=Random(1))
    linked(knowledge)
    knowledge.near("wb", "nb")
    knowledge.apply("nb", Held(Level.MEMORY, 0, 1, digests("p", 10)))
    for followed in (True, False):
        if not followed:
            knowledge.lost("nb")
        flight = guide.begin(asked("p", f"f{followed}"), among=("wb",), now=0.0)
        flight.first_byte(1.0)
        assert held(knowledge, "wb").memory == 1000
        flight.end(Ended.DONE, 2.0, Usage(1000, 0, 10))
        knowledge.seen.forget(knowledge.worker("wb").number)
        assert held(knowledge, "wb").memory == (1000 if followed else 0)
