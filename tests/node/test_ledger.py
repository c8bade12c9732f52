"""The ledger of a quota, and the tier within one: nothing is there that does not count."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.node.fleet import PART_BYTES, digests
from tests.runs import runs

from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.node.ledger import ChunkName, Ledger, stored_bytes
from kvferry.node.quota import QuotaTier
from kvferry.testing.memory_tier import MemoryStore
from kvferry.testing.tier_contract import TierContract, TierStore
from kvferry.tiers.contract import Tier

STORED_BYTES = stored_bytes(PART_BYTES)
PLAIN_BYTES = 100_000  # one value; twice as much are several
QUOTA = 20 * STORED_BYTES


class LedgerMachine(RuleBasedStateMachine):
    """Against a store that keeps what it is told to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.quota = 10 * stored_bytes(PLAIN_BYTES)
        self.ledger = Ledger(self.quota, max_chunks=6)
        self.store: dict[PartKey, int] = {}
        self.storing: list[PartRef] = []
        self.leaving: list[PartKey] = []

    keys = st.builds(
        PartKey, st.just(b"n" * 16), st.sampled_from([bytes([n]) * 32 for n in range(9)]), st.integers(0, 2)
    )

    @rule(key=keys)
    def claim(self, key: PartKey) -> None:
        ref = PartRef(key, PLAIN_BYTES * (1 + key.part))
        if self.ledger.claim(ref):
            self.storing.append(ref)
        for victim in self.ledger.make_room():
            assert victim not in self.storing
            self.leaving.append(victim.key)

    @rule(outcome=st.sampled_from(["stored", "absent", "traces"]))
    def finish(self, outcome: str) -> None:
        if not self.storing:
            return
        key, nbytes = self.storing.pop()
        if self.ledger.over_quota or self.ledger.is_leaving(key):
            outcome = "not begun"  # a store waits until there is room
        if outcome == "stored":
            self.ledger.stored(key)
        else:
            self.ledger.not_stored(key, traces=outcome == "traces")
        if outcome in ("stored", "traces"):  # else what was there before is there still
            self.store[key] = nbytes

    @rule(gone=st.booleans())
    def leave(self, gone: bool) -> None:
        if self.leaving:
            key = self.leaving.pop(0)
            self.ledger.left(key, gone=gone)
            if gone:
                self.store.pop(key, None)

    @rule(key=keys)
    def evict(self, key: PartKey) -> None:
        """By the server, and seen: of a part of several values, one, so that the rest has to be removed."""
        if key not in self.leaving and all(ref.key != key for ref in self.storing):
            ref = PartRef(key, PLAIN_BYTES * (1 + key.part))
            rests = self.ledger.missing([ref], since=self.ledger.mark)
            if len(stripe_plan(ref.nbytes)) == 1:
                assert not rests
                self.store.pop(key, None)
            self.leaving += [rest.key for rest in rests]

    @rule(keys=st.lists(keys, max_size=4))
    def use(self, keys: list[PartKey]) -> None:
        self.ledger.touch([ChunkName(key.namespace, key.chunk) for key in keys])

    @rule(keys=st.lists(keys, max_size=6))
    def extend(self, keys: list[PartKey]) -> None:
        self.ledger.extends([ChunkName(key.namespace, key.chunk) for key in keys])

    @rule(keys=st.lists(keys, max_size=3))
    def order(self, keys: list[PartKey]) -> None:
        self.ledger.order([ChunkName(key.namespace, key.chunk) for key in keys])

    @invariant()
    def nothing_is_stored_that_does_not_count(self) -> None:
        self.ledger.check()
        there = sum(stored_bytes(nbytes) for nbytes in self.store.values())
        under_way = sum(stored_bytes(ref.nbytes) for ref in set(self.storing))
        assert there <= self.ledger.statistics().used_bytes
        assert under_way <= self.quota
        if not self.ledger.over_quota:
            assert there <= self.quota
            assert self.ledger.statistics().used_bytes <= self.quota


TestLedger = LedgerMachine.TestCase
TestLedger.settings = hypothesis_settings(
    max_examples=runs(100), stateful_step_count=40, deadline=None, print_blob=True
)


def test_a_question_asked_before_a_part_was_stored_does_not_make_it_missing() -> None:
    ledger = Ledger(QUOTA)
    ref = PartRef(PartKey(b"n" * 16, b"c" * 32, 0), PART_BYTES)
    mark = ledger.mark
    ledger.claim(ref)
    ledger.stored(ref.key)
    assert ledger.missing([ref], since=mark) == []
    assert ledger.statistics().used_bytes == STORED_BYTES
    assert ledger.missing([ref, ref], since=ledger.mark) == [ref]  # what is left of its values
    assert ledger.is_leaving(ref.key)
    ledger.left(ref.key, gone=True)
    ledger.check()
    assert ledger.statistics().used_bytes == 0


def test_of_a_prefix_the_tail_leaves_first_and_a_chunk_as_a_whole() -> None:
    ledger = Ledger(4 * stored_bytes(1000))
    refs = [PartRef(PartKey(b"n" * 16, chunk, part), 1000) for chunk in digests(2) for part in (0, 1)]
    for ref in refs:
        assert ledger.claim(ref)
        ledger.stored(ref.key)
    ledger.touch([ChunkName(ref.key.namespace, ref.key.chunk) for ref in refs])
    assert ledger.claim(PartRef(PartKey(b"n" * 16, digests(3)[2], 0), 1000))
    assert ledger.make_room() == refs[2:]


def test_of_a_prefix_larger_than_the_quota_the_head_is_kept_however_it_comes() -> None:
    ledger = Ledger(4 * stored_bytes(1000))
    others = [PartRef(PartKey(b"n" * 16, chunk, 0), 1000) for chunk in digests(2, "of another prefix")]
    refs = [PartRef(PartKey(b"n" * 16, chunk, 0), 1000) for chunk in digests(9)]
    names = [ChunkName(ref.key.namespace, ref.key.chunk) for ref in refs]
    for ref in others:
        assert ledger.claim(ref)
        ledger.stored(ref.key)
    for end in (3, 9):  # the first turn of a conversation, then the second
        ledger.extends(names[:end])
        for at in range(0, end, 2):  # in batches
            batch = [ref for ref in refs[at : min(at + 2, end)] if not ledger.holds(ref.key)]
            ledger.order([ChunkName(ref.key.namespace, ref.key.chunk) for ref in batch])
            claimed = [ref for ref in batch if ledger.claim(ref)]
            for victim in ledger.make_room():
                assert victim in others
                ledger.left(victim.key, gone=True)
            for ref in claimed:
                ledger.stored(ref.key)
    assert [ledger.holds(ref.key) for ref in refs] == [True] * 4 + [False] * 5
    ledger.order(names)
    ledger.claim(others[0])
    assert ledger.make_room() == [refs[3]]
    ledger.check()


class _Store(MemoryStore):
    def open(self) -> Tier:
        """With room for all that the suite stores."""
        return QuotaTier(super().open(), quota_bytes=1 << 30)


class TestTierWithinItsQuota(TierContract):
    @pytest.fixture
    def store(self) -> TierStore:
        return _Store()
