"""Which chunks are where, against a plain dict of sets."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.runs import runs

from kvferry.feed.wire import Level
from kvferry.router.knowledge import holders as module
from kvferry.router.knowledge.holders import Holders, Place

PLACES = [
    Place(Level.MEMORY, "a"),
    Place(Level.MEMORY, "b"),
    Place(Level.ENGINE, "a", 1),
    Place(Level.VALKEY, "v"),
]
CHUNKS = st.lists(st.integers(0, 20), max_size=6)


class HoldersMachine(RuleBasedStateMachine):
    """Sweeps begin early and go on slowly here."""

    def __init__(self) -> None:
        super().__init__()
        self.before = module.MAX_RETIRED, module.SWEPT_PER_CALL
        module.MAX_RETIRED, module.SWEPT_PER_CALL = 2, 3
        self.real = Holders()
        self.model: dict[Place, set[int]] = {}

    def teardown(self) -> None:
        module.MAX_RETIRED, module.SWEPT_PER_CALL = self.before

    @rule(place=st.sampled_from(PLACES), chunks=CHUNKS)
    def held(self, place: Place, chunks: list[int]) -> None:
        for _ in range(2):  # twice is once
            self.real.held(place, chunks)
        self.model.setdefault(place, set()).update(chunks)

    @rule(place=st.sampled_from(PLACES), chunks=CHUNKS)
    def gone(self, place: Place, chunks: list[int]) -> None:
        for _ in range(2):
            self.real.gone(place, chunks)
        self.model.setdefault(place, set()).difference_update(chunks)

    @rule(place=st.sampled_from(PLACES))
    def forgotten(self, place: Place) -> None:
        for _ in range(2):
            self.real.forget(place)
        self.model.pop(place, None)

    @invariant()
    def the_same_is_where_the_model_has_it(self) -> None:
        for place in PLACES:
            bit = self.real.known(place)
            assert bit.bit_count() <= 1
            found = {chunk for chunk in range(21) if self.real.mask(chunk) & bit}
            assert found == self.model.get(place, set())
            if bit:
                assert self.real.place(bit.bit_length() - 1) == place


TestHolders = HoldersMachine.TestCase
TestHolders.settings = settings(max_examples=runs(60), stateful_step_count=40, deadline=None)


def test_bits_of_forgotten_places_are_used_again() -> None:
    holders = Holders()
    for number in range(5000):
        place = Place(Level.MEMORY, str(number))
        holders.held(place, [number % 50])
        holders.forget(place)
    assert holders.bit(Place(Level.MEMORY, "last")).bit_length() < 4 * module.MAX_RETIRED
    assert len(holders) <= 50


def test_the_longest_unused_chunk_is_forgotten() -> None:
    holders = Holders(limit=3)
    place = PLACES[0]
    holders.held(place, [1, 2, 3])
    holders.used([1])
    holders.held(place, [4])
    assert [chunk for chunk in range(9) if holders.mask(chunk)] == [1, 3, 4]
    holders.held(place, [3])
    holders.held(place, [5, 6])
    assert [chunk for chunk in range(9) if holders.mask(chunk)] == [3, 5, 6]
