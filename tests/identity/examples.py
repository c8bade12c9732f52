"""Specifications and chains that the tests of this room share."""

import dataclasses
from typing import Any

from kvferry.identity.chunks import ChunkChain, Extras, MultimodalItem
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup
from kvferry.identity.namespace import KvScale, NamespaceSpec, Setting

KEY = DomainKey(bytes(range(32)))
NAMESPACE = bytes(range(16))

PLAIN = NamespaceSpec(
    domain="default",
    domain_key_id=DomainKey.default("default").key_id,
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    weights=bytes(range(32)),
    weights_generation=0,
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    kv_scales=(),
    engine="vllm",
    engine_format="0.32",
    layout="CPU_ATTN [B,H,N,2C]",
    packing="amx",
    geometry=Geometry(
        (KvGroup(GroupKind.FULL, 128, (("layers.0", "layers.1"),), (2 * 128 * 3 * 64 * 2 * 2,), 3),),
        chunk_tokens=128,
    ),
)

# Sliding-window, state and MLA groups over two pipeline stages and four tensor ranks, fp8 with scales.
HARD = NamespaceSpec(
    domain="équipe-β",
    domain_key_id=KEY.key_id,
    model="org/hybrid",
    weights=bytes(reversed(range(32))),
    weights_generation=3,
    compute_dtype="float16",
    kv_dtype="fp8_e4m3",
    kv_scales=(KvScale("1.v", (0.25, 0.5)), KvScale("1.k", (1.0, 1.5))),
    engine="vllm",
    engine_format="0.32",
    layout="FLASHINFER HND",
    packing="none",
    geometry=Geometry(
        (
            KvGroup(GroupKind.FULL, 16, (("layers.0",), ("layers.3",)), (16384, 16384), 2),
            KvGroup(GroupKind.WINDOW, 16, (("layers.1",), ()), (4096, 0), 8, window_tokens=1000),
            KvGroup(GroupKind.STATE, 784, ((), ("layers.2",)), (0, 1048576), 0),
            KvGroup(GroupKind.FULL, 64, (("draft.0",), ()), (73728, 0), 1),
        ),
        chunk_tokens=3136,
        tensor_ranks=4,
        pipeline_ranks=2,
    ),
    settings=(Setting("rope_scaling", "yarn:4.0"), Setting("draft_weights", "ab" * 32)),
)


def tokens(count: int) -> list[int]:
    """A fixed token sequence: ``(i * 7919 + 11) % 50257``."""
    return [(i * 7919 + 11) % 50257 for i in range(count)]


def chain(
    count: int = 0,
    *,
    extras: Extras | None = None,
    key: DomainKey = KEY,
    namespace: bytes = NAMESPACE,
    chunk_tokens: int = 16,
) -> ChunkChain:
    """A chain over the first ``count`` of ``tokens``."""
    made = ChunkChain(key, namespace, chunk_tokens=chunk_tokens, extras=extras)
    made.extend(tokens(count))
    return made


CHAINS: dict[str, tuple[int, int, Extras]] = {
    # name: tokens, tokens per chunk, extras
    "plain": (70, 16, Extras()),
    "large chunks": (1024, 256, Extras()),
    "empty salt": (32, 16, Extras(cache_salt="")),
    "salt": (32, 16, Extras(cache_salt="user:é🙂")),
    "adapter": (32, 16, Extras(adapter=bytes(range(100, 132)))),
    "adapter and salt": (32, 16, Extras(adapter=b"a", cache_salt="s")),
    "image over three chunks": (80, 16, Extras(items=(MultimodalItem(b"image-1", 20, 30),))),
    "overlapping items, unordered": (
        64,
        16,
        Extras(
            items=(MultimodalItem(b"b", 40, 3), MultimodalItem(b"audio", 10, 30), MultimodalItem(b"a", 10, 4))
        ),
    ),
    "item that ends with its chunk": (
        48,
        16,
        Extras(items=(MultimodalItem(b"i", 4, 12), MultimodalItem(b"j", 32, 1))),
    ),
    "item past the end": (32, 16, Extras(items=(MultimodalItem(b"later", 30, 1000),))),
    "all": (
        48,
        16,
        Extras(adapter=b"lora", cache_salt="salt", items=(MultimodalItem(bytes(range(32)), 0, 48),)),
    ),
}


def plain_json(value: Any) -> Any:
    """Dataclasses as objects (fields as the encoding names them), bytes as hexadecimal, enums as values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.metadata.get("encoded_as", field.name) for field in dataclasses.fields(value)]
        return {name: plain_json(getattr(value, name)) for name in names}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (tuple, list)):
        return [plain_json(item) for item in value]
    if isinstance(value, GroupKind):
        return value.value
    return value
