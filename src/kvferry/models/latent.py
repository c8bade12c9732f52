"""Layers of latent attention (MLA), with or without a sparse indexer."""

from kvferry.models.attention import layer_count
from kvferry.models.facts import Facts
from kvferry.models.layers import Index, Latent, Layer, Span

INDEX_SCALE_GROUP = 128


def latent(facts: Facts) -> tuple[Layer, ...]:
    """Each layer keeps one latent and one rotary key per token; some also an indexer's key."""
    facts.need("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    count = layer_count(facts)
    kept = Latent(facts.number("kv_lora_rank"), facts.number("qk_rope_head_dim", lowest=0))
    if facts.has("compress_ratios"):
        raise facts.refuse(
            "compress_ratios means compressed attention, which is not known for this model_type"
        )
    indexed = index_layers(facts, count)
    index = Index(facts.number("index_head_dim"), INDEX_SCALE_GROUP) if any(indexed) else None
    note_drafts(facts)
    return tuple(Layer(Span.FULL, latent=kept, index=index if has else None) for has in indexed)


def twice(facts: Facts) -> tuple[Layer, ...]:
    """Two attentions in each layer (LongCat)."""
    if facts.has("num_layers") and not facts.has("num_hidden_layers"):
        fields = {**facts.fields, "num_hidden_layers": facts.number("num_layers")}
        facts.fields = fields
    facts.note("each layer of this architecture attends twice: two entries here for one of the config")
    return tuple(layer for layer in latent(facts) for _ in range(2))


def index_layers(facts: Facts, count: int) -> list[bool]:
    """Which layers keep an indexer's key of their own: all, unless the config lets some share it."""
    if not facts.has("index_head_dim"):
        return [False] * count
    kinds = facts.listing("indexer_types", length=count)
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
