"""How many bytes elements of a KV cache take in each dtype, scales included."""

from dataclasses import dataclass

from kvferry.errors import MisconfiguredError
from kvferry.models.layers import Heads, Index, Latent


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A dtype of a KV cache.

    bits: of one element.
    scale_group: elements that share a scale stored beside them; 0: one per head and token; None: none is
        stored per token (scales per tensor are a handful of bytes per layer).
    scale_bytes: of such a scale.
    """

    name: str
    meaning: str
    bits: int
    scale_group: int | None = None
    scale_bytes: int = 0

    def row_bytes(self, elements: int) -> int:
        """One vector of ``elements``, and its scales."""
        data = -(-elements * self.bits // 8)
        if self.scale_group is None or not elements:
            return data
        scales = -(-elements // self.scale_group) if self.scale_group else 1
        return data + scales * self.scale_bytes

    def head_bytes(self, heads: Heads) -> int:
        """Key and value of one KV head for one token."""
        return self.row_bytes(heads.key_dim) + self.row_bytes(heads.value_dim)

    def latent_bytes(self, latent: Latent) -> int:
        """A latent and its rotary key for one token.

        In ``fp8_ds_mla`` the latent is fp8 with a 4-byte scale per 128 elements, and the rotary key stays
        16-bit: 656 bytes for 512 + 64.
        """
        if self.name == "fp8_ds_mla":
            return self.row_bytes(latent.latent_dim) + 2 * latent.rope_dim
        return self.row_bytes(latent.latent_dim + latent.rope_dim)

    def index_bytes(self, index: Index) -> int:
        """An indexer's key for one token: 16-bit beside 16-bit KV, else fp8 with scales where it can be."""
        if self.bits > 8 or not index.fp8_scale_group:
            return index.key_dim * 2
        return index.key_dim + 4 * -(-index.key_dim // index.fp8_scale_group)


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("bf16", "16-bit, as are fp16 and most models' own", 16),
        KvDtype("fp16", "16-bit", 16),
        KvDtype("fp32", "32-bit", 32),
        KvDtype("fp8", "8-bit, scales per tensor", 8),
        KvDtype(
            "fp8_per_token_head",
            "8-bit, a 4-byte scale per token and head for keys, another for values",
            8,
            0,
            4,
        ),
        KvDtype(
            "fp8_ds_mla", "vLLM's layout for MLA: 8-bit latent with scales, 16-bit rotary key", 8, 128, 4
        ),
        KvDtype("fp4", "4-bit, scales not counted", 4),
        KvDtype("nvfp4", "4-bit, a 1-byte scale per 16 elements", 4, 16, 1),
        KvDtype("mxfp4", "4-bit, a 1-byte scale per 32 elements", 4, 32, 1),
    )
}


def kv_dtype(name: str) -> KvDtype:
    """By name. Raises MisconfiguredError."""
    if name not in KV_DTYPES:
        raise MisconfiguredError(f"KV dtype {name!r} is not known; there are {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]
