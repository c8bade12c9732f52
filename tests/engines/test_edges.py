"""The connector's edges: the guard, pinned blocks, settings, versions, identity."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.planning import Eligibility
from kvferry.engines.vllm.announced import Announced
from kvferry.engines.vllm.compat import check_transfer_config, check_version, unsupported_by_config
from kvferry.engines.vllm.guard import Guard, guarded
from kvferry.engines.vllm.identity import AdapterDigests, assign, chunk_geometry
from kvferry.engines.vllm.messages import LoadResult, SaveResult, WorkerFacts, WorkerReport
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import UNKNOWN, PrefillWatch
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.settings import ConnectorSettings, parse_settings
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.domain import DomainKey
from kvferry.testing.fake_engine import BlockPool, FakeRequest


class Hooked:
    """Something with guarded hooks."""

    def __init__(self) -> None:
        self.guard = Guard("test")
        self.calls = 0

    @guarded(lambda self, number: -number)
    def hook(self, number: int) -> int:
        self.calls += 1
        if number == 13:
            raise BrokenError("thirteen")
        return number


def test_a_hook_that_raises_answers_with_its_fallback_and_stays_off() -> None:
    hooked = Hooked()
    assert [hooked.hook(n) for n in (1, 13, 2)] == [1, -13, -2]
    assert (hooked.calls, hooked.guard.errors) == (2, 1)


def test_a_forked_copy_is_off_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = Hooked()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert hooked.hook(1) == -1
    assert hooked.calls == 0


def test_pinned_blocks_return_once_every_rank_has_reported() -> None:
    pool, pins = BlockPool(8), Pins(ranks=2)
    pins.bind(pool)
    pins.pin(1, [2, 3])
    assert (pins.pending, len(pool.free)) == (1, 6)
    assert not pins.reported(1)
    assert pins.reported(1)
    assert not pins.reported(1)
    assert (pins.pending, len(pool.free)) == (0, 8)


def test_an_announced_load_is_handed_out_once() -> None:
    announced = Announced()
    announced.add("a", [1, 2])
    announced.add("b", [3])
    announced.sent("a")
    assert announced.take() == (("b", (3,)),)
    assert announced.take() == ()


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport([LoadResult("a", 1, 2, 3.0, "complete")], [], [4])
    two = WorkerReport([], [SaveResult(5, (), 0, 0)], [4])
    both = one.aggregate(two)
    assert (len(both.loads), len(both.saves), both.steps) == (1, 1, [4, 4])
    with pytest.raises(BrokenError):
        one.aggregate(object())


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"sockets": "/x"}, "did you mean socket"),
        ({"chunk_tokens": "256"}, "'256'"),
        ({"chunk_tokens": 0}, "0"),
        ({"chunk_tokens": True}, "True"),
        ({"deadline_cap_ms": -1}, "-1"),
        ({"socket": 5}, "5"),
        ({"domain": ""}, "domain"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_value(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(MisconfiguredError, match=word) as caught:
        parse_settings(extra, environ={})
    assert "\n" not in str(caught.value)


def test_settings_have_defaults() -> None:
    found = parse_settings({}, environ={"KVFERRY_SOCKET": "/s"})
    assert found == ConnectorSettings(socket=Path("/s"))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5", "0.32.0+cpu", "0.32.1.dev3"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "unknown", ""])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(MisconfiguredError, match=r">=0\.32,<0\.33"):
        check_version(version)


@pytest.mark.parametrize(("policy", "role"), [("fail", "kv_both"), ("recompute", "kv_producer")])
def test_settings_that_could_lose_requests_are_refused(policy: str, role: str) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy, kv_role=role)
    with pytest.raises(MisconfiguredError, match="--kv-transfer-config"):
        check_transfer_config(SimpleNamespace(kv_transfer_config=transfer))  # type: ignore[arg-type]


def model_directory(root: Path, *, seed: int = 0) -> Path:
    """The least that counts as a model or adapter."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    data = bytes((seed + i) % 256 for i in range(64))
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return root


def config(model: Path, **changes: Any) -> Any:
    """The fields of VllmConfig that name KV."""
    fields: dict[str, Any] = {
        "dtype": "torch.bfloat16",
        "cache_dtype": "auto",
        "block": 128,
        "ranks": 1,
        "heads": 4,
        "overrides": {},
        "quantization": None,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=fields["dtype"],
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"),
            quantization=fields["quantization"],
            hf_overrides=fields["overrides"],
            served_model_name="m",
            get_total_num_kv_heads=lambda: fields["heads"],
            is_encoder_decoder=False,
            runner_type="generate",
        ),
        cache_config=SimpleNamespace(
            block_size=fields["block"], cache_dtype=fields["cache_dtype"], enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=fields["ranks"], data_parallel_index=0, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1, nnodes=1,
        ),
        kv_transfer_config=SimpleNamespace(engine_id="0123456789"),
        speculative_config=None,
    )  # fmt: skip


def facts(rank: int = 0, **changes: Any) -> WorkerFacts:
    """What a worker says."""
    fields: dict[str, Any] = {"block_bytes": 4096, "layout": "X/LBHNC/1", "packing": "vec", "scales": ()}
    return WorkerFacts(rank, device="cpu", layers=("l0", "l1"), **(fields | changes))


SETTINGS = ConnectorSettings(socket=Path("/s"))
KEY = DomainKey.default("default")


def namespace(model: Path, settings: ConnectorSettings = SETTINGS, **changes: Any) -> bytes:
    """Of one rank."""
    worker = {name: changes.pop(name) for name in ("layout", "packing", "scales") if name in changes}
    found = assign(config(model, **changes), settings, key=KEY, facts=[facts(**worker)])
    return found.namespace.namespace


def test_everything_that_changes_the_bytes_changes_the_namespace(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    found = [
        namespace(model),
        namespace(model_directory(tmp_path / "other", seed=1)),
        namespace(model, dtype="torch.float16"),
        namespace(model, cache_dtype="fp8_e4m3", scales=(("l0.k", (1.0,)),)),
        namespace(model, cache_dtype="fp8_e4m3", scales=(("l0.k", (0.5,)),)),
        namespace(model, block=64),
        namespace(model, overrides={"rope_theta": 1}),
        namespace(model, quantization="fp8"),
        namespace(model, layout="X/LBNHC/1"),
        namespace(model, packing="amx"),
        namespace(model, ConnectorSettings(socket=Path("/s"), chunk_tokens=256)),
        namespace(model, ConnectorSettings(socket=Path("/s"), domain="other")),
    ]
    assert len(set(found)) == len(found)


def test_equal_copies_of_a_model_share_whatever_their_paths(tmp_path: Path) -> None:
    first, second = model_directory(tmp_path / "here"), model_directory(tmp_path / "there" / "deep")
    assert namespace(first) == namespace(second, ConnectorSettings(socket=Path("/elsewhere")))


def test_ranks_hold_parts_of_their_own_unless_they_share_heads(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    apart = assign(config(model, ranks=2), SETTINGS, key=KEY, facts=[facts(0), facts(1)])
    assert [tuple(part) for part in apart.parts] == [(0, 1), (1, 1)]
    same = assign(config(model, ranks=2, heads=1), SETTINGS, key=KEY, facts=[facts(0), facts(1)])
    assert [tuple(part) for part in same.parts] == [(0, 2), (0, 2)]


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    with pytest.raises(MisconfiguredError, match="differently"):
        assign(config(model, ranks=2), SETTINGS, key=KEY, facts=[facts(0), facts(1, packing="amx")])


def test_weights_that_cannot_be_read_are_refused_unless_their_revision_is_given(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(MisconfiguredError, match="revision"):
        namespace(missing)
    told = ConnectorSettings(socket=Path("/s"), model_name="org/model", revision="a" * 40)
    assert namespace(missing, told) != namespace(model_directory(tmp_path / "m"))


def test_chunk_tokens_must_fit_the_block_size(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="200"):
        chunk_geometry(config(tmp_path), ConnectorSettings(socket=Path("/s"), chunk_tokens=200), device="cpu")
    assert chunk_geometry(config(tmp_path), SETTINGS, device="cpu").chunk_tokens == 128
    assert chunk_geometry(config(tmp_path, block=16), SETTINGS, device="cuda").chunk_tokens == 256
    assert chunk_geometry(config(tmp_path, block=48), SETTINGS, device="cuda").chunk_tokens == 288


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config.nnodes", 2, "2 hosts"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.runner_type", "pooling", "pooling"),
        ("cache_config.enable_prefix_caching", False, "prefix caching"),
        ("speculative_config", SimpleNamespace(method="eagle"), "eagle"),
    ],
)
def test_what_is_not_served_yet_has_a_reason(tmp_path: Path, path: str, value: Any, word: str) -> None:
    changed = config(tmp_path)
    assert unsupported_by_config(changed) is None
    *parents, name = path.split(".")
    owner = changed
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)
    reason = unsupported_by_config(changed)
    assert reason is not None
    assert word in reason


@pytest.fixture
def adapters() -> Iterator[AdapterDigests]:
    found = AdapterDigests()
    yield found
    found.close()


def lora(path: Path, **changes: Any) -> Any:
    """A LoRARequest."""
    fields = {"lora_name": "x", "lora_int_id": 1, "load_inplace": False} | changes
    return SimpleNamespace(lora_path=str(path), **fields)


def test_an_adapter_is_named_by_its_content(tmp_path: Path, adapters: AdapterDigests) -> None:
    first, copy = model_directory(tmp_path / "1", seed=1), model_directory(tmp_path / "copy", seed=1)
    other = model_directory(tmp_path / "2", seed=2)

    def digest(path: Path, name: str) -> bytes:
        future = adapters.digest(lora(path, lora_name=name))
        assert isinstance(future, Future)
        return future.result(10)

    assert digest(first, "a") == digest(copy, "b") != digest(other, "a")


def test_an_adapter_that_changes_under_its_name_is_refused(tmp_path: Path, adapters: AdapterDigests) -> None:
    path = model_directory(tmp_path / "1", seed=1)
    assert adapters.digest(lora(path)) is not None
    model_directory(path, seed=2)
    os.utime(path / "model.safetensors", (1, 1))
    assert adapters.digest(lora(path)) is None
    assert adapters.digest(lora(tmp_path / "missing", lora_name="y")) is None
    assert adapters.digest(lora(path, lora_name="z", load_inplace=True)) is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("prompt_embeds", object(), Eligibility.EMBEDS),
        ("pooling_params", object(), Eligibility.POOLING),
        ("mm_features", (object(),), Eligibility.MULTIMODAL),
        ("resumable", True, Eligibility.STREAMING),
        ("cache_salt", "x" * 3000, Eligibility.SALT),
        ("cache_salt", 5, Eligibility.SALT),
        ("cache_salt", "fine", Eligibility.YES),
    ],
)
def test_requests_that_cannot_be_named_take_no_part(
    adapters: AdapterDigests, field: str, value: Any, expected: Eligibility
) -> None:
    admission = Admission(key=KEY, namespace=bytes(16), chunk_tokens=4, adapters=adapters)
    request = FakeRequest("r", [1, 2, 3])
    setattr(request, field, value)
    tracked = admission.admit(request, now=0.0)
    assert tracked.eligibility is expected
    assert (tracked.chain is not None) == (expected is Eligibility.YES)


def test_prefill_is_learnt_from_single_prefills_only() -> None:
    watch = PrefillWatch()
    assert watch.prefill(now=0.0) == UNKNOWN
    assert not watch.planned(1, [(1, 500), (1, 60)], now=1.0)
    assert not watch.planned(2, [(512, 0), (512, 0)], now=1.0)
    for step, tokens in enumerate([128, 256, 512, 1024], start=10):
        assert watch.planned(step, [(tokens, 0), (1, 900)], now=10.0 * step)
        watch.returned(step, now=10.0 * step + tokens / 1000)
        watch.returned(step, now=10.0 * step + tokens)
    watch.prefill(now=1000.0)
    watch.close()
    learnt = watch.prefill(now=1000.5)
    assert learnt.per_token_s == pytest.approx(0.001, rel=0.05)
