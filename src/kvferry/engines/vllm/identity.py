"""Names what a vLLM engine's KV depends on: the namespace, each rank's part, a request's extras."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.client.messages import NamespaceInfo
from kvferry.engines.checkpoints import local_directory
from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm.companions import draft_settings, encoder_settings
from kvferry.engines.vllm.groups import kv_groups
from kvferry.engines.vllm.messages import Assignment, GroupFacts, WorkerFacts, WorkerPart
from kvferry.engines.vllm.settings import ConnectorSettings
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import Device, Geometry, GroupKind, KvGroup, default_chunk_tokens
from kvferry.identity.namespace import KvScale, NamespaceSpec, Setting, fingerprint
from kvferry.identity.weights import model_fingerprint, revision_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ENGINE = "vllm"
# Raised when a supported vLLM release changes the bytes of a block that `layout` and `packing` do not show.
ENGINE_FORMAT = "0.32"
_AUTO = "auto"
MAX_ADAPTERS = 4096


def chunk_geometry(
    groups: Sequence[KvGroup], settings: ConnectorSettings, *, device: str, drafts: bool = False
) -> ChunkGeometry:
    """Blocks and chunks. Raises MisconfiguredError for chunk_tokens that do not fit the block sizes.

    An engine keeps recurrent state at the last block boundary of a prompt: chunks of several blocks, whose
    ends that seldom is, would leave most prompts without. So with such a group a chunk is one block.
    """
    block_tokens = math.lcm(*(group.block_tokens for group in groups))
    kind = Device.CPU if device == "cpu" else Device.GPU
    default = default_chunk_tokens(block_tokens, kind)
    if any(group.kind is GroupKind.STATE for group in groups):
        default = block_tokens
    chunk_tokens = settings.chunk_tokens or default
    return ChunkGeometry(block_tokens, chunk_tokens, tuple(groups), drafts)


def engine_geometry(
    config: "VllmConfig", kv_cache: "KVCacheConfig", settings: ConnectorSettings
) -> ChunkGeometry:
    """Of an engine that can be served."""
    return chunk_geometry(
        kv_groups(kv_cache),
        settings,
        device=config.device_config.device_type,
        drafts=any(group.is_eagle_group for group in kv_cache.kv_cache_groups),
    )


def assign(
    config: "VllmConfig",
    settings: ConnectorSettings,
    *,
    key: DomainKey,
    facts: Sequence[WorkerFacts],
    chunks: ChunkGeometry,
) -> Assignment:
    """What every worker is told. facts: of each rank, in rank order; those of a stage must agree.

    Raises MisconfiguredError where something that changes the bytes cannot be determined.
    """
    tensor_ranks = int(config.parallel_config.tensor_parallel_size)
    stages = [_agreeing(facts[at : at + tensor_ranks]) for at in range(0, len(facts), tensor_ranks)]
    _agreeing_stages(stages)
    geometry = Geometry(
        groups=tuple(
            replace(
                group,
                stages=tuple(stage.groups[at].layers for stage in stages),
                block_bytes=tuple(stage.groups[at].block_bytes for stage in stages),
                kv_heads=_kv_heads([stage.groups[at] for stage in stages]),
            )
            for at, group in enumerate(chunks.groups)
        ),
        chunk_tokens=chunks.chunk_tokens,
        tensor_ranks=tensor_ranks,
        pipeline_ranks=len(stages),
    )
    spec = namespace_spec(config, settings, key=key, stages=stages, geometry=geometry)
    label = f"{spec.model} {spec.kv_dtype} tp{tensor_ranks}" + (f" pp{len(stages)}" if stages[1:] else "")
    return Assignment(
        socket=str(settings.socket),
        engine=engine_label(config),
        namespace=NamespaceInfo(
            namespace=fingerprint(spec),
            part_bytes=geometry.part_bytes,
            chunk_tokens=chunks.chunk_tokens,
            domain=settings.domain,
            label=label,
            trailing=geometry.trailing if any(geometry.trailing) else (),
            cache_tokens=_cache_tokens(config),
        ),
        parts=rank_parts(geometry),
    )


def _cache_tokens(config: "VllmConfig") -> int:
    """What the engine's own cache holds at most; 0 where that is not known yet."""
    cache = config.cache_config
    blocks = int(getattr(cache, "num_gpu_blocks", None) or 0)
    return blocks * int(getattr(cache, "block_size", None) or 0)


def rank_parts(geometry: Geometry) -> tuple[tuple[WorkerPart | None, ...], ...]:
    """By rank, stage by stage, then by group: the part that the rank holds; None where it has no layers."""
    ranks = [
        (stage, rank) for stage in range(geometry.pipeline_ranks) for rank in range(geometry.tensor_ranks)
    ]
    held = [
        [geometry.part(group, tensor_rank=rank, pipeline_rank=stage) for group in range(len(geometry.groups))]
        for stage, rank in ranks
    ]
    holders = Counter(part for parts in held for part in parts)
    return tuple(
        tuple(WorkerPart(part, holders[part]) if geometry.part_bytes[part] else None for part in parts)
        for parts in held
    )


def _agreeing(facts: Sequence[WorkerFacts]) -> WorkerFacts:
    """Of one stage."""
    head = facts[0]
    for other in facts:
        if (other.groups, other.packing, other.device) != (head.groups, head.packing, head.device):
            raise MisconfiguredError(
                f"tensor-parallel ranks {head.rank} and {other.rank} keep KV differently: "
                f"{layout_text([head])} and {layout_text([other])}"
            )
    return head


def _agreeing_stages(stages: Sequence[WorkerFacts]) -> None:
    for number, other in enumerate(stages):
        if other.pipeline_rank != number:
            raise MisconfiguredError(f"rank {other.rank} describes stage {other.pipeline_rank}, not {number}")
        if (other.packing, other.device) != (stages[0].packing, stages[0].device):
            raise MisconfiguredError(
                f"pipeline stages 0 and {number} keep KV differently: {stages[0].packing} and {other.packing}"
            )


def _kv_heads(stages: Sequence[GroupFacts]) -> int:
    """Where stages have layers of unlike heads, every rank keeps a part of its own."""
    found = {group.kv_heads for group in stages if group.layers}
    return found.pop() if len(found) == 1 else 0


def layout_text(stages: Sequence[WorkerFacts]) -> str:
    """Of every group of every stage, as it enters the namespace."""
    return " | ".join(" & ".join(group.layout for group in stage.groups) for stage in stages)


def namespace_spec(
    config: "VllmConfig",
    settings: ConnectorSettings,
    *,
    key: DomainKey,
    stages: Sequence[WorkerFacts],
    geometry: Geometry,
) -> NamespaceSpec:
    """Everything that must be equal for another engine to use the bytes. stages: one rank's facts of each."""
    model = config.model_config
    compute = str(model.dtype).removeprefix("torch.")
    kv_dtype = str(config.cache_config.cache_dtype)
    return NamespaceSpec(
        domain=settings.domain,
        domain_key_id=key.key_id,
        model=settings.model_name or _architecture(config),
        weights=weights_fingerprint(config, settings),
        weights_generation=0,
        compute_dtype=compute,
        kv_dtype=compute if kv_dtype == _AUTO else kv_dtype,
        kv_scales=tuple(KvScale(name, values) for stage in stages for name, values in stage.scales),
        engine=ENGINE,
        engine_format=ENGINE_FORMAT,
        layout=layout_text(stages),
        packing=stages[0].packing,
        geometry=geometry,
        settings=_overrides(config),
    )


def _architecture(config: "VllmConfig") -> str:
    architectures = getattr(config.model_config.hf_config, "architectures", None) or ()
    return str(architectures[0]) if architectures else str(config.model_config.hf_config.model_type)


def _overrides(config: "VllmConfig") -> tuple[Setting, ...]:
    model = config.model_config
    found = [Setting("quantization", str(model.quantization or "none"))]
    overrides = model.hf_overrides
    if callable(overrides):
        raise MisconfiguredError(
            "hf_overrides is a function: what it changes cannot be named; use a dictionary"
        )
    if overrides:
        found.append(Setting("hf_overrides", json.dumps(overrides, sort_keys=True, default=str)))
    if str(getattr(config.load_config, "load_format", "auto")) == "dummy":
        found.append(Setting("load_format", "dummy"))  # random weights under a real model's name
    other = model.hf_config_path
    if other and str(other) != str(model.model):
        found.append(Setting("hf_config", hashlib.sha256(_config_text(model).encode()).hexdigest()))
    if _depends_on_length(model):
        found.append(Setting("max_model_len", str(model.max_model_len)))
    return (*found, *encoder_settings(config), *draft_settings(config))


def _config_text(model: Any) -> str:
    return str(model.hf_config.to_json_string(use_diff=False))


def _depends_on_length(model: Any) -> bool:
    """Whether the longest sequence that an engine allows changes how it computes every token.

    LongRoPE takes its long factors where max_model_len exceeds the length the model was trained for;
    Llama 4 scales its queries where it exceeds 32,768.
    """
    texts = [str(getattr(model.hf_text_config, name, "")) for name in ("rope_parameters", "rope_scaling")]
    return any("longrope" in text for text in texts) or "llama4" in str(model.hf_text_config.model_type)


def weights_fingerprint(config: "VllmConfig", settings: ConnectorSettings) -> bytes:
    """Of the directory the engine loads from; of the stated revision where there is none."""
    model = config.model_config
    directory = local_directory(str(model.model), revision=model.revision)
    if directory is not None:
        return model_fingerprint(directory)
    if settings.revision is not None:
        return revision_fingerprint(settings.model_name or str(model.model), settings.revision)
    raise MisconfiguredError(
        f"the weights of {model.model} are in no local directory, so they cannot be told from others: "
        'give "revision" (the full commit hash) in kv_connector_extra_config'
    )


def engine_label(config: "VllmConfig") -> str:
    """Names this engine to people: served model, the engine's id, data-parallel rank."""
    name = config.model_config.served_model_name
    served = name[0] if isinstance(name, list) else name
    transfer, rank = config.kv_transfer_config, config.parallel_config.data_parallel_index
    number = str(transfer.engine_id)[:8] if transfer is not None else "0"
    return f"vllm:{Path(str(served or config.model_config.model)).name}:{number}/{rank}"


Stamp = tuple[tuple[str, int, int, int, int], ...]  # name, size, inode, times of content and of inode


@dataclass(frozen=True, slots=True)
class _Adapter:
    stamp: Stamp
    digest: "Future[bytes]"


class AdapterDigests:
    """Content digests of LoRA adapters, computed off the scheduler's thread and kept.

    A path whose files change is refused from then on, whatever the adapter is called: the engine may still
    serve the old weights, and its own prefix cache, which knows adapters by name and path, still holds what
    they computed. None of it must be stored under the new ones' digest.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Adapter] = {}
        self._changed: set[str] = set()
        self._replaced: set[int] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvferry-adapters")

    def digest(self, lora: Any) -> "Future[bytes] | None":
        """None for an adapter that cannot be named. A failed future counts the same."""
        path = str(lora.lora_path)
        if lora.load_inplace:  # under the engine's number for it, which other paths may have had before
            self._changed.add(path)
            self._replaced.add(int(lora.lora_int_id))
        if path in self._changed or lora.lora_int_id in self._replaced:
            return None
        stamp = _stamp(Path(path))
        known = self._known.get(path)
        if known is None:
            if not stamp or len(self._known) >= MAX_ADAPTERS:
                return None
            known = _Adapter(stamp, self._pool.submit(_unchanged_fingerprint, Path(path), stamp))
            self._known[path] = known
        elif known.stamp != stamp:
            self._changed.add(path)
            return None
        return known.digest

    def unchanged(self, lora: Any) -> bool:
        """Whether what it computes may still be stored. Whoever replaces it writes its files first."""
        known = self._known.get(str(lora.lora_path))
        return known is not None and self.digest(lora) is known.digest

    def close(self) -> None:
        """Stop the thread; a digest being computed is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _unchanged_fingerprint(directory: Path, stamp: Stamp) -> bytes:
    """Raises RefusedError when files changed while they were read."""
    digest = model_fingerprint(directory)
    if _stamp(directory) != stamp:
        raise RefusedError(f"{directory} changed while it was read")
    return digest


def _stamp(directory: Path) -> Stamp:
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(directory) if entry.is_file()]
    except OSError:
        return ()
    return tuple(
        sorted((name, at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns) for name, at in entries)
    )


def adapter_extra(digest: bytes | None, generation: bytes) -> bytes | None:
    """The adapter's digest as it enters the chunk chain.

    generation: empty, or random bytes drawn when the engine's weights were changed while it ran: what it
    computes from then on is kept apart from everything stored before, by itself and by others.
    """
    if not generation:
        return digest
    return hashlib.blake2b((digest or b"") + generation, digest_size=32, person=b"kvferry-gen").digest()
