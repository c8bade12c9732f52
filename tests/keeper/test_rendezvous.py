"""Who has which chunk: everybody agrees, shares are even, and only a lost or new keeper's share moves."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.keeper.fleet import some_refs

from kvferry.keeper.rendezvous import owner, ranking

CHUNKS = [ref.key.chunk for ref in some_refs(2000)]
NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


@given(NAMES, st.randoms())
def test_the_order_in_which_keepers_are_listed_does_not_matter(names: list[str], random: Random) -> None:
    shuffled = names[:]
    random.shuffle(shuffled)
    for chunk in CHUNKS[:20]:
        assert owner(chunk, names) == owner(chunk, shuffled) == ranking(chunk, shuffled)[0]
        assert ranking(chunk, names) == ranking(chunk, shuffled)


@given(NAMES, st.data())
def test_a_keeper_that_leaves_or_joins_moves_only_its_share(names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    if not left:
        return
    for chunk in CHUNKS[:50]:
        before, after = owner(chunk, names), owner(chunk, left)
        assert after == (ranking(chunk, names)[1] if before == gone else before)


def test_shares_are_even() -> None:
    names = [f"store{number}" for number in range(5)]
    counts = Counter(owner(chunk, names) for chunk in CHUNKS)
    assert all(300 < counts[name] < 500 for name in names), counts


def test_a_lost_keepers_share_goes_to_all_others() -> None:
    names = [f"store{number}" for number in range(5)]
    moved = Counter(owner(chunk, names[1:]) for chunk in CHUNKS if owner(chunk, names) == names[0])
    assert all(moved[name] > 50 for name in names[1:]), moved
