"""Layers of plain attention: which tokens each keeps, of how many heads, and whose KV it shares."""

from collections.abc import Callable, Sequence

from kvferry.models.facts import MAX_LAYERS, Facts
from kvferry.models.layers import Heads, Index, Layer, Span

SPANS = {
    "full_attention": Span.FULL,
    "attention": Span.FULL,
    "global_attention": Span.FULL,
    "sliding_attention": Span.WINDOW,
    "chunked_attention": Span.CHUNK,
}

# Architectures whose heads are not as wide as the hidden size suggests: without head_dim, refused.
FIXED_WIDTH = frozenset(
    {
        "gemma", "gemma2", "gemma3n", "gemma3n_text", "glm4_moe", "gpt_oss", "llama4", "llama4_text",
        "minimax_m2", "ministral3", "nemotron_h", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen4_exp", "qwen4_exp_text",
        "qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss",
    }
)  # fmt: skip


def layer_count(facts: Facts) -> int:
    """``num_hidden_layers``, within bounds."""
    return facts.number("num_hidden_layers", highest=MAX_LAYERS)


def head_dim(facts: Facts, default: int | None = None) -> int:
    """``head_dim``; where the config leaves it out, the hidden size over the attention heads.

    ``default``: the fixed number that the architecture takes instead.
    """
    for field in ("head_dim", "attention_head_dim"):
        if facts.has(field):
            return facts.number(field)
    if default is not None:
        return facts.number("head_dim", default)
    if facts.model_type in FIXED_WIDTH:
        facts.need("head_dim")
    facts.need("hidden_size", "num_attention_heads")
    hidden, heads = facts.number("hidden_size"), facts.number("num_attention_heads")
    if hidden % heads:
        raise facts.refuse(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim; "
            "give it like --set head_dim=128"
        )
    facts.note(f"the config has no head_dim: hidden_size / num_attention_heads = {hidden // heads}")
    return hidden // heads


def plain_heads(facts: Facts) -> Heads:
    """KV heads of one width, as most models have. Every missing field is named at once."""
    widths: tuple[str, ...] = ("hidden_size", "num_attention_heads")
    if facts.model_type in FIXED_WIDTH:
        widths = ("head_dim",)
    if facts.has("head_dim"):
        widths = ()
    if facts.has("attention_head_dim"):
        widths = ()
    facts.need("num_hidden_layers", "num_key_value_heads", *widths)
    width = head_dim(facts)
    return Heads(facts.number("num_key_value_heads"), width, width)


def own_heads(facts: Facts) -> Heads:
    """Of an architecture that has as many KV heads as attention heads, always."""
    facts.need("num_hidden_layers", "num_attention_heads", "hidden_size")
    width = head_dim(facts)
    return Heads(facts.number("num_attention_heads"), width, width)


def layer_spans(facts: Facts, count: int, default: Callable[[int], Span]) -> list[Span]:
    """From ``layer_types``; where the config leaves it out, by the architecture's own rule."""
    kinds = facts.words("layer_types", length=count)
    if not kinds:
        return [default(index) for index in range(count)]
    for kind in kinds:
        if kind not in SPANS:
            raise facts.unknown("layer_types", kind, SPANS)
    return [SPANS[kind] for kind in kinds]


def spread(facts: Facts, spans: Sequence[Span], heads: Heads) -> tuple[Layer, ...]:
    """Layers of the same heads, each with its span."""
    if facts.has("sliding_windows"):
        return _own_windows(facts, spans, heads)
    window = facts.number("sliding_window") if Span.WINDOW in spans else 0
    chunk = facts.number("attention_chunk_size") if Span.CHUNK in spans else 0
    longest = facts.optional("max_position_embeddings")
    if window >= longest > 0 and Span.WINDOW in spans:
        facts.note(
            f"sliding_window {window:,} is no shorter than the longest sequence: every layer keeps all"
        )
        spans = [Span.FULL if span is Span.WINDOW else span for span in spans]
    tokens = {Span.FULL: 0, Span.WINDOW: window, Span.CHUNK: chunk}
    return tuple(Layer(span, tokens[span], heads=heads) for span in spans)


def _own_windows(facts: Facts, spans: Sequence[Span], heads: Heads) -> tuple[Layer, ...]:
    """Each sliding layer has a window of its own."""
    if Span.CHUNK in spans:
        raise facts.refuse("sliding_windows stands beside layers that attend within chunks")
    windows = facts.numbers("sliding_windows", length=len(spans))
    if any(span is Span.WINDOW and not window for span, window in zip(spans, windows, strict=True)):
        raise facts.refuse("sliding_windows has no window for a layer that slides")
    return tuple(
        Layer(span, window if span is Span.WINDOW else 0, heads=heads)
        for span, window in zip(spans, windows, strict=True)
    )


def full(facts: Facts) -> tuple[Layer, ...]:
    """Every layer keeps every token."""
    if isinstance(facts.fields.get("num_key_value_heads"), list):
        return of_own_number(facts, "num_key_value_heads")
    heads = plain_heads(facts)
    spans = layer_spans(facts, layer_count(facts), lambda _: Span.FULL)
    return spread(facts, spans, heads)


def of_own_number(facts: Facts, field: str) -> tuple[Layer, ...]:
    """Each layer has KV heads of its own number, in a list; 0 where it does not attend."""
    facts.need("num_hidden_layers", "num_attention_heads", field)
    width, heads = head_dim(facts), facts.number("num_attention_heads")
    numbers = facts.numbers(field, length=layer_count(facts))
    for kv_heads in numbers:
        if kv_heads and heads % kv_heads:
            raise facts.refuse(f"{field} has {kv_heads}, which does not divide {heads} attention heads")
    return tuple(
        Layer(Span.FULL, heads=Heads(kv_heads, width, width)) if kv_heads else Layer(Span.NONE)
        for kv_heads in numbers
    )


def full_own_heads(facts: Facts) -> tuple[Layer, ...]:
    """The same, of an architecture without grouped heads."""
    return (Layer(Span.FULL, heads=own_heads(facts)),) * layer_count(facts)


def windowed(facts: Facts) -> tuple[Layer, ...]:
    """Every layer slides where the config gives a window, and keeps all where it does not."""
    heads = plain_heads(facts)
    span = Span.WINDOW if facts.optional("sliding_window") else Span.FULL
    return spread(facts, layer_spans(facts, layer_count(facts), lambda _: span), heads)


def switched(facts: Facts) -> tuple[Layer, ...]:
    """Qwen's rule: layers from ``max_window_layers`` on slide, and only if ``use_sliding_window`` says so."""
    heads = plain_heads(facts)
    count = layer_count(facts)
    if not facts.flag("use_sliding_window", default=False):
        facts.words("layer_types", length=count)
        if facts.optional("sliding_window"):
            facts.note(
                "sliding_window is in the config but use_sliding_window is false: every layer keeps all"
            )
        return (Layer(Span.FULL, heads=heads),) * count
    if not facts.has("layer_types"):
        facts.need("sliding_window", "max_window_layers")
    first = facts.optional("max_window_layers")
    return spread(
        facts, layer_spans(facts, count, lambda index: Span.WINDOW if index >= first else Span.FULL), heads
    )


def every(period: int) -> Callable[[int], Span]:
    """Every ``period``-th layer keeps all, the others slide."""
    return lambda index: Span.WINDOW if (index + 1) % period else Span.FULL


def gemma2(facts: Facts) -> tuple[Layer, ...]:
    """Sliding and full layers in turn, the first one sliding."""
    heads = plain_heads(facts)
    return spread(facts, layer_spans(facts, layer_count(facts), every(2)), heads)


def gemma3(facts: Facts) -> tuple[Layer, ...]:
    """Every sixth layer keeps all. Published configs leave out what equals the architecture's defaults."""
    width = head_dim(facts, 256)
    facts.number("num_attention_heads", 8)
    heads = Heads(facts.number("num_key_value_heads", 4), width, width)
    period = facts.number("sliding_window_pattern", 6) if not facts.has("layer_types") else 6
    return spread(facts, layer_spans(facts, layer_count(facts), every(period)), heads)


def gemma3n(facts: Facts) -> tuple[Layer, ...]:
    """The last ``num_kv_shared_layers`` read the KV of the last layer of their kind before them."""
    heads = plain_heads(facts)
    facts.need("sliding_window", "num_kv_shared_layers")
    return shared(facts, spread(facts, layer_spans(facts, layer_count(facts), every(5)), heads))


def gemma4(facts: Facts) -> tuple[Layer, ...]:
    """Full layers have heads of their own number and width; the last layers may share KV."""
    facts.need("num_hidden_layers", "num_key_value_heads", "head_dim", "sliding_window", "layer_types")
    local = wide = facts.number("head_dim")
    if not facts.has("per_layer_config"):  # which says the same of each layer
        wide = facts.number("global_head_dim")
    kv_heads = facts.number("num_key_value_heads")
    # The field counts only where keys serve as values too: the two come together in every published config.
    own = facts.has("num_global_key_value_heads") and facts.flag("attention_k_eq_v", default=True)
    global_heads = facts.number("num_global_key_value_heads") if own else kv_heads
    spans = layer_spans(facts, layer_count(facts), every(6))
    window = facts.number("sliding_window")
    layers = tuple(
        Layer(Span.WINDOW, window, heads=Heads(kv_heads, local, local))
        if span is Span.WINDOW
        else Layer(Span.FULL, heads=Heads(global_heads, wide, wide))
        for span in spans
    )
    return shared(facts, layers)


def shared(facts: Facts, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The last ``num_kv_shared_layers`` keep nothing: each reads the last layer of its kind that does."""
    sharing = facts.optional("num_kv_shared_layers")
    if sharing >= len(layers):
        raise facts.refuse(f"num_kv_shared_layers is {sharing} of {len(layers)} layers: none would keep KV")
    keeping = list(layers[: len(layers) - sharing])
    last = {layer.span: index for index, layer in enumerate(keeping)}
    for layer in layers[len(keeping) :]:
        if layer.span not in last:
            raise facts.refuse(f"a {layer.span.value} layer shares KV, but no such layer before it keeps any")
        keeping.append(Layer(Span.NONE, shares_layer=last[layer.span]))
    return tuple(keeping)


def cohere2(facts: Facts) -> tuple[Layer, ...]:
    """Every ``sliding_window_pattern``-th layer keeps all."""
    heads = plain_heads(facts)
    if not facts.has("layer_types"):
        facts.need("sliding_window", "sliding_window_pattern")
    period = facts.optional("sliding_window_pattern") or 1
    return spread(facts, layer_spans(facts, layer_count(facts), every(period)), heads)


def listed(facts: Facts) -> tuple[Layer, ...]:
    """``layer_types`` says it, and has to."""
    heads = plain_heads(facts)
    facts.need("layer_types")
    return spread(facts, layer_spans(facts, layer_count(facts), lambda _: Span.FULL), heads)


def step(facts: Facts) -> tuple[Layer, ...]:
    """``layer_types`` says which slide; sliding layers may have heads of their own, in a nested object."""
    facts.need("num_hidden_layers", "head_dim", "layer_types", "sliding_window")
    field = "num_key_value_heads" if facts.has("num_key_value_heads") else "num_attention_groups"
    width = facts.number("head_dim")
    whole = sliding = Heads(facts.number(field), width, width)
    if facts.has("attention_other_setting"):
        other = facts.inner("attention_other_setting")
        other.need("num_attention_groups", "head_dim")
        own = other.number("head_dim")
        sliding = Heads(other.number("num_attention_groups"), own, own)
    window = facts.number("sliding_window")
    kinds = layer_spans(facts, layer_count(facts), lambda _: Span.FULL)
    return tuple(
        Layer(Span.WINDOW, window, heads=sliding) if span is Span.WINDOW else Layer(Span.FULL, heads=whole)
        for span in kinds
    )


def olmo3(facts: Facts) -> tuple[Layer, ...]:
    """Every fourth layer keeps all, unless ``layer_types`` says otherwise."""
    heads = plain_heads(facts)
    facts.need("sliding_window")
    return spread(facts, layer_spans(facts, layer_count(facts), every(4)), heads)


def gpt_oss(facts: Facts) -> tuple[Layer, ...]:
    """Sliding and full layers in turn; heads are narrower than the hidden size suggests."""
    facts.need("num_hidden_layers", "num_key_value_heads", "head_dim", "sliding_window")
    return spread(facts, layer_spans(facts, layer_count(facts), every(2)), plain_heads(facts))


def llama4(facts: Facts) -> tuple[Layer, ...]:
    """Layers with rotary positions attend within a chunk; those without keep all."""
    heads = plain_heads(facts)
    count = layer_count(facts)
    if "attention_chunk_size" in facts.fields and not facts.has("attention_chunk_size"):
        facts.settle("layer_types")
        return (Layer(Span.FULL, heads=heads),) * count
    facts.need("attention_chunk_size")
    rotary = facts.numbers("no_rope_layers", length=count)
    if rotary:
        facts.settle("layer_types")
        spans = [Span.CHUNK if has else Span.FULL for has in rotary]
    elif facts.has("layer_types"):
        spans = layer_spans(facts, count, lambda _: Span.FULL)
    else:
        period = facts.number("no_rope_layer_interval", 4)
        spans = [Span.CHUNK if (index + 1) % period else Span.FULL for index in range(count)]
    return spread(facts, spans, heads)


def mimo_v2(facts: Facts) -> tuple[Layer, ...]:
    """``hybrid_layer_pattern`` marks sliding layers with 1; they have heads of their own. Keys are wide."""
    facts.settle("attention_chunk_size", "layer_types")  # the first has no meaning in this architecture
    facts.need(
        "num_hidden_layers", "hybrid_layer_pattern", "num_key_value_heads", "head_dim", "v_head_dim",
        "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
    )  # fmt: skip
    whole = Heads(facts.number("num_key_value_heads"), facts.number("head_dim"), facts.number("v_head_dim"))
    sliding = Heads(
        facts.number("swa_num_key_value_heads"), facts.number("swa_head_dim"), facts.number("swa_v_head_dim")
    )
    window = facts.number("sliding_window")
    return tuple(
        Layer(Span.WINDOW, window, heads=sliding) if slides else Layer(Span.FULL, heads=whole)
        for slides in facts.numbers("hybrid_layer_pattern", length=layer_count(facts))
    )


def block_configs(facts: Facts) -> tuple[Layer, ...]:
    """Nemotron of neural architecture search: each block says how many heads share a KV head, or has none."""
    if facts.has("num_key_value_heads_per_layer") and not facts.has("block_configs"):
        return of_own_number(facts, "num_key_value_heads_per_layer")
    facts.need("num_hidden_layers", "num_attention_heads", "block_configs")
    heads, width = facts.number("num_attention_heads"), head_dim(facts)
    layers = []
    for block in facts.listing("block_configs", length=layer_count(facts)):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise facts.refuse("an entry of block_configs has no attention; take the model's own config.json")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(Layer(Span.NONE))
            continue
        sharing = attention.get("n_heads_in_group")
        if not isinstance(sharing, int) or sharing < 1 or heads % sharing:
            raise facts.refuse(f"n_heads_in_group is {sharing!r} of {heads} attention heads")
        if attention.get("sparsify") or attention.get("window_length"):
            raise facts.refuse("a block is sparse or has a window of its own, which is not known here")
        layers.append(Layer(Span.FULL, heads=Heads(heads // sharing, width, width)))
    facts.used["block_configs"] = f"{sum(layer.keeps for layer in layers)} of {len(layers)} blocks attend"
    return tuple(layers)


def hunyuan(facts: Facts) -> tuple[Layer, ...]:
    """Of every ``cla_share_factor`` layers one keeps KV, and the others read it."""
    heads = plain_heads(facts)
    count = layer_count(facts)
    if not facts.flag("use_cla", default=False):
        return (Layer(Span.FULL, heads=heads),) * count
    facts.need("cla_share_factor")
    factor = facts.number("cla_share_factor")
    return tuple(
        Layer(Span.NONE, shares_layer=index - index % factor)
        if index % factor
        else Layer(Span.FULL, heads=heads)
        for index in range(count)
    )


def minimax_m3(facts: Facts) -> tuple[Layer, ...]:
    """Sparse layers keep the key of an indexer beside their KV."""
    heads = plain_heads(facts)
    if not facts.has("sparse_attention_config") and facts.has("layer_types"):
        kinds = facts.words("layer_types", length=layer_count(facts))
        for kind in kinds:
            if kind not in ("full_attention", "minimax_m3_sparse"):
                raise facts.unknown("layer_types", kind, ("full_attention", "minimax_m3_sparse"))
        key = {"minimax_m3_sparse": Index(facts.number("index_head_dim"), 0)}
        return tuple(Layer(Span.FULL, heads=heads, index=key.get(kind)) for kind in kinds)
    sparse = facts.inner("sparse_attention_config")
    if not sparse.flag("use_sparse_attention", default=True):
        return (Layer(Span.FULL, heads=heads),) * layer_count(facts)
    sparse.need("sparse_index_dim", "sparse_attention_freq")
    index = Index(sparse.number("sparse_index_dim"), 0)
    marks = sparse.numbers("sparse_attention_freq", length=layer_count(facts))
    return tuple(Layer(Span.FULL, heads=heads, index=index if mark else None) for mark in marks)
