"""What a worker finds out about its own KV memory, for the namespace."""

import platform
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.engines.vllm.layout import BlockLayout
from kvferry.engines.vllm.messages import WorkerFacts
from kvferry.errors import KvferryError, MisconfiguredError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AUTO = "auto"
INTRODUCTION_WAIT_S = 5.0


def worker_facts(
    config: "VllmConfig", layout: BlockLayout, *, device: str, layers: Sequence[str]
) -> WorkerFacts:
    """Raises MisconfiguredError where something that changes the bytes cannot be determined."""
    from vllm.distributed.parallel_state import get_tp_group

    modules = [config.compilation_config.static_forward_context[name] for name in layers]
    backend = sorted({module.get_attn_backend().get_name() for module in modules})
    order = config.cache_config.get_resolved_kv_cache_layout().name
    return WorkerFacts(
        tensor_rank=int(get_tp_group().rank_in_group),
        block_bytes=layout.block_bytes,
        layout=f"{'+'.join(backend)}/{order}/{layout.signature}",
        packing=_cpu_packing(config, modules) if device == "cpu" else "none",
        device=device,
        layers=tuple(layers),
        scales=_scales(config, layers, modules),
    )


def gathered_facts(said: Sequence[object], *, ranks: int) -> list[WorkerFacts]:
    """Every rank's facts, in rank order. Raises KvferryError where a rank has none, or a problem."""
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
        return sorted(self._heard, key=lambda fact: fact.tensor_rank)

    def end(self) -> None:
        """Known, or refused: nothing is waited for any more."""
        self._over = True


def _cpu_packing(config: "VllmConfig", modules: Sequence[Any]) -> str:
    """The instruction set that decides how CPU kernels pack elements inside a block."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kinds = {
        _get_attn_isa(
            config.model_config.dtype,
            config.cache_config.block_size,
            module.head_size,
            config.cache_config.cache_dtype,
        )
        for module in modules
    }
    machine, vectors = platform.machine(), "any"
    if machine == "x86_64":
        vectors = "avx512" if torch.cpu._is_avx512_supported() else "avx2"
    return f"{'+'.join(sorted(kinds))}/{machine}/{vectors}"


def _scales(
    config: "VllmConfig", layers: Sequence[str], modules: Sequence[Any]
) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The scales' values of quantised KV; none where KV is stored as computed."""
    if config.cache_config.cache_dtype in (_AUTO, "bfloat16", "float16", "float32"):
        return ()
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise MisconfiguredError(
            "KV scales are computed from the first request (calculate_kv_scales), so they differ between "
            "engines: use a checkpoint with calibrated scales"
        )
    found: list[tuple[str, tuple[float, ...]]] = []
    for name, module in zip(layers, modules, strict=True):
        for kind in ("k", "v"):
            scale = getattr(module, f"_{kind}_scale", None)
            if scale is None:
                raise MisconfiguredError(f"{name}: quantised KV without a {kind} scale that can be read")
            found.append((f"{name}.{kind}", tuple(float(value) for value in scale.flatten().tolist())))
    return tuple(found)
