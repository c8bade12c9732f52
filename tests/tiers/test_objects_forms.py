"""What an objects tier decides without a bucket: URLs, names, formats, spans, retries, its catalogue."""

import asyncio
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.runs import runs

from kvferry.errors import CorruptError, MisconfiguredError
from kvferry.identity.names import PartKey, PartRef
from kvferry.tiers.objects import manifests
from kvferry.tiers.objects.bucket import BucketError, Trouble
from kvferry.tiers.objects.catalogue import Catalogue
from kvferry.tiers.objects.format import (
    FOOTER_BYTES,
    WHOLE_PACK,
    PackIndex,
    Removal,
    key_of,
    manifest_bytes,
    pack_manifest,
    pack_removed,
    pack_tail,
    read_manifest,
    read_removed,
    read_tail,
    record_bytes,
    tail_length,
)
from kvferry.tiers.objects.names import Kind, Name, new_id, read_name, time_of
from kvferry.tiers.objects.retries import FULL_BUDGET, LONGEST_S, Retries, RetryBudget
from kvferry.tiers.objects.settings import ObjectSettings, parse_place
from kvferry.tiers.objects.spans import GAP_BYTES, SPAN_BYTES, Wanted, spans

NAMESPACE = b"n" * 16


def _ref(number: int, nbytes: int = 100, namespace: bytes = NAMESPACE) -> PartRef:
    return PartRef(PartKey(namespace, number.to_bytes(32, "big"), number % 3), nbytes)


def _index(ident: bytes, refs: list[PartRef]) -> PackIndex:
    offsets, end = array("Q"), 0
    for ref in refs:
        offsets.append(end)
        end += record_bytes(ref.nbytes)
    return PackIndex(
        ident, end + len(pack_tail(NAMESPACE, [], [])) + 52 * len(refs), [*map(key_of, refs)], offsets
    )


# -- settings and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [("s3://some-bucket", "some-bucket", ""), ("s3://b.c.d/kv/cache/", "b.c.d", "kv/cache")],
)
def test_a_bucket_and_a_prefix_are_read_from_the_url(url: str, bucket: str, prefix: str) -> None:
    place = parse_place(ObjectSettings(url))
    assert (place.bucket, place.prefix, place.directory) == (bucket, prefix, None)


def test_a_directory_is_read_from_the_url() -> None:
    assert str(parse_place(ObjectSettings("file:///srv/a%20b")).directory) == "/srv/a b"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "s3://",
        "s3://UPPER/x",
        "s3://bucket/../x",
        "s3://bucket/a b",
        "s3://bucket/x?y=1",
        "s3://key:secret@bucket/x",
        "s3://[bucket",
        "file://relative/x",
        "file:///",
        "https://bucket/x",
        "gs://bucket/x",
    ],
)
def test_any_other_url_is_refused_in_one_line_without_a_secret(url: str) -> None:
    with pytest.raises(MisconfiguredError) as found:
        parse_place(ObjectSettings(url))
    assert "\n" not in str(found.value)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("values", [{"pack_bytes": 1000}, {"pack_bytes": 2 << 30}, {"write_bytes": 32 << 20}])
def test_limits_that_cannot_work_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(MisconfiguredError):
        parse_place(ObjectSettings("s3://bucket", **values))  # type: ignore[arg-type]


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(ObjectSettings("s3://bucket", secret_key="hush"))


@given(st.binary(min_size=16, max_size=16), st.sampled_from(Kind), st.floats(0, 2**37))
def test_names_are_read_as_they_were_written(namespace: bytes, kind: Kind, now_s: float) -> None:
    ident = new_id(now_s)
    name = Name(kind, b"" if kind is Kind.TRIAL else namespace, ident)
    assert read_name(name.path) == name
    assert abs(time_of(ident) - now_s) <= 0.001 + now_s * 1e-9


@pytest.mark.parametrize("path", ["", "v1", "v2/x", "v1/" + "0" * 32 + "/packs/x", "v1/trials/" + "G" * 32])
def test_what_is_not_ours_has_no_name(path: str) -> None:
    assert read_name(path) is None


# -- formats ---------------------------------------------------------------------------------------------

_REFS = st.lists(st.builds(_ref, st.integers(0, 2**200), st.integers(1, 1 << 22)), max_size=20)


@given(_REFS)
def test_a_pack_is_found_again_from_its_end(refs: list[PartRef]) -> None:
    index = _index(b"i" * 16, refs)
    tail = pack_tail(NAMESPACE, index.keys, index.offsets)
    assert tail_length(tail[-FOOTER_BYTES:]) == len(tail)
    assert read_tail(tail, ident=b"i" * 16, namespace=NAMESPACE, nbytes=index.nbytes) == index


@given(_REFS, st.data())
def test_no_flipped_bit_of_a_packs_end_passes(refs: list[PartRef], data: st.DataObject) -> None:
    index = _index(b"i" * 16, refs)
    tail = bytearray(pack_tail(NAMESPACE, index.keys, index.offsets))
    tail[data.draw(st.integers(0, len(tail) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError):
        length = tail_length(bytes(tail[-FOOTER_BYTES:]))
        if length > len(tail):
            raise CorruptError("longer than there is")
        read_tail(bytes(tail[-length:]), ident=b"i" * 16, namespace=NAMESPACE, nbytes=index.nbytes)


@given(
    st.lists(_REFS, max_size=5),
    st.lists(st.builds(Removal, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1))),
)
def test_manifests_and_removals_are_read_as_written(
    packs: list[list[PartRef]], removals: list[Removal]
) -> None:
    indexes = [_index(bytes([n]) * 16, refs) for n, refs in enumerate(packs)]
    data = pack_manifest(indexes)
    assert read_manifest(memoryview(data)) == indexes
    assert len(data) == manifest_bytes(indexes)
    assert read_removed(memoryview(pack_removed(removals))) == removals


@given(st.binary(max_size=200), st.data())
def test_no_damaged_manifest_or_list_passes(noise: bytes, data: st.DataObject) -> None:
    whole = [pack_manifest([_index(b"i" * 16, [_ref(1), _ref(2)])]), pack_removed([Removal(b"i" * 16, 3)])]
    for read, good in zip((read_manifest, read_removed), whole, strict=True):
        bad = bytearray(good)
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        cut = good[: data.draw(st.integers(0, len(good) - 1))]
        for wrong in (bytes(bad), cut, good + b"x", noise, whole[0] if read is read_removed else whole[1]):
            with pytest.raises(CorruptError):
                read(memoryview(wrong))


def test_a_manifest_never_grows_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [_index(bytes([n]) * 16, [_ref(k) for k in range(n)]) for n in range(40)]
    monkeypatch.setattr(manifests, "LARGEST_BYTES", 3000)
    pieces = manifests.split(packs)
    assert [pack for piece in pieces for pack in piece] == packs
    assert all(sum(manifest_bytes([pack]) for pack in piece) <= 3000 for piece in pieces)
    assert len(pieces) > 10


# -- spans -----------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 32 << 20), st.integers(1, 10 << 20)),
        max_size=30,
    )
)
def test_each_record_is_in_one_span_that_is_no_longer_than_it_may_be(
    records: list[tuple[bytes, int, int]],
) -> None:
    wanted = [Wanted(*record, index) for index, record in enumerate(records)]
    found = spans(wanted)
    assert sorted(record for span in found for record in span.wanted) == sorted(wanted)
    for span in found:
        assert all(record.pack == span.pack for record in span.wanted)
        assert span.offset == min(record.offset for record in span.wanted)
        assert span.offset + span.nbytes == max(record.offset + record.nbytes for record in span.wanted)
        assert len(span.wanted) == 1 or span.nbytes <= SPAN_BYTES
    firsts = [min(record.index for record in span.wanted) for span in found]
    assert firsts == sorted(firsts)


def test_neighbours_are_read_together_and_what_is_far_is_not() -> None:
    near = [Wanted(b"a", n * 1000, 900, n) for n in range(10)]
    assert [len(span.wanted) for span in spans([*near, Wanted(b"a", 10_000 + GAP_BYTES, 900, 10)])] == [10, 1]


# -- retries ---------------------------------------------------------------------------------------------


class _Time:
    """A clock that sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def _try(
    trouble: Trouble, *, budget: RetryBudget, give_up_at: float = 1e9, works_at: int = 10**9
) -> tuple[int, _Time]:
    """How often it was tried."""
    time, tries = _Time(), 0

    async def work(limit_s: float) -> str:
        nonlocal tries
        tries += 1
        assert 0 < limit_s <= 5.0
        if tries >= works_at:
            return "worked"
        raise BucketError(trouble, "no")

    retries = Retries(lambda: time.now, budget, lambda low, high: high, time.sleep)
    try:
        asyncio.run(retries.run(work, limit_s=5.0, give_up_at=give_up_at))
    except BucketError:
        assert tries < works_at
    return tries, time


def test_what_passes_is_tried_again_after_waits_drawn_below_a_bound_that_doubles() -> None:
    tries, time = _try(Trouble.SLOW_DOWN, budget=RetryBudget(), works_at=8)
    assert tries == 8
    assert time.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, LONGEST_S]


@pytest.mark.parametrize(
    "trouble", [Trouble.DENIED, Trouble.NO_BUCKET, Trouble.SKEWED, Trouble.ABSENT, Trouble.FULL]
)
def test_what_stays_wrong_is_not_tried_again(trouble: Trouble) -> None:
    assert _try(trouble, budget=RetryBudget())[0] == 1


def test_nothing_is_tried_after_its_time() -> None:
    tries, time = _try(Trouble.BROKEN, budget=RetryBudget(tokens=1e9), give_up_at=10.0)
    assert tries > 3
    assert time.now < 10.0


def test_a_store_in_trouble_gets_a_tenth_more_requests_and_not_a_multiple() -> None:
    budget = RetryBudget()
    tries = sum(_try(Trouble.SLOW_DOWN, budget=budget)[0] for _ in range(1000))
    assert tries <= 1000 + FULL_BUDGET + 101
    assert budget.refused > 0


# -- the catalogue against a model -------------------------------------------------------------------------


class CatalogueLife(RuleBasedStateMachine):
    """Packs of a few parts come, go and lose records; a part's newest live copy is found."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.packs: dict[bytes, dict[int, PartRef]] = {}  # id -> live records
        self.everything: dict[bytes, PackIndex] = {}
        self.dead: set[bytes] = set()
        self.gone: dict[bytes, set[int]] = {}
        self.missing: set[bytes] = set()  # of those spoken of, what the last listing did not show

    @rule(number=st.integers(0, 12), parts=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def add(self, number: int, parts: list[int]) -> None:
        ident = bytes([number]) * 16
        index = self.everything.setdefault(ident, _index(ident, [_ref(n) for n in parts]))
        added = self.catalogue.add(NAMESPACE, index)
        assert (added is None) == (ident in self.packs or ident in self.dead)
        if added is not None:
            gone = self.gone.get(ident, set())
            refs = {key_of(_ref(n)): _ref(n) for n in range(6)}
            live = {record: refs[key] for record, key in enumerate(index.keys) if record not in gone}
            self.packs[ident] = live

    @rule(number=st.integers(0, 12))
    def forget(self, number: int) -> None:
        ident = bytes([number]) * 16
        assert (self.catalogue.forget(ident) is not None) == (ident in self.packs)
        if self.packs.pop(ident, None) is not None:
            self.gone.pop(ident, None)

    @rule(part=st.integers(0, 5))
    def remove(self, part: int) -> None:
        found = {(record.pack.ident, record.record) for record in self.catalogue.remove(_ref(part))}
        assert found == {
            (i, n) for i, live in self.packs.items() for n, ref in live.items() if ref == _ref(part)
        }
        for ident, record in found:
            del self.packs[ident][record]
            self.gone.setdefault(ident, set()).add(record)

    @rule(number=st.integers(0, 12), record=st.one_of(st.integers(0, 5), st.just(WHOLE_PACK)))
    def apply(self, number: int, record: int) -> None:
        ident = bytes([number]) * 16
        self.catalogue.apply([Removal(ident, record)])
        self.missing.discard(ident)
        if record == WHOLE_PACK:
            self.dead.add(ident)
            self.packs.pop(ident, None)
            return
        if ident not in self.dead:
            self.gone.setdefault(ident, set()).add(record)
        self.packs.get(ident, {}).pop(record, None)

    @rule(listed=st.sets(st.integers(0, 12)))
    def settle(self, listed: set[int]) -> None:
        idents = {bytes([number]) * 16 for number in listed}
        self.catalogue.settle(idents)
        missing = (self.dead | self.gone.keys()) - self.packs.keys() - idents
        twice = missing & self.missing
        self.missing = missing - twice
        self.dead -= twice
        self.gone = {i: gone for i, gone in self.gone.items() if i not in twice}

    @invariant()
    def the_newest_copy_is_found(self) -> None:
        for part in range(6):
            copies = [i for i, live in self.packs.items() if _ref(part) in live.values()]
            found = self.catalogue.find(_ref(part))
            assert (found.pack.ident if found else None) == max(copies, default=None)
            if found is not None:
                assert found.pack.index.keys[found.record] == key_of(_ref(part))

    @invariant()
    def the_oldest_is_the_first(self) -> None:
        first = self.catalogue.first()
        assert (first.ident if first else None) == min(self.packs, default=None)

    @invariant()
    def sizes_add_up(self) -> None:
        assert self.catalogue.packs.keys() == self.packs.keys()
        assert self.catalogue.nbytes == sum(self.everything[ident].nbytes for ident in self.packs)
        assert self.catalogue.parts == len({ref for live in self.packs.values() for ref in live.values()})
        assert all(pack.live == len(self.packs[ident]) for ident, pack in self.catalogue.packs.items())


TestCatalogueLife = CatalogueLife.TestCase
TestCatalogueLife.settings = settings(max_examples=runs(100), stateful_step_count=30, deadline=None)
