"""How long prefill, decode steps and loads take: formulas with a few constants fitted to published points.

Prefill is 2 P n + 2 n^2 d L operations over what GPUs reach of their peak. That share grows with the tokens
computed at once and falls with the ranks that talk to each other:

    share = ceiling / (1 + 0.06 (ranks - 1)) x m / (m + 1000 ranks),  ceiling 0.60, with experts 0.45

with m = n, but at least 2,048: below it no prefill is published, and a constant share gives the published
0.13 s until the first token of returns with some hundred new tokens (70B, 8 H100). It was fitted to six
published prefills; ``tests/advise/test_plan_speed.py`` has them, and how far off this is. A decode step reads
weights at 0.74 and KV at 0.90 of the memory's bandwidth (fitted on an H100 with an 8B). Times are seconds,
sizes bytes, rates per second; counts of tokens are whole or means.
"""

from dataclasses import dataclass

from kvferry.models.layers import Layer, Span

DENSE_CEILING = 0.60
EXPERTS_CEILING = 0.45
RANK_LOSS = 0.06
HALF_TOKENS_PER_RANK = 1000
FITTED_FROM_TOKENS = 2048
WEIGHT_BANDWIDTH = 0.74
KV_BANDWIDTH = 0.90
SPARSE_TOKENS = 2048  # what an indexer picks for each token (DeepSeek V3.2, GLM 5)

# Loads from Valkey, as published: 21.3 GB to eight ranks of a host, 2.7 GB to eight, 8.5 GB to one.
CLIENT_BYTES_S = 3.5e9  # that one rank takes in
HOST_BYTES_S = 6.9e9  # that one host takes in
LOAD_START_S = 0.114
TLS_FACTOR = 1.065
# A host's memory to a GPU over PCIe 4 x16; no published point stands behind it.
PCIE_BYTES_S = 20e9
PREFILL_ERROR = 0.4
LOAD_ERROR = 0.3


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that are alike. pair_ops: operations for a token and one it attends to, over all of them."""

    pair_ops: float
    span: Span
    span_tokens: int
    every: int


@dataclass(frozen=True, slots=True)
class Compute:
    """A model on the GPUs of one replica.

    parameters: used for a token (of a model with experts, fewer than it has). weights_bytes: of all of them,
    active_bytes: of those used for a token. flops: peak of one GPU, dense. bandwidth: of its memory.
    measured: how much faster prefill was measured to be than it is modelled here.
    """

    parameters: float
    weights_bytes: float
    active_bytes: float
    attention: tuple[Attention, ...]
    experts: bool
    ranks: int
    flops: float
    bandwidth: float
    measured: float = 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """What a load takes: a start, and a rate."""

    start_s: float
    bytes_s: float

    def seconds(self, nbytes: float) -> float:
        """Of one load that has the link to itself; of nothing, none."""
        return self.start_s + nbytes / self.bytes_s if nbytes > 0 else 0.0


def attention_of(layers: tuple[Layer, ...], query_heads: int) -> tuple[Attention, ...]:
    """What attention computes. For MLA, prefill works on uncompressed heads: keys of 192, values of 128."""
    found: dict[tuple[Span, int, int], float] = {}
    for layer in layers:
        if layer.heads is not None:
            widths = layer.heads.key_dim + layer.heads.value_dim
        elif layer.latent is not None:
            widths = 2 * 128 + layer.latent.rope_dim
        else:
            continue
        sparse = layer.index is not None and layer.every == 1
        span = Span.WINDOW if sparse else layer.span
        key = (span, SPARSE_TOKENS if sparse else layer.span_tokens, layer.every)
        found[key] = found.get(key, 0.0) + query_heads * widths
    return tuple(Attention(ops, *key) for key, ops in found.items())


def operations(compute: Compute, new: float, context: float = 0.0) -> float:
    """Of a prefill of ``new`` tokens after ``context`` that are there."""
    total = 2 * compute.parameters * new
    for part in compute.attention:
        pairs = new * (new + 2 * context) / part.every
        if part.span in (Span.WINDOW, Span.CHUNK):
            pairs = min(pairs, 2 * new * part.span_tokens)
        total += part.pair_ops * pairs
    return total


def peak_share(compute: Compute, new: float) -> float:
    """What GPUs reach of their peak with ``new`` tokens computed at once."""
    ceiling = EXPERTS_CEILING if compute.experts else DENSE_CEILING
    at_once = max(new, FITTED_FROM_TOKENS)
    filled = at_once / (at_once + HALF_TOKENS_PER_RANK * compute.ranks)
    return ceiling / (1 + RANK_LOSS * (compute.ranks - 1)) * filled


def prefill_s(compute: Compute, new: float, context: float = 0.0) -> float:
    """Of one request on an idle replica; no faster than reading the weights once."""
    if new <= 0:
        return 0.0
    least = compute.active_bytes / (WEIGHT_BANDWIDTH * compute.bandwidth * compute.ranks)
    at_once = compute.flops * compute.ranks * peak_share(compute, new) * compute.measured
    return max(least, operations(compute, new, context) / at_once)


def decode_step_s(compute: Compute, batch: float, kv_bytes_gpu: float) -> float:
    """One token for each of ``batch`` requests. kv_bytes_gpu: of one request, on one GPU.

    Of a model with experts, a step reads at most all, and no more than its requests use one by one.
    """
    weights = min(compute.weights_bytes, compute.active_bytes * max(1.0, batch))
    return weights / compute.ranks / (WEIGHT_BANDWIDTH * compute.bandwidth) + batch * kv_bytes_gpu / (
        KV_BANDWIDTH * compute.bandwidth
    )


def valkey_link(ranks: int, shard_bytes_s: float, *, tls: bool = False) -> Link:
    """From Valkey into the GPUs of one replica. shard_bytes_s: what all shards give together."""
    rate = min(CLIENT_BYTES_S * ranks, HOST_BYTES_S, shard_bytes_s)
    return Link(LOAD_START_S, rate / (TLS_FACTOR if tls else 1.0))


def host_link(ranks: int) -> Link:
    """From the host's own memory: every GPU has its own lanes."""
    return Link(0.005, PCIE_BYTES_S * ranks)
