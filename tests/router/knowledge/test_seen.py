"""What a worker's own cache should hold, against an exact cache of prefixes."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.router.choice import ALL_UP_TO
from kvferry.router.contract import Key
from kvferry.router.knowledge.seen import MIN_CAPACITY_TOKENS, Seen

ALL = 0b111
PIECE = 1000  # tokens


def keys(*names: str) -> tuple[Key, ...]:
    return tuple(Key(name.encode(), 100 * (place + 1)) for place, name in enumerate(names))


def reach(seen: Seen, prompt: tuple[Key, ...], worker: int) -> int:
    """How many of the names it should hold."""
    tokens = [PIECE * (place + 1) for place in range(len(prompt))]
    for place, mask in seen.holds(prompt, tokens, ALL):
        if mask >> worker & 1:
            return place + 1
    return 0


def test_a_prompt_counts_from_when_it_is_sent_and_only_there() -> None:
    seen = Seen()
    seen.sent(keys("a", "b"), 1, new_tokens=500)
    assert [reach(seen, keys("a", "b", "c"), worker) for worker in range(3)] == [0, 2, 0]
    seen.sent(keys("a", "x"), 2, new_tokens=500)
    assert [reach(seen, keys("a", "b"), worker) for worker in range(3)] == [0, 2, 1]


def test_what_was_never_computed_is_taken_back_unless_others_asked_for_it_since() -> None:
    seen = Seen()
    mark = seen.sent(keys("a", "b"), 0, new_tokens=500)
    later = seen.sent(keys("a", "c"), 0, new_tokens=500)
    seen.taken_back(keys("a", "b"), mark)
    assert reach(seen, keys("a", "b"), 0) == 1
    seen.taken_back(keys("a", "c"), later)
    assert reach(seen, keys("a", "c"), 0) == 1  # the first asked for it before
    once = seen.sent(keys("z"), 1, new_tokens=5)
    seen.taken_back(keys("z"), once)
    assert reach(seen, keys("z"), 1) == 0


def test_ten_thousand_that_were_taken_back_leave_nothing() -> None:
    seen = Seen()
    marks = [(keys(f"a{n}", f"b{n}"), n % 3) for n in range(10_000)]
    sent = [(prompt, seen.sent(prompt, worker, new_tokens=10)) for prompt, worker in marks]
    for prompt, mark in sent:
        seen.taken_back(prompt, mark)
    assert len(seen) == 0


def test_a_prefix_goes_when_as_much_was_computed_since_as_the_cache_holds() -> None:
    seen = Seen()
    seen.told(0, 10_000)
    seen.sent(keys("a"), 0, new_tokens=1000)
    seen.sent(keys("b"), 0, new_tokens=8_000)
    assert reach(seen, keys("a"), 0) == 1
    seen.computed(0, 3_000)
    assert reach(seen, keys("a"), 0) == 0
    assert reach(seen, keys("b"), 0) == 1


def test_an_empty_cache_is_noticed_by_answers_and_only_by_several() -> None:
    seen = Seen()
    for name in "abc":
        seen.sent(keys(name), 0, new_tokens=1000)
    marks = [seen.sent(keys(name), 0, new_tokens=1) for name in "ab"]
    assert not seen.answered(marks[0], expected_tokens=1000, cached_tokens=0)
    assert reach(seen, keys("c"), 0) == 1
    assert seen.answered(marks[1], expected_tokens=1000, cached_tokens=0)
    assert reach(seen, keys("c"), 0) == 0


def test_one_miss_among_hits_empties_nothing() -> None:
    seen = Seen()
    seen.sent(keys("a"), 0, new_tokens=1000)
    for cached in (0, 900, 0, 900, 0):
        mark = seen.sent(keys("a"), 0, new_tokens=1)
        assert not seen.answered(mark, expected_tokens=1000, cached_tokens=cached)


def test_how_much_a_cache_holds_is_learned_from_misses_and_hits() -> None:
    seen = Seen()
    seen.sent(keys("a"), 0, new_tokens=1000)
    seen.sent(keys("b"), 0, new_tokens=300_000)
    mark = seen.sent(keys("a"), 0, new_tokens=1)
    assert not seen.answered(mark, expected_tokens=1000, cached_tokens=0)
    learned = seen.cache(0).capacity
    assert MIN_CAPACITY_TOKENS < learned < 300_000
    seen.sent(keys("c"), 0, new_tokens=0.9 * learned)
    mark = seen.sent(keys("a"), 0, new_tokens=1)
    seen.answered(mark, expected_tokens=1000, cached_tokens=1000)
    assert seen.cache(0).capacity > learned


def test_a_cache_that_seemed_smaller_than_was_told_is_found_to_be_as_large_again() -> None:
    seen = Seen()
    seen.told(0, 10_000)
    seen.sent(keys("a"), 0, new_tokens=1000)
    seen.sent(keys("b"), 0, new_tokens=4000)
    mark = seen.sent(keys("a"), 0, new_tokens=1)
    seen.answered(mark, expected_tokens=1000, cached_tokens=0)
    assert seen.cache(0).capacity < 5000
    for number in range(20):
        seen.sent(keys(f"c{number}"), 0, new_tokens=0.95 * seen.cache(0).capacity)
        mark = seen.sent(keys("a"), 0, new_tokens=1)
        seen.answered(mark, expected_tokens=1000, cached_tokens=1000)
    assert seen.cache(0).capacity == 10_000


def test_a_number_given_to_another_worker_inherits_nothing() -> None:
    seen = Seen()
    seen.told(0, 5000)
    seen.sent(keys("a"), 0, new_tokens=10)
    seen.renew(0)
    assert reach(seen, keys("a"), 0) == 0
    assert seen.cache(0).capacity > 5000


def test_of_a_pool_whose_workers_are_all_looked_at_each_ones_cache_counts() -> None:
    seen = Seen()
    for worker in range(ALL_UP_TO):
        seen.sent(keys("a"), worker, new_tokens=10)
    seen.forget(3)
    [(_, mask)] = seen.holds(keys("a"), [10], (1 << ALL_UP_TO) - 1)
    assert mask == (1 << ALL_UP_TO) - 1 - (1 << 3)


def test_names_are_bounded() -> None:
    seen = Seen(limit=100)
    for number in range(1000):
        seen.sent(keys(f"{number}a", f"{number}b"), number % 3, new_tokens=10)
    assert len(seen) == 100
    assert reach(seen, keys("999a", "999b"), 0) == 2


def test_a_prefix_held_by_very_many_is_found_at_all_of_them() -> None:
    seen = Seen()
    for worker in range(200):
        seen.sent(keys("a"), worker, new_tokens=10)
    [(place, mask)] = seen.holds(keys("a", "b"), [10, 20], (1 << 200) - 1)
    assert (place, mask) == (0, (1 << 200) - 1)


@settings(max_examples=runs(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["", "x", "y"]), st.integers(0, 1)),
        unique_by=lambda asked: asked[0],
        max_size=25,
    )
)
def test_of_prompts_sent_once_what_is_expected_is_what_an_exact_cache_holds(
    asked: list[tuple[int, str, int]],
) -> None:
    """Two workers whose caches hold eight pieces of 1,000 tokens; a prompt is one piece, or two."""
    seen = Seen()
    caches: list[OrderedDict[str, None]] = [OrderedDict(), OrderedDict()]
    for worker in range(2):
        seen.told(worker, 8 * PIECE)
    prompts = [[str(head), f"{head}{tail}"] if tail else [str(head)] for head, tail, _ in asked]
    for names, (_, _, worker) in zip(prompts, asked, strict=True):
        seen.sent(keys(*names), worker, new_tokens=PIECE * len(names))
        for name in reversed(names):
            caches[worker][name] = None
        while len(caches[worker]) > 8:
            caches[worker].popitem(last=False)
        for others in prompts:
            for other in range(2):
                exact = sum(name in caches[other] for name in others)
                assert reach(seen, keys(*others), other) == exact
