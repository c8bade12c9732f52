"""Layers of latent attention (MLA), with or without a sparse indexer."""

from dataclasses import replace

from kvferry.models.attention import layer_count
from kvferry.models.facts import Facts
from kvferry.models.layers import Index, Latent, Layer, Span

INDEX_SCALE_GROUP = 128
INDEXED_RATIO = 4


def latent(facts: Facts) -> tuple[Layer, ...]:
    """Each layer keeps one latent and one rotary key per token; some also an indexer's key."""
    facts.need("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    count = layer_count(facts)
    kept = Latent(facts.number("kv_lora_rank"), facts.number("qk_rope_head_dim", lowest=0))
    if not facts.flag("use_mla", default=True):
        raise facts.refuse(
            "use_mla is false: this checkpoint's attention is not latent, which is not known here"
        )
    if facts.has("compress_ratios"):
        raise facts.refuse(
            "compress_ratios means compressed attention, which is not known for this model_type"
        )
    indexed = index_layers(facts, count)
    index = Index(facts.number("index_head_dim"), INDEX_SCALE_GROUP) if any(indexed) else None
    note_drafts(facts)
    return tuple(Layer(Span.FULL, latent=kept, index=index if has else None) for has in indexed)


def compressed(facts: Facts) -> tuple[Layer, ...]:
    """DeepSeek V4: every layer has a window; most keep an entry per 4 or 128 tokens beside it.

    Those of 4 are found by an indexer, whose keys are compressed alike. Such a layer is two entries here.
    """
    facts.need("num_hidden_layers", "head_dim", "qk_rope_head_dim", "sliding_window", "compress_ratios")
    count = layer_count(facts)
    ratios = facts.numbers("compress_ratios")
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
    note_drafts(facts)
    return tuple(layers)


def twice(facts: Facts) -> tuple[Layer, ...]:
    """Two attentions in each layer (LongCat)."""
    if facts.has("num_layers") and not facts.has("num_hidden_layers"):
        fields = {**facts.fields, "num_hidden_layers": facts.number("num_layers")}
        facts.fields = fields
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


def note_drafts(facts: Facts) -> None:
    """Layers that only speculative decoding runs keep KV of their own when they are served."""
    drafts = facts.optional("num_nextn_predict_layers")
    if drafts:
        facts.note(
            f"{drafts} draft layer{'s' if drafts > 1 else ''} for speculative decoding left out: served, "
            "each keeps KV as one layer more"
        )
