"""What a worker finds out about its own KV memory, for the namespace."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.engines.vllm.groups import kv_groups, kv_heads, layer_specs, surely_equal_heads
from kvferry.engines.vllm.layout import BlockLayout
from kvferry.engines.vllm.messages import GroupFacts, WorkerFacts
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.identity.geometry import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_AUTO = "auto"
INTRODUCTION_WAIT_S = 5.0


def worker_facts(
    config: "VllmConfig",
    kv_cache: "KVCacheConfig",
    *,
    layouts: Sequence[BlockLayout | None],
    layers: Sequence[Sequence[str]],
    device: str,
) -> WorkerFacts:
    """layouts, layers: by KV group; None and empty where this rank's stage has none of its layers.

    Raises MisconfiguredError where something that changes the bytes cannot be determined.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stage, ranks = get_pp_group(), get_tp_group()
    context = config.compilation_config.static_forward_context
    kinds = kv_groups(kv_cache)
    specs = layer_specs(kv_cache)
    attention = [
        (name, kind.block_tokens)
        for names, kind in zip(layers, kinds, strict=True)
        if kind.kind is not GroupKind.STATE
        for name in names
    ]
    return WorkerFacts(
        rank=int(stage.rank_in_group * ranks.world_size + ranks.rank_in_group),
        pipeline_rank=int(stage.rank_in_group),
        groups=tuple(
            GroupFacts(
                tuple(names),
                layout.block_bytes if layout is not None else 0,
                _layout(config, [context[name] for name in names], layout, spec[0]) if layout else "",
                _kv_heads(config, spec),
            )
            for names, layout, spec in zip(layers, layouts, specs, strict=True)
        ),
        packing=_cpu_packing(config, [(context[name], tokens) for name, tokens in attention])
        if device == "cpu"
        else "none",
        device=device,
        scales=_scales(config, {name: context[name] for name, _ in attention}),
    )


def _layout(config: "VllmConfig", modules: Sequence[Any], layout: BlockLayout, spec: Any) -> str:
    """Backends, the order that was resolved, shapes; of states what their elements are, too."""
    backend = "+".join(sorted({module.get_attn_backend().get_name() for module in modules}))
    order = config.cache_config.get_resolved_kv_cache_layout().name
    text = f"{backend}/{order}/{layout.signature}"
    dtypes = getattr(spec, "dtypes", None)
    if dtypes is None:
        return text
    kinds = ",".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{text}/{spec.mamba_type}/{kinds}"


def _kv_heads(config: "VllmConfig", specs: Sequence[Any]) -> int:
    model, ranks = config.model_config, int(config.parallel_config.tensor_parallel_size)
    if not any(hasattr(spec, "num_kv_heads") for spec in specs):
        return kv_heads(specs, total_heads=0, ranks=ranks)
    total = int(model.get_total_num_kv_heads())
    drafts = getattr(config.speculative_config, "draft_model_config", None)
    named = [model.hf_text_config.to_dict(), drafts.hf_text_config.to_dict() if drafts is not None else {}]
    surely = surely_equal_heads(named, total_heads=total, ranks=ranks)
    return kv_heads(specs, total_heads=surely, ranks=ranks)


def gathered_facts(said: Sequence[object], *, ranks: int) -> list[WorkerFacts]:
    """Every rank's facts, stage by stage. Raises KvferryError where a rank has none, or a problem."""
    facts = [one for one in said if isinstance(one, WorkerFacts)]
    for fact in facts:
        if fact.problem:
            raise KvferryError(fact.problem)
    if len(facts) != ranks:
        raise KvferryError(f"{len(facts)} of {ranks} workers described their KV memory")
    return facts


class Introductions:
    """Facts that come with the workers' first reports.

    vLLM's MultiConnector passes on one connector's handshake, the first that has one: where that is another
    connector's, the engine's first step says what the handshake did not.
    """

    def __init__(self, *, ranks: int) -> None:
        self._ranks = ranks
        self._heard: dict[WorkerFacts, None] = {}
        self._give_up_at: float | None = None
        self._over = False

    def pending(self, *, now: float) -> bool:
        """Whether a request should wait for them: from the first that asks on, and not for long."""
        if self._give_up_at is None:
            self._give_up_at = now + INTRODUCTION_WAIT_S
        return not self._over and now < self._give_up_at

    def hear(self, facts: Iterable[WorkerFacts]) -> list[WorkerFacts] | None:
        """Every rank's, once, in rank order, as soon as they are complete or one says what is wrong."""
        if self._over:
            return None
        self._heard.update(dict.fromkeys(facts))
        if len(self._heard) < self._ranks and not any(fact.problem for fact in self._heard):
            return None
        self.end()
        return sorted(self._heard, key=lambda fact: fact.rank)

    def end(self) -> None:
        """Known, or refused: nothing is waited for any more."""
        self._over = True


def _cpu_packing(config: "VllmConfig", attention: Sequence[tuple[Any, int]]) -> str:
    """The instruction set that decides how CPU kernels pack elements inside a block.

    attention: its modules, and the tokens of their blocks.
    """
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
    kinds = {_get_attn_isa(dtype, tokens, module.head_size, cache_dtype) for module, tokens in attention}
    machine, vectors = platform.machine(), "any"
    if machine == "x86_64":
        vectors = "avx512" if torch.cpu._is_avx512_supported() else "avx2"
    return f"{'+'.join(sorted(kinds))}/{machine}/{vectors}"


def _scales(config: "VllmConfig", attention: Mapping[str, Any]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The scales' values of quantised KV; none where KV is stored as computed."""
    if config.cache_config.cache_dtype in (_AUTO, "bfloat16", "float16", "float32"):
        return ()
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise MisconfiguredError(
            "KV scales are computed from the first request (calculate_kv_scales), so they differ between "
            "engines: use a checkpoint with calibrated scales"
        )
    found: list[tuple[str, tuple[float, ...]]] = []
    for name, module in attention.items():
        for kind in ("k", "v"):
            scale = getattr(module, f"_{kind}_scale", None)
            if scale is None:
                raise MisconfiguredError(f"{name}: quantised KV without a {kind} scale that can be read")
            found.append((f"{name}.{kind}", tuple(float(value) for value in scale.flatten().tolist())))
    return tuple(found)
