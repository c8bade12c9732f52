"""How many requests a replica holds at once: the memory left for KV, over what a request takes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import MisconfiguredError
from kvferry.models.layers import Model
from kvferry.models.published import WEIGHT_BYTES, WIDE_BYTES
from kvferry.models.sizes import Sizing

LEAST_WEIGHTS = 1_000_000  # bytes; no model that is served has fewer
PLAUSIBLE_BYTES = (0.1, 8.0)  # of a weight
MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model in all. why: where the figure comes from."""

    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one GPU, in bytes, and what is left of it for KV.

    utilization: the share that the engine may use. weights_bytes: of the whole model, spread evenly over
    ``ranks`` GPUs of a replica. overhead_bytes: activations, CUDA graphs, buffers of collectives, per GPU.
    """

    memory_bytes: int
    utilization: float
    weights_bytes: int
    ranks: int
    overhead_bytes: int

    def __post_init__(self) -> None:
        """Raise MisconfiguredError where the model does not fit."""
        if not 0 < self.utilization <= 1:
            raise MisconfiguredError(f"utilization is {self.utilization:g}: give a share above 0, at most 1")
        if self.usable_bytes <= self.overhead_bytes:
            raise MisconfiguredError(
                f"of {self.memory_bytes / 1e9:.1f} GB per GPU the engine may use "
                f"{self.usable_bytes / 1e9:.1f} GB, and overhead alone takes "
                f"{self.overhead_bytes / 1e9:.1f} GB; use a larger GPU (--gpu, --gpu-memory) "
                "or a smaller --overhead"
            )
        if self.kv_bytes <= 0:
            raise MisconfiguredError(
                f"the model does not fit: of {self.memory_bytes / 1e9:.1f} GB per GPU the engine may use "
                f"{self.usable_bytes / 1e9:.1f} GB, weights take {self.rank_weights_bytes / 1e9:.1f} GB "
                f"and overhead {self.overhead_bytes / 1e9:.1f} GB; use more ranks (--tp, --pp), smaller "
                "weights (--weights-dtype) or a larger GPU"
            )

    @property
    def usable_bytes(self) -> int:
        """What the engine may use of one GPU."""
        return int(self.memory_bytes * self.utilization)

    @property
    def rank_weights_bytes(self) -> int:
        """Weights on one GPU."""
        return -(-self.weights_bytes // self.ranks)

    @property
    def kv_bytes(self) -> int:
        """Left for KV on one GPU."""
        return self.usable_bytes - self.rank_weights_bytes - self.overhead_bytes


@dataclass(frozen=True, slots=True)
class LengthShare:
    """A part of the requests in flight, and their length in tokens. Shares of a distribution add up to 1."""

    tokens: int
    share: float


def requests_in_flight(budget: Budget, sizing: Sizing, tokens: int) -> int:
    """How many requests of ``tokens`` tokens one replica holds at once."""
    return budget.kv_bytes // sizing.request(tokens).gpu_reserved


def mixed_requests_in_flight(budget: Budget, sizing: Sizing, lengths: Sequence[LengthShare]) -> float:
    """How many requests one replica holds on average, of lengths that are mixed so."""
    mean = sum(part.share * sizing.request(part.tokens).gpu_reserved for part in lengths)
    return budget.kv_bytes / mean


def weights_of(model: Model, dtype: str | None, given: int | None) -> Weights:
    """The weights: as given, as the model directory has them, or parameters x bytes as published.

    dtype: a name of ``WEIGHT_BYTES`` in place of the published one. Raises MisconfiguredError where nothing
    says it, and for a size that such weights cannot have.
    """
    if given is not None:
        _refuse_implausible(model, given)
        return Weights(given, "as given")
    if dtype is None and model.source:
        stored = _stored(Path(model.source).parent) if Path(model.source).is_file() else None
        if stored is not None:
            return stored
    if not model.parameters:
        raise MisconfiguredError(
            f"the number of weights of {model.name} is not known; give what the weights take, like --weights "
            "16GB (the size of its safetensors files)"
        )
    return _counted(model, dtype)


def weights_dtype(model: Model, dtype: str | None) -> str:
    """As asked, else as published."""
    return dtype or model.published.dtype


def mean_weight_bytes(model: Model, dtype: str | None) -> float:
    """Of one weight, on average, with its scales."""
    if dtype is not None:
        return WEIGHT_BYTES[dtype]
    if model.parameters and model.published.dtype:
        return model.published.total(model.parameters) / model.parameters
    return model.published.nbytes or WIDE_BYTES


def _counted(model: Model, dtype: str | None) -> Weights:
    published, count = model.published, model.parameters
    if dtype is not None or not published.quantized:
        name = dtype or published.dtype
        nbytes = WEIGHT_BYTES[name]
        why = f"{count / 1e9:g} bn parameters x {nbytes:g} B ({name})"
        if published.quantized and name != published.dtype:
            why += f"; published in {published.dtype or 'another dtype'}"
        return Weights(round(count * nbytes), why)
    if not published.dtype:
        raise MisconfiguredError(
            f"the weights of {model.name} are of a kind not known here ({published.why}); give what they "
            "take, like --weights 16GB (the size of its safetensors files), or --weights-dtype"
        )
    total = published.total(count)
    if published.wide:
        why = (
            f"{(count - published.wide) / 1e9:,.4g} bn parameters x {published.nbytes:g} B "
            f"({published.dtype}, as published) + {published.wide / 1e9:.3g} bn x {WIDE_BYTES:g} B (bf16)"
        )
    else:
        why = f"{count / 1e9:g} bn parameters x {published.nbytes:g} B ({published.dtype}, as published)"
    return Weights(round(total), why)


def _refuse_implausible(model: Model, given: int) -> None:
    lowest, highest = PLAUSIBLE_BYTES
    count = model.parameters
    if given < LEAST_WEIGHTS:
        raise MisconfiguredError(f"weights of {given:,} bytes are no model's; write the unit, like 16GB")
    if count and not lowest * count <= given <= highest * count:
        raise MisconfiguredError(
            f"weights of {given / 1e9:,.3g} GB are {given / count:.2g} bytes for each of the "
            f"{count / 1e9:g} bn parameters of {model.name}; give the size of all its safetensors files, "
            "like 16GB"
        )


def _stored(directory: Path) -> Weights | None:
    """From a checkpoint's index, or its files."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file() and index.stat().st_size <= MAX_INDEX_BYTES:
            total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
            if isinstance(total, int) and total > 0:
                return Weights(total, f"total_size of {index.name}")
        total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    except (OSError, ValueError, AttributeError) as error:
        raise MisconfiguredError(
            f"cannot read the checkpoint beside {directory}: {error}; give --weights"
        ) from error
    return Weights(total, "its safetensors files") if total else None
