"""How many bytes the weights of a checkpoint take each, from the ``quantization_config`` of its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bytes of a weight, with its scales: NVFP4 has 1 byte per 16, MXFP4 1 per 32, int4 2 per 128.
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.515625,
}
WIDE_BYTES = 2.0
"""Of a weight that a quantized checkpoint leaves as it was."""
_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "bitsandbytes": "int8"}
_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "w4a16_awq": "int4"}
_MAX_GROUP = 1 << 16


@dataclass(frozen=True, slots=True)
class Published:
    """The weights as a checkpoint has them.

    dtype: of most of them, a name of ``WEIGHT_BYTES``; empty where the config has a kind not known here.
    nbytes: of one such weight. wide: how many have ``WIDE_BYTES`` instead, as far as known. why: what the
    config says, for people.
    """

    dtype: str = "bf16"
    nbytes: float = 2.0
    wide: float = 0.0
    why: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the config says so."""
        return bool(self.why)

    def total(self, parameters: float) -> float:
        """Bytes of so many weights."""
        wide = min(self.wide, parameters)
        return (parameters - wide) * self.nbytes + wide * WIDE_BYTES


PLAIN = Published()


def published(*configs: Mapping[str, Any], wide: float = 0.0) -> Published:
    """From the first of ``configs`` that says anything; 16-bit weights where none does."""
    for config in configs:
        found = config.get("quantization_config")
        if isinstance(found, Mapping) and found:
            return _quantized(found, str(config.get("expert_dtype", "")), wide)
    return PLAIN


def _quantized(found: Mapping[str, Any], experts: str, wide: float) -> Published:
    method = str(found.get("quant_method", "")).lower()
    algorithm = str(found.get("quant_algo", "")).lower()
    why = f"quantization_config: {algorithm or method or 'of no name'}"[:60]
    group = _group(found)
    dtype = _METHODS.get(method, "")
    if experts == "fp4":
        dtype, why = "mxfp4", f"{why}, experts fp4"
    elif method == "bitsandbytes" and found.get("load_in_4bit") is True:
        dtype = "int4"
    elif algorithm in _ALGORITHMS:
        dtype = _ALGORITHMS[algorithm]
    elif group is not None:
        dtype, nbytes = group
        return Published(dtype, nbytes, wide, f"{why}, {dtype}")
    return Published(dtype, WEIGHT_BYTES.get(dtype, 0.0), wide, why)


def _group(found: Mapping[str, Any]) -> tuple[str, float] | None:
    """Of compressed-tensors, GPTQ and AWQ: the first group of layers, for they rarely differ."""
    fields: Any = found
    groups = found.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        fields = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    bits = fields.get("num_bits", fields.get("bits"))
    whole = fields.get("type", "int") == "int"
    if bits == 8:
        dtype = "int8" if whole else "fp8"
        return dtype, WEIGHT_BYTES[dtype]
    if bits != 4:
        return None
    size = fields.get("group_size")
    if whole and isinstance(size, int) and 1 <= size <= _MAX_GROUP:
        return "int4", 0.5 + 2 / size
    if whole:
        return "int4", WEIGHT_BYTES["int4"]
    dtype = "mxfp4" if size == 32 else "nvfp4"
    return dtype, WEIGHT_BYTES[dtype]
