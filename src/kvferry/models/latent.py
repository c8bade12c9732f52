"""Layers of latent attention (MLA), with or without a sparse indexer."""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.models.attention import full, head_dim, layer_count
from kvferry.models.facts import Facts
from kvferry.models.layers import Index, Latent, Layer, Span, State
from kvferry.models.recurrent import by_kind, delta_layer

INDEX_SCALE_GROUP = 128
INDEXED_RATIO = 4
_COMPRESSED = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def latent(facts: Facts) -> tuple[Layer, ...]:
    """Each layer keeps one latent and one rotary key per token; some also an indexer's key."""
    if facts.fields.get("use_mla") is False:
        return without_latent(facts)
    facts.need("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    facts.settle("v_head_dim")
    count = layer_count(facts)
    kept = latent_of(facts)
    indexed = index_layers(facts, count)
    index = Index(facts.number("index_head_dim"), INDEX_SCALE_GROUP) if any(indexed) else None
    return tuple(Layer(Span.FULL, latent=kept, index=index if has else None) for has in indexed)


def latent_of(facts: Facts, prefix: str = "") -> Latent:
    """The latent and its rotary key. prefix: of their fields."""
    return Latent(facts.number(f"{prefix}kv_lora_rank"), facts.number(f"{prefix}qk_rope_head_dim", lowest=0))


def without_latent(facts: Facts) -> tuple[Layer, ...]:
    """Checkpoints of these architectures whose attention is a plain one (DeepSeek-OCR)."""
    facts.settle("v_head_dim")
    if facts.optional("kv_lora_rank") or facts.optional("qk_nope_head_dim"):
        raise facts.refuse("use_mla is false, but there is a latent: which one is it?")
    return full(facts)


def expanded(facts: Facts) -> tuple[Layer, ...]:
    """Latent attention that an engine may not know as such."""
    facts.note(
        "counted as latents (MLA); an engine that does not know this architecture as MLA keeps heads instead"
    )
    return latent(facts)


def indexed(facts: Facts) -> tuple[Layer, ...]:
    """The same, of an architecture whose layers share indexers in a pattern that the config has to give."""
    if facts.has("index_head_dim"):
        facts.need("indexer_types")
    return latent(facts)


def windows_and_latents(facts: Facts) -> tuple[Layer, ...]:
    """Windows with latents of their own width, beside layers that keep all and have an indexer (dots3)."""
    facts.need(
        "num_hidden_layers", "layer_types", "kv_lora_rank", "qk_rope_head_dim", "swa_kv_lora_rank",
        "swa_qk_rope_head_dim", "sliding_window_size", "index_head_dim",
    )  # fmt: skip
    facts.settle("v_head_dim", "sliding_window")
    index = Index(facts.number("index_head_dim"), INDEX_SCALE_GROUP)
    known = {
        "full_attention": Layer(Span.FULL, latent=latent_of(facts), index=index),
        "sliding_attention": Layer(
            Span.WINDOW, facts.number("sliding_window_size"), latent=latent_of(facts, "swa_")
        ),
    }
    facts.note("reserved is a lower bound: engines pad the narrower latents to the wider ones")
    return by_kind(facts, "layer_types", facts.words("layer_types", length=layer_count(facts)), known)


def lightning(facts: Facts) -> tuple[Layer, ...]:
    """Lightning attention, and in every ``layer_group_size``-th layer a latent (Bailing V2.5)."""
    facts.need(
        "num_hidden_layers", "num_attention_heads", "layer_group_size", "kv_lora_rank", "qk_rope_head_dim"
    )
    facts.settle("v_head_dim", "layer_types")
    count, period = layer_count(facts), facts.number("layer_group_size")
    if count % period:
        raise facts.refuse(
            f"{count} layers are no whole groups of {period}: what the rest does is not known here"
        )
    heads, width = facts.number("num_attention_heads"), head_dim(facts)
    facts.note("the state of lightning attention is counted in the model's own 16 bits, as engines keep it")
    recurrent = Layer(Span.NONE, state=State(0, 0, heads, width, width, 2))
    whole = Layer(Span.FULL, latent=latent_of(facts))
    return tuple(recurrent if (index + 1) % period else whole for index in range(count))


def pooled(facts: Facts) -> tuple[Layer, ...]:
    """Delta attention beside latents whose indexer keeps a key per ``index_kpool`` tokens (GLM-5 Next).

    The pool that is not full yet keeps its keys and gates as they are, on every rank.
    """
    facts.need("num_hidden_layers", "layer_types", "index_head_dim", "index_kpool")
    facts.settle("v_head_dim", "linear_attn_config")
    count = layer_count(facts)
    own = index_layers(facts, count)
    whole = Layer(Span.FULL, latent=latent_of(facts))
    width, pool = facts.number("index_head_dim"), facts.number("index_kpool")
    tail = State(2 * width, pool, 0, 0, 0, 0, repeated=True)
    keys = Layer(Span.FULL, index=Index(width, INDEX_SCALE_GROUP), every=pool, beside=True)
    recurrent = delta_layer(facts)
    kinds = facts.words("layer_types", length=count)
    layers: list[Layer] = []
    for kind, has in zip(kinds, own, strict=True):
        if kind == "linear_attention":
            layers.append(recurrent)
        elif kind in ("indexed_attention", "full_attention", "deepseek_sparse_attention"):
            layers += [whole, keys, Layer(Span.NONE, state=tail, beside=True)] if has else [whole]
        else:
            raise facts.unknown("layer_types", kind, ("linear_attention", "indexed_attention"))
    facts.note("a latent, pooled index keys and the open pool are three entries here for one layer")
    return tuple(layers)


def compressed(facts: Facts) -> tuple[Layer, ...]:
    """DeepSeek V4: every layer has a window; most keep an entry per 4 or 128 tokens beside it.

    Those of 4 are found by an indexer, whose keys are compressed alike. Such a layer is two entries here.
    """
    facts.need("num_hidden_layers", "head_dim", "qk_rope_head_dim", "sliding_window")
    facts.settle("v_head_dim", "layer_types")
    count = layer_count(facts)
    ratios = _ratios(facts, count)
    if len(ratios) < count:
        raise facts.refuse(
            f"compress_ratios has {len(ratios)} entries: a whole number for each layer is needed"
        )
    rope = facts.number("qk_rope_head_dim")
    kept = Latent(facts.number("head_dim") - rope, rope)
    window = Layer(Span.WINDOW, facts.number("sliding_window"), latent=kept)
    layers = []
    for ratio in ratios[:count]:
        layers.append(window)
        if ratio > 1:
            index = (
                Index(facts.number("index_head_dim"), INDEX_SCALE_GROUP) if ratio == INDEXED_RATIO else None
            )
            layers.append(Layer(Span.FULL, latent=kept, index=index, every=ratio, beside=True))
    facts.note("a window and compressed entries of one layer are two entries here; reserved is a lower bound")
    return tuple(layers)


def _ratios(facts: Facts, count: int) -> Sequence[int]:
    """Tokens per entry of each layer, 0 for none: listed, or by the kind of the layer."""
    if facts.has("compress_ratios") or not (facts.has("layer_types") and facts.has("compress_rates")):
        facts.need("compress_ratios")
        return facts.numbers("compress_ratios")
    rates = facts.inner("compress_rates")
    found = []
    for kind in facts.words("layer_types", length=count):
        if kind not in _COMPRESSED:
            raise facts.unknown("layer_types", kind, _COMPRESSED)
        found.append(rates.number(kind) if kind != "sliding_attention" else 0)
    return found


def twice(facts: Facts) -> tuple[Layer, ...]:
    """Two attentions in each of ``num_layers`` layers (LongCat); ``num_hidden_layers`` counts attentions."""
    facts.need("num_layers")
    layers = facts.number("num_layers")
    if facts.has("num_hidden_layers") and facts.fields["num_hidden_layers"] not in (layers, 2 * layers):
        raise facts.refuse(
            f"num_layers is {layers} and num_hidden_layers {facts.fields['num_hidden_layers']!r}: "
            "neither as many nor twice as many"
        )
    facts.fields = {**facts.fields, "num_hidden_layers": layers}
    facts.note("each layer of this architecture attends twice: two entries here for one of the config")
    return tuple(entry for layer in latent(facts) for entry in (layer, replace(layer, beside=True)))


def index_layers(facts: Facts, count: int) -> list[bool]:
    """Which layers keep an indexer's key of their own: all, unless the config lets some share it."""
    if not facts.has("index_head_dim"):
        return [False] * count
    kinds = facts.words("indexer_types", length=count)
    if kinds:
        for kind in kinds:
            if kind not in ("full", "shared"):
                raise facts.unknown("indexer_types", kind, ("full", "shared"))
        return [kind == "full" for kind in kinds]
    if facts.has("index_topk_pattern"):
        raise facts.refuse("index_topk_pattern is not known here; give indexer_types instead")
    period = facts.optional("index_topk_freq") or 1
    if period == 1:
        return [True] * count
    facts.need("index_skip_topk_offset")
    offset = facts.number("index_skip_topk_offset", lowest=0)
    return [max(index - offset + 1, 0) % period == 0 for index in range(count)]
