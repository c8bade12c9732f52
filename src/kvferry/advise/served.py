"""A model on given GPUs: how many ranks, what is left for KV, and how many tokens that and the host hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kvferry.advise.speed import Compute
from kvferry.errors import MisconfiguredError
from kvferry.models.concurrency import Budget, Weights
from kvferry.models.gpus import Gpu
from kvferry.models.layers import Model, Span
from kvferry.models.precision import kv_dtype
from kvferry.models.reserve import EngineRules
from kvferry.models.sizes import MAX_RANKS, Sizing

FEW_REQUESTS = 4  # of the longest, that a replica should hold at once
CACHES_FP8 = "fp8"


@dataclass(frozen=True)
class Served:
    """A fleet of equal replicas.

    parts: the model's layers by the dtype of their KV, each sized alone. budget: of one GPU. host_bytes: of
    the host's memory that one replica may use for KV. compute: None where speed cannot be told.
    """

    model: Model
    gpu: Gpu
    parts: tuple[Sizing, ...]
    budget: Budget
    weights: Weights
    replicas: int
    gpus_per_host: int
    host_bytes: int
    compute: Compute | None

    @property
    def tensor(self) -> int:
        """Ranks of a replica."""
        return self.budget.ranks

    @property
    def gpus(self) -> int:
        """Of the fleet."""
        return self.tensor * self.replicas

    @property
    def hosts(self) -> int:
        """That the replicas fill."""
        return math.ceil(self.gpus / self.gpus_per_host)

    @property
    def replicas_per_host(self) -> int:
        """At most; an engine over several hosts counts as one on each."""
        return max(1, self.gpus_per_host // self.tensor)

    @property
    def on_host(self) -> int:
        """Replicas that share a host, where it is full."""
        return min(self.replicas, self.replicas_per_host)

    def copy_bytes(self, tokens: float) -> int:
        """KV of a prefix of so many tokens, once: what a shared tier stores."""
        requests = [part.request(max(1, round(tokens))) for part in self.parts]
        return sum(request.kv + request.state for request in requests)

    def gpu_bytes(self, tokens: float) -> int:
        """What the fullest GPU reads of a request in a decode step."""
        return sum(part.request(max(1, round(tokens))).gpu_live for part in self.parts)

    def reserved_bytes(self, tokens: float) -> int:
        """What an engine takes for a request on one GPU."""
        return sum(part.request(max(1, round(tokens))).gpu_reserved for part in self.parts)

    def in_flight(self, tokens: float) -> int:
        """Requests of so many tokens that one replica holds."""
        return self.budget.kv_bytes // max(1, self.reserved_bytes(tokens))

    def gpu_tokens(self, tokens: float) -> float:
        """Tokens that one replica's GPUs hold, in prefixes of ``tokens``."""
        return self.budget.kv_bytes / max(1, self.reserved_bytes(tokens)) * tokens

    def rank_bytes(self, tokens: float) -> int:
        """KV of a prefix on the fullest GPU: the whole of it where ranks repeat what they cannot split."""
        return self.gpu_bytes(tokens)

    def offloaded_bytes(self, tokens: float) -> int:
        """What vLLM's own offloading takes of a host: every rank's part, but latents once.

        Heads that are fewer than the ranks lie there as often as on the GPUs.
        """
        if self.latent:
            return self.copy_bytes(tokens)
        return max(self.copy_bytes(tokens), self.rank_bytes(tokens) * self.tensor)

    def host_tokens(self, tokens: float) -> float:
        """What the host memory of one replica holds, with vLLM's own offloading."""
        return self.host_bytes / max(1, self.offloaded_bytes(tokens)) * tokens

    def pool_tokens(self, tokens: float) -> float:
        """The same in a pool of ours, which keeps everything once."""
        return self.host_bytes / max(1, self.copy_bytes(tokens)) * tokens

    @cached_property
    def latent(self) -> bool:
        """Whether all that is kept are latents, which every rank has whole."""
        return all(layer.latent is not None for layer in self.model.layers if layer.keeps)

    @cached_property
    def windows(self) -> bool:
        """Whether some layers keep a window only, and others more."""
        return windowed(self.model)

    @cached_property
    def one_group(self) -> bool:
        """Whether all layers are of full attention, so that engines keep them as one group of blocks."""
        return all(layer.span is Span.FULL for layer in self.model.layers if layer.keeps)

    @cached_property
    def compressed(self) -> bool:
        """Whether attention compresses what it keeps, which no shared tier of ours takes."""
        return any(layer.every > 1 for layer in self.model.layers)


def windowed(model: Model) -> bool:
    """Whether some layers keep a window only, and others more; of attention that compresses, it is apart."""
    kept = [layer for layer in model.layers if layer.keeps]
    windows = [layer for layer in kept if layer.span is Span.WINDOW]
    return 0 < len(windows) < len(kept) and all(layer.every == 1 for layer in kept)


def sizings(model: Model, dtype: str, tensor: int, rules: EngineRules) -> tuple[Sizing, ...]:
    """With fp8 KV, layers with a window stay 16-bit: they are sized apart."""
    if dtype == CACHES_FP8 and any(layer.latent and layer.index for layer in model.layers):
        return (Sizing(model, kv_dtype("fp8_ds_mla"), tensor, 1, rules),)
    if dtype != CACHES_FP8 or not windowed(model):
        return (Sizing(model, kv_dtype(dtype), tensor, 1, rules),)
    bounded = tuple(layer for layer in model.layers if layer.span is Span.WINDOW)
    others = tuple(layer for layer in model.layers if layer.span is not Span.WINDOW)
    # Alone, they are layers of their own: none lies beside another, and none reads another's KV.
    apart = [
        tuple(replace(layer, beside=False, shares_layer=None) for layer in part) for part in (others, bounded)
    ]
    return tuple(
        Sizing(replace(model, layers=layers), kv_dtype(name), tensor, 1, rules)
        for layers, name in zip(apart, (dtype, "bf16"), strict=True)
    )


def choose_tensor(
    model: Model,
    dtype: str,
    rules: EngineRules,
    *,
    most: int,
    tokens: float,
    budgets: Mapping[int, Budget | None],
) -> tuple[int, str]:
    """The fewest ranks that hold the weights and a few of the longest requests, and why.

    budgets: by ranks; None where the model does not fit. Raises MisconfiguredError where none does.
    """
    best: tuple[int, int] | None = None
    fitting = [ranks for ranks, budget in sorted(budgets.items()) if budget is not None and ranks <= most]
    for ranks in fitting:
        try:
            parts = sizings(model, dtype, ranks, rules)
        except MisconfiguredError:
            continue  # heads that do not divide
        taken = sum(part.request(round(tokens)).gpu_reserved for part in parts)
        budget = budgets[ranks]
        held = budget.kv_bytes // max(1, taken) if budget else 0
        if held >= FEW_REQUESTS:
            return (
                ranks,
                f"the fewest ranks that hold the weights and {FEW_REQUESTS} requests of {tokens:,.0f} tokens",
            )
        if held and (best is None or held > best[1]):
            best = (ranks, held)
    if best is None:
        raise MisconfiguredError(
            f"{model.name} with a request of {tokens:,.0f} tokens does not fit on up to "
            f"{min(most, MAX_RANKS)} of these GPUs; use more of them or larger ones (--gpus, --gpu), smaller "
            "weights (--weights-dtype)"
        )
    return best[
        0
    ], f"holds {best[1]} of {tokens:,.0f} tokens; fewer than {FEW_REQUESTS} fit on any number up to {most}"
