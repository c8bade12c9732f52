"""What KV is named by: the model and its settings, the ranks, adapters, what a request brings along."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.planning import ChunkGeometry, Eligibility
from kvferry.engines.vllm.compat import unsupported_by_config
from kvferry.engines.vllm.facts import gathered_facts
from kvferry.engines.vllm.identity import AdapterDigests, assign, chunk_geometry
from kvferry.engines.vllm.messages import GroupFacts, WorkerFacts
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.settings import ConnectorSettings
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import GroupKind, KvGroup
from kvferry.identity.weights import model_fingerprint
from kvferry.testing.fake_engine import FakeRequest


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
        "load_format": "auto",
        "rope": {"rope_type": "default"},
        "max_len": 8192,
        "model_type": "llama",
        "config_path": None,
        "hidden": 64,
    } | changes
    hf_config = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        model_type=fields["model_type"],
        rope_parameters=fields["rope"],
        to_json_string=lambda use_diff: json.dumps({"hidden_size": fields["hidden"]}),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=fields["dtype"],
            hf_config=hf_config,
            hf_text_config=hf_config,
            hf_config_path=fields["config_path"],
            max_model_len=fields["max_len"],
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
        load_config=SimpleNamespace(load_format=fields["load_format"]),
    )  # fmt: skip


def facts(rank: int = 0, **changes: Any) -> WorkerFacts:
    """What a worker says."""
    fields: dict[str, Any] = {"block_bytes": 4096, "layout": "X/LBHNC/1", "heads": 4} | changes
    group = GroupFacts(("l0", "l1"), fields["block_bytes"], fields["layout"], fields["heads"])
    packing, scales = fields.get("packing", "vec"), fields.get("scales", ())
    return WorkerFacts(rank, 0, (group,), packing, "cpu", scales)


def chunks(block: int = 128, settings: ConnectorSettings | None = None) -> ChunkGeometry:
    """Of one group of full attention, on a CPU."""
    full = KvGroup(GroupKind.FULL, block, stages=(), block_bytes=(), kv_heads=1)
    return chunk_geometry([full], settings or SETTINGS, device="cpu")


SETTINGS = ConnectorSettings(socket=Path("/s"))
KEY = DomainKey.default("default")


def namespace(model: Path, settings: ConnectorSettings = SETTINGS, **changes: Any) -> bytes:
    """Of one rank."""
    worker = {name: changes.pop(name) for name in ("layout", "packing", "scales") if name in changes}
    found = assign(
        config(model, **changes),
        settings,
        key=KEY,
        facts=[facts(**worker)],
        chunks=chunks(changes.get("block", 128), settings),
    )
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
        namespace(model, load_format="dummy"),
        namespace(model, config_path="/elsewhere"),
        namespace(model, config_path="/elsewhere", hidden=128),
        namespace(model, rope={"rope_type": "longrope"}),
        namespace(model, rope={"full": {"rope_type": "longrope"}}, max_len=4096),
        namespace(model, model_type="llama4_text", max_len=32769),
    ]
    assert len(set(found)) == len(found)


def test_the_longest_sequence_an_engine_allows_is_no_part_of_other_models_names(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    assert namespace(model) == namespace(model, max_len=4096)


def test_what_turns_items_into_kv_changes_the_namespace(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")

    def named(**changes: Any) -> bytes:
        fields = {
            "mm_encoder_attn_backend": None,
            "mm_device_do_normalize": True,
            "mm_processor_kwargs": None,
        }
        pruning = {"video_pruning_rate": None, "video_pruning_method": "evs"}
        engine = config(model)
        engine.lora_config = SimpleNamespace(enable_tower_connector_lora=changes.pop("tower", False))
        engine.model_config.multimodal_config = SimpleNamespace(**(fields | pruning | changes))
        return assign(engine, SETTINGS, key=KEY, facts=[facts()], chunks=chunks()).namespace.namespace

    changes: list[dict[str, Any]] = [
        {"mm_encoder_attn_backend": "FLASH_ATTN"},
        {"mm_device_do_normalize": False},
        {"mm_processor_kwargs": {"image_mean": [0.5]}},
        {"video_pruning_rate": 0.5},
        {"tower": True},
    ]
    names = {named(), *(named(**change) for change in changes)}
    assert len(names) == 1 + len(changes)
    assert named() != namespace(model)
    assert named() == named()


def test_drafts_that_keep_kv_are_named_by_their_content(tmp_path: Path) -> None:
    model, one = model_directory(tmp_path / "m"), model_directory(tmp_path / "1", seed=1)
    copy, two = model_directory(tmp_path / "copy", seed=1), model_directory(tmp_path / "2", seed=2)

    def named(draft: Path, method: str = "eagle", **changes: Any) -> bytes:
        fields = {"model": str(draft), "revision": None, "dtype": "torch.bfloat16", "quantization": None}
        engine = config(model)
        engine.speculative_config = SimpleNamespace(
            method=method,
            kv_cache_dtype=changes.pop("kv_cache_dtype", None),
            draft_model_config=SimpleNamespace(**(fields | changes)),
        )
        return assign(engine, SETTINGS, key=KEY, facts=[facts()], chunks=chunks()).namespace.namespace

    assert named(one) == named(copy)
    names = {named(one), named(two), named(model, "mtp"), named(one, "draft_model")}
    names |= {
        named(one, quantization="fp8"),
        named(one, dtype="torch.float16"),
        named(one, kv_cache_dtype="fp8"),
    }
    assert len(names) == 7
    assert named(one, "ngram") == named(two, "medusa") == namespace(model)
    with pytest.raises(MisconfiguredError, match="draft weights"):
        named(tmp_path / "elsewhere")


def test_equal_copies_of_a_model_share_whatever_their_paths(tmp_path: Path) -> None:
    first, second = model_directory(tmp_path / "here"), model_directory(tmp_path / "there" / "deep")
    assert namespace(first) == namespace(second, ConnectorSettings(socket=Path("/elsewhere")))


def test_ranks_hold_parts_of_their_own_unless_they_share_heads(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    apart = assign(config(model, ranks=2), SETTINGS, key=KEY, facts=[facts(0), facts(1)], chunks=chunks())
    assert apart.parts == (((0, 1),), ((1, 1),))
    few = [facts(0, heads=1), facts(1, heads=1)]
    same = assign(config(model, ranks=2), SETTINGS, key=KEY, facts=few, chunks=chunks())
    assert same.parts == (((0, 2),), ((0, 2),))


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    with pytest.raises(MisconfiguredError, match="differently"):
        assign(
            config(model, ranks=2),
            SETTINGS,
            key=KEY,
            facts=[facts(0), facts(1, packing="amx")],
            chunks=chunks(),
        )


def test_weights_that_cannot_be_read_are_refused_unless_their_revision_is_given(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(MisconfiguredError, match="revision"):
        namespace(missing)
    told = ConnectorSettings(socket=Path("/s"), model_name="org/model", revision="a" * 40)
    assert namespace(missing, told) != namespace(model_directory(tmp_path / "m"))


def test_chunk_tokens_must_fit_the_block_size(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="200"):
        chunks(128, ConnectorSettings(socket=Path("/s"), chunk_tokens=200))
    assert chunks(128).chunk_tokens == 128
    for blocks, tokens in (([16], 256), ([48], 288), ([16, 528], 528), ([32, 48], 288)):
        groups = [KvGroup(GroupKind.FULL, block, stages=(), block_bytes=(), kv_heads=1) for block in blocks]
        assert chunk_geometry(groups, SETTINGS, device="cuda").chunk_tokens == tokens


def test_with_recurrent_state_a_chunk_is_one_block() -> None:
    """The state at a prompt's end is kept at a block's boundary, which a larger chunk would seldom have."""
    groups = [
        KvGroup(kind, block, stages=(), block_bytes=(), kv_heads=0)
        for kind, block in ((GroupKind.FULL, 16), (GroupKind.STATE, 48))
    ]
    assert chunk_geometry(groups, SETTINGS, device="cuda").chunk_tokens == 48
    chosen = ConnectorSettings(socket=Path("/s"), chunk_tokens=96)
    assert chunk_geometry(groups, chosen, device="cuda").chunk_tokens == 96


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.nnodes", 2, "2 hosts"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.runner_type", "pooling", "pooling"),
        ("cache_config.enable_prefix_caching", False, "prefix caching"),
        ("speculative_config", SimpleNamespace(method="dflash"), "dflash"),
        ("model_config.multimodal_config", SimpleNamespace(mm_encoder_attn_dtype="fp8"), "encoder"),
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
    assert adapters.digest(lora(path, lora_name="new", lora_int_id=2)) is None


def test_a_path_that_was_loaded_in_place_is_refused_from_then_on(
    tmp_path: Path, adapters: AdapterDigests
) -> None:
    """The engine's own prefix cache knows it by name and path: what it holds may be of either content."""
    path = model_directory(tmp_path / "1", seed=1)
    assert adapters.digest(lora(path, load_inplace=True)) is None
    assert adapters.digest(lora(path)) is None


def test_an_adapter_replaced_with_the_same_size_and_time_is_noticed(
    tmp_path: Path, adapters: AdapterDigests
) -> None:
    path = model_directory(tmp_path / "1", seed=1)
    before = (path / "model.safetensors").stat()
    assert adapters.digest(lora(path)) is not None
    model_directory(tmp_path / "2", seed=2)
    os.replace(tmp_path / "2" / "model.safetensors", path / "model.safetensors")
    os.utime(path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert adapters.digest(lora(path)) is None


def test_an_adapter_that_changes_while_it_is_read_is_not_named(
    tmp_path: Path, adapters: AdapterDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_directory(tmp_path / "1", seed=1)

    def slow(directory: Path) -> bytes:
        model_directory(path, seed=2)
        return model_fingerprint(directory)

    monkeypatch.setattr("kvferry.engines.vllm.identity.model_fingerprint", slow)
    found = adapters.digest(lora(path))
    assert found is not None
    assert isinstance(found.exception(10), RefusedError)


def test_every_rank_must_describe_its_memory() -> None:
    assert gathered_facts([facts(0), facts(1)], ranks=2) == [facts(0), facts(1)]
    with pytest.raises(KvferryError, match="1 of 2 workers"):
        gathered_facts([facts(0), object()], ranks=2)
    with pytest.raises(KvferryError, match="broken"):
        gathered_facts([facts(0), replace(facts(1), problem="broken")], ranks=2)


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
