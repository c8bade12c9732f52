"""What needs no SGLang: names, hits, settings, the namespace."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.sglang.facts import check_text_alone
from kvferry.engines.sglang.hits import MAX_QUESTIONS, Policy, SidePool, fold
from kvferry.engines.sglang.identity import Adapter, EngineFacts, Identity, PoolFacts
from kvferry.engines.sglang.keys import PageNames
from kvferry.engines.sglang.pools import MAX_CANDIDATES, Ends, StoredPool
from kvferry.engines.sglang.settings import BackendSettings, parse_settings
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.identity.domain import DomainKey

HASHES = [f"{number:064x}" for number in range(8)]
ON = {"backend_name": "kvferry", "interface_v1": 1}


class Present:
    """A store that holds some digests and answers as a node does."""

    last_error = ""

    def __init__(self, held: set[bytes], *, trailing: bool = False) -> None:
        self.held = held
        self.trailing = trailing
        self.asked = 0

    def match(self, digests: Sequence[bytes]) -> int:
        self.asked += 1
        there = [digest in self.held for digest in digests]
        if self.trailing:
            return max((n + 1 for n, one in enumerate(there) if one), default=0)
        return there.index(False) if False in there else len(there)

    def wait_connected(self, timeout_s: float) -> bool:
        return True

    def load(self, digests: Sequence[bytes], into: Callable[[int, int, memoryview], None]) -> int:
        return 0

    def save(
        self,
        prefix: Sequence[bytes],
        digests: Sequence[bytes],
        fill: Callable[[int, int, memoryview], None],
    ) -> int:
        return 0

    def close(self) -> None:
        """Nothing."""


class _NoPages:
    nbytes = 1
    shape = "none"

    def copy_out(self, index: int, target: memoryview) -> None:
        raise AssertionError

    def copy_in(self, index: int, source: memoryview) -> None:
        raise AssertionError


class _Pool:
    page_size = 1


NAMES = PageNames(DomainKey.default("d"), b"n" * 16)
LINE = [f"{number:064x}" for number in range(200)]


def stored_pool(held: set[int], *, last_only: bool = False, ends: set[int] | None = None) -> StoredPool:
    """Of a line of pages, those of these numbers are there."""

    def present(pages: set[int], *, trailing: bool) -> Present:
        return Present(set(NAMES.digests([LINE[n] for n in pages])), trailing=trailing)

    marked = None if ends is None else Ends(NAMES, present(ends, trailing=True))
    store = present(held, trailing=last_only)
    return StoredPool(_Pool(), _NoPages(), names=NAMES, store=store, last_only=last_only, ends=marked)


# ---- names


def test_a_page_is_named_by_domain_key_namespace_and_hash() -> None:
    names = {
        digest
        for key in (DomainKey.default("a"), DomainKey.default("b"))
        for namespace in (b"n" * 16, b"m" * 16)
        for digest in PageNames(key, namespace).digests(HASHES[:2])
    }
    assert len(names) == 8
    assert {len(name) for name in names} == {32}


def test_equal_names_in_every_process() -> None:
    names = PageNames(DomainKey.default("default"), bytes(range(16)))
    golden = "c6303943a9a4adc9c0cf9ba061ce6703ab2f3e4d7c3e9cef56bdbc08dc1b4bde"
    assert names.digests([HASHES[1]])[0].hex() == golden


@pytest.mark.parametrize("name", ["", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_page_hash_is_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        PageNames(DomainKey.default("a"), b"n" * 16).digests([name])


# ---- hits


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
)
def test_a_prefix_is_offered_exactly_where_every_pool_allows_it(
    main: int, window: int, everywhere: set[int], windows: set[int], states: set[int]
) -> None:
    full, mamba = stored_pool(everywhere), stored_pool(states, last_only=True)
    allowed = [
        p
        for p in range(1, main + 1)
        if set(range(p)) <= everywhere and set(range(max(0, p - window), p)) <= windows and p - 1 in states
    ]
    for swa in (
        stored_pool(windows),
        stored_pool(windows, ends={n for n in windows if n + 1 not in windows}),
    ):
        hit = fold(
            "kv",
            main,
            [
                SidePool("indexer", Policy.ALL, lambda limit: full.reach(LINE[:limit])),
                SidePool("swa", Policy.TRAILING, partial(_longest, swa, window)),
                SidePool("mamba", Policy.TRAILING, partial(_longest, mamba, 1)),
            ],
            boundaries=MAX_QUESTIONS,
        )
        assert list(hit.boundaries) == allowed
        assert hit.pages == (allowed[-1] if allowed else 0)


def _longest(pool: StoredPool, window: int, limit: int) -> int:
    return pool.longest(LINE[:limit], window=window)


def test_runs_of_windows_that_are_far_apart_are_found_in_a_few_questions() -> None:
    ends = {3, 120}
    swa = stored_pool({0, 1, 2, 3, 120}, ends=ends)  # of the second run only its last page is left
    assert swa.longest(LINE, window=3) == 4
    assert isinstance(swa.store, Present)
    assert swa.store.asked < 5
    assert stored_pool({0, 1, 2, 3, 120}).longest(LINE, window=3) == 0  # too far down without the marks
    assert MAX_CANDIDATES < 120
    assert swa.longest(LINE, window=3, until=0.0) == 0  # nor when there is no time left


def test_an_engine_of_one_rank_is_told_the_longest_prefix_alone() -> None:
    hit = fold("kv", 9, [SidePool("swa", Policy.TRAILING, lambda limit: limit)], boundaries=1)
    assert (hit.pages, hit.boundaries, hit.by_pool) == (9, (9,), {"kv": 9, "swa": 9})


def test_a_query_asks_a_bounded_number_of_questions() -> None:
    asked = []

    def longest(limit: int) -> int:
        asked.append(limit)
        return limit - 1

    fold("kv", 10_000, [SidePool("swa", Policy.TRAILING, longest)], boundaries=MAX_QUESTIONS)
    assert len(asked) == MAX_QUESTIONS


def test_a_pool_that_holds_nothing_rules_every_prefix_out() -> None:
    hit = fold("kv", 4, [SidePool("indexer", Policy.ALL, lambda _: 0)], boundaries=1)
    assert (hit.pages, hit.boundaries, hit.by_pool) == (0, (), {"kv": 4})


# ---- settings


def test_settings_are_read_and_sglangs_own_keys_are_left_alone() -> None:
    found = parse_settings(
        {**ON, "socket": "/run/k/node.sock", "deadline_ms": 500, "prefetch_threshold": 1, "domain": "team"},
        environ={},
    )
    assert found == BackendSettings(socket=Path("/run/k/node.sock"), deadline_s=0.5, domain="team")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"backend_name": "kvferry"}, '"interface_v1": 1'),
        ({**ON, "sockt": "/x"}, "did you mean socket?"),
        ({**ON, "deadline_ms": "soon"}, "deadline_ms: 'soon'"),
        ({**ON, "deadline_ms": 1}, "deadline_ms: 1 is outside"),
        ({**ON, "domain": ""}, "domain: ''"),
        ({**ON, "group": []}, "group"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_line_that_says_what_to_do(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfiguredError) as refused:
        parse_settings(extra, environ={})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# ---- images


def test_a_model_for_text_alone_is_served() -> None:
    check_text_alone(SimpleNamespace(is_multimodal=False), path="m", encoders=False)


@pytest.mark.parametrize(
    ("model", "encoders", "said"),
    [
        (SimpleNamespace(is_multimodal=True), False, "start it for text alone (--language-model-only"),
        (SimpleNamespace(is_multimodal=False), True, "start it for text alone"),
        (SimpleNamespace(is_multimodal=None), False, "cannot be told"),
        (SimpleNamespace(), False, "cannot be told"),
    ],
    ids=str,
)
def test_a_model_that_takes_images_or_may_is_refused(model: Any, encoders: bool, said: str) -> None:
    with pytest.raises(MisconfiguredError) as refused:
        check_text_alone(model, path="/models/m", encoders=encoders)
    assert said in str(refused.value)
    assert "/models/m" in str(refused.value)
    assert "\n" not in str(refused.value)


# ---- the namespace


def checkpoint(directory: Path, weights: bytes = b"\0" * 8) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.bin").write_bytes(weights)
    return directory


ENGINE = EngineFacts(
    version="0.5.23",
    model_path="",
    revision=None,
    dtype="bfloat16",
    kv_dtype="auto",
    scales_file=None,
    draft_path=None,
    draft_revision=None,
    adapters=(),
    options={"quantization": "None"},
)
POOL = PoolFacts(
    name="kv",
    kind="MHATokenToKVPoolHost",
    layout="page_first",
    dtype="bfloat16",
    shape="pieces 2x4096",
    page_bytes=8192,
    page_tokens=64,
    layers=(0, 32),
    stage=(0, 1),
    shard="0/2",
)


def identity(tmp_path: Path, **changed: Any) -> Identity:
    facts = replace(ENGINE, model_path=str(checkpoint(tmp_path / "model")), **changed)
    return Identity(BackendSettings(socket=Path("/s")), facts)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "swa"},
        {"kind": "MLATokenToKVPoolHost"},
        {"layout": "layer_first"},
        {"dtype": "float16"},
        {"shape": "pieces 1x8192"},
        {"page_bytes": 4096},
        {"page_tokens": 32},
        {"layers": (0, 16)},
        {"stage": (1, 2)},
        {"shard": "1/2"},
        {"trailing": 1},
    ],
    ids=str,
)
def test_pools_that_differ_never_share_a_name(tmp_path: Path, change: dict[str, Any]) -> None:
    known = identity(tmp_path)
    assert known.namespace(POOL).namespace != known.namespace(replace(POOL, **change)).namespace


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.5.24"},
        {"dtype": "float16"},
        {"kv_dtype": "fp8_e4m3"},
        {"options": {"quantization": "awq"}},
        {"options": {"quantization": "None", "json_model_override_args": '{"rope_theta": 1}'}},
    ],
    ids=str,
)
def test_engines_that_compute_differently_never_share_a_name(tmp_path: Path, change: dict[str, Any]) -> None:
    one, other = identity(tmp_path), identity(tmp_path, **change)
    assert one.namespace(POOL).namespace != other.namespace(POOL).namespace


def test_weights_scales_drafts_and_adapters_count_by_content(tmp_path: Path) -> None:
    scales, draft, adapter = tmp_path / "scales.json", tmp_path / "draft", tmp_path / "adapter"

    def named(content: bytes) -> bytes:
        scales.write_bytes(content)
        checkpoint(draft, content)
        checkpoint(adapter, content)
        found = [
            identity(tmp_path, scales_file=str(scales)),
            identity(tmp_path, draft_path=str(draft)),
            identity(tmp_path, adapters=(Adapter("a", str(adapter)),)),
        ]
        checkpoint(tmp_path / "model", content)
        found.append(identity(tmp_path))
        checkpoint(tmp_path / "model")
        names = {one.namespace(POOL).namespace for one in found}
        assert len(names) == len(found)
        return b"".join(sorted(names))

    assert named(b"1" * 8) == named(b"1" * 8)
    assert named(b"1" * 8) != named(b"2" * 8)


def test_the_same_engine_on_another_host_has_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = identity(tmp_path / "one"), identity(tmp_path / "two")
    assert one.namespace(POOL) == two.namespace(POOL)
    assert one.namespace(POOL).part_bytes == (8192,)
    assert one.namespace(replace(POOL, trailing=1)).trailing == (1,)


def test_a_name_space_of_its_own_shares_nothing(tmp_path: Path) -> None:
    known = identity(tmp_path)
    assert known.namespace(POOL, generation="1").namespace != known.namespace(POOL).namespace


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_path": "nobody/nothing"}, '"revision"'),
        ({"adapters": (Adapter("a", "nobody/adapter"),)}, "LoRA adapter a"),
        ({"scales_file": "/nowhere/scales.json"}, "KV scales"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    facts = replace(ENGINE, **{"model_path": str(checkpoint(tmp_path / "model")), **changed})
    with pytest.raises(MisconfiguredError) as refused:
        Identity(BackendSettings(socket=Path("/s")), facts)
    assert said in str(refused.value)


def test_a_stated_revision_names_weights_that_are_not_here() -> None:
    facts = replace(ENGINE, model_path="org/model")
    names = {
        Identity(BackendSettings(socket=Path("/s"), revision=revision), facts).namespace(POOL).namespace
        for revision in ("a" * 40, "b" * 40)
    }
    assert len(names) == 2
