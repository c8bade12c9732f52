"""Hybrids: layers with a state that does not grow, beside layers that keep KV."""

from collections.abc import Sequence

from kvferry.models.attention import head_dim, layer_count, plain_heads
from kvferry.models.facts import Facts
from kvferry.models.layers import Heads, Index, Latent, Layer, Span, State

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def state_bytes(facts: Facts, field: str, default: str) -> int:
    """Bytes of an element of the recurrent state. ``default``: what the architecture's code takes."""
    named = facts.choice(field)
    if not named or named == "auto":
        facts.note(f"the config leaves out {field}: {default}, the default of {facts.model_type}")
        named = default
    if named not in DTYPE_BYTES:
        raise facts.unknown(field, named, DTYPE_BYTES)
    return DTYPE_BYTES[named]


def gated_delta(facts: Facts) -> tuple[Layer, ...]:
    """Gated delta nets, and full attention every ``full_attention_interval``-th layer (Qwen3-Next)."""
    facts.need(
        "num_hidden_layers", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    )  # fmt: skip
    facts.settle("full_attention_interval")
    count = layer_count(facts)
    kinds = facts.words("layer_types", length=count)
    if not kinds:
        facts.need("full_attention_interval")
        period = facts.number("full_attention_interval")
        kinds = ["linear_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    key_heads, value_heads = facts.number("linear_num_key_heads"), facts.number("linear_num_value_heads")
    key_dim, value_dim = facts.number("linear_key_head_dim"), facts.number("linear_value_head_dim")
    linear = Layer(
        Span.NONE,
        state=State(
            conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
            conv_taps=facts.number("linear_conv_kernel_dim") - 1,
            heads=value_heads,
            rows=value_dim,
            columns=key_dim,
            recurrent_bytes=state_bytes(facts, "mamba_ssm_dtype", "float32"),
        ),
    )
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    return by_kind(facts, "layer_types", kinds, {"linear_attention": linear, "full_attention": whole})


def indexed_delta(facts: Facts) -> tuple[Layer, ...]:
    """The same, where attention may find its tokens by the mean keys of groups of them (Qwen4)."""
    if facts.listing("ple_layer_ids"):
        raise facts.refuse("ple_layer_ids names layers with one more convolution, which is not known here")
    kinds = [
        "full_attention" if kind == "indexed_attention" else kind
        for kind in facts.words("layer_types", length=layer_count(facts))
    ]
    layers = gated_delta(facts.under({**facts.fields, "layer_types": kinds}))
    if not facts.has("indexer_n_heads"):
        return layers
    facts.need("indexer_head_dim", "indexer_compress_ratio")
    ratio, width = facts.number("indexer_compress_ratio"), facts.number("indexer_head_dim")
    keys = Layer(Span.FULL, index=Index(width, 0), every=ratio, beside=True)
    tail = Layer(Span.NONE, state=State(width, ratio, 0, 0, 0, 0, repeated=True), beside=True)
    facts.note("heads, index keys and the keys of the open group are three entries here for one layer")
    return tuple(entry for layer in layers for entry in ((layer, keys, tail) if layer.heads else (layer,)))


def short_convolutions(facts: Facts) -> tuple[Layer, ...]:
    """Windows and full attention with heads of their own; keys, values, outputs are convolved (Inkling)."""
    taps = "sconv_kernel_size" if facts.has("sconv_kernel_size") else "conv_kernel_size"
    facts.need(
        "num_hidden_layers", "hidden_size", "num_key_value_heads", "head_dim", "swa_num_key_value_heads",
        "swa_head_dim", "sliding_window_size", taps,
    )  # fmt: skip
    count = layer_count(facts)
    if facts.has("layer_types"):
        kinds = list(facts.words("layer_types", length=count))
    else:
        facts.need("local_layer_ids")
        local = set(facts.numbers("local_layer_ids"))
        kinds = ["hybrid_sliding" if index in local else "hybrid" for index in range(count)]
    hidden, kernel = facts.number("hidden_size"), facts.number(taps)
    known = {}
    for kind, prefix, span, window in (
        ("hybrid", "", Span.FULL, 0),
        ("hybrid_sliding", "swa_", Span.WINDOW, facts.number("sliding_window_size")),
    ):
        width = facts.number(f"{prefix}head_dim")
        heads = Heads(facts.number(f"{prefix}num_key_value_heads"), width, width)
        state = State(2 * heads.kv_heads * width + 2 * hidden, kernel - 1, 0, 0, 0, 0)
        known[kind] = (
            Layer(span, window, heads=heads), Layer(Span.NONE, state=state, beside=True)
        )  # fmt: skip
    for kind in kinds:
        if kind not in known:
            raise facts.unknown("layer_types", kind, known)
    facts.note("attention and convolutions of a layer are two entries here; reserved is a lower bound")
    return tuple(entry for kind in kinds for entry in known[kind])


def by_kind(facts: Facts, field: str, kinds: Sequence[str], known: dict[str, Layer]) -> tuple[Layer, ...]:
    """A layer for each word. Raises MisconfiguredError for a word that is not known."""
    for kind in kinds:
        if kind not in known:
            raise facts.unknown(field, kind, known)
    return tuple(known[kind] for kind in kinds)


def mamba2(facts: Facts, *, heads: int, dim: int, width: int, groups: int, taps: int, nbytes: int) -> Layer:
    """A Mamba-2 layer of ``heads`` heads of ``dim`` channels and a state ``width`` wide per channel."""
    inner = heads * dim
    grouped = 2 * groups * width
    return Layer(
        Span.NONE,
        state=State(
            inner + grouped, taps - 1, heads, dim, width, nbytes, groups=groups, group_channels=grouped
        ),
    )


def nemotron_h(facts: Facts) -> tuple[Layer, ...]:
    """Mamba-2, attention and feed-forward layers in the order of a pattern or a list."""
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = facts.choice("hybrid_override_pattern")
    kinds = [words.get(mark, mark) for mark in pattern] or list(facts.words("layers_block_type"))
    if not kinds:
        facts.need("hybrid_override_pattern")
    if facts.has("num_hidden_layers") and len(kinds) != facts.number("num_hidden_layers"):
        raise facts.refuse(
            f"the pattern has {len(kinds)} layers, num_hidden_layers is {facts.number('num_hidden_layers')}"
        )
    facts.need(
        "num_key_value_heads",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
    )
    width = head_dim(facts)
    nothing = Layer(Span.NONE)
    known = {
        "mamba": mamba2(
            facts,
            heads=facts.number("mamba_num_heads"),
            dim=facts.number("mamba_head_dim"),
            width=facts.number("ssm_state_size"),
            groups=facts.number("n_groups"),
            taps=facts.number("conv_kernel"),
            nbytes=state_bytes(facts, "mamba_ssm_cache_dtype", "float32"),
        ),
        "attention": Layer(Span.FULL, heads=Heads(facts.number("num_key_value_heads"), width, width)),
        "mlp": nothing,
        "moe": nothing,
    }
    known |= {"linear_attention": known["mamba"], "full_attention": known["attention"]}
    return by_kind(facts, "hybrid_override_pattern", kinds, known)


def granite_hybrid(facts: Facts) -> tuple[Layer, ...]:
    """Mamba-2 and attention layers by ``layer_types``. The state is kept in the model's own 16 bits."""
    facts.need(
        "num_hidden_layers", "num_key_value_heads", "mamba_n_heads", "mamba_d_head", "mamba_d_state",
        "mamba_n_groups", "mamba_d_conv",
    )  # fmt: skip
    field = "layer_types" if facts.has("layer_types") else "layers_block_type"
    kinds = facts.words(field, length=layer_count(facts))
    if not kinds:
        facts.need("layer_types")
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    mamba = mamba2(
        facts,
        heads=facts.number("mamba_n_heads"),
        dim=facts.number("mamba_d_head"),
        width=facts.number("mamba_d_state"),
        groups=facts.number("mamba_n_groups"),
        taps=facts.number("mamba_d_conv"),
        nbytes=state_bytes(facts, "mamba_ssm_cache_dtype", "bfloat16"),
    )
    known = {"mamba": mamba, "linear_attention": mamba, "attention": whole, "full_attention": whole}
    return by_kind(facts, field, kinds, known)


def lfm2(facts: Facts) -> tuple[Layer, ...]:
    """Short convolutions beside full attention."""
    facts.need("num_hidden_layers", "hidden_size", "conv_L_cache")
    facts.settle("full_attn_idxs")
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    conv = Layer(
        Span.NONE, state=State(facts.number("hidden_size"), facts.number("conv_L_cache") - 1, 0, 0, 0, 0)
    )
    count = layer_count(facts)
    kinds = facts.words("layer_types", length=count)
    if not kinds:
        facts.need("full_attn_idxs")
        attending = set(facts.numbers("full_attn_idxs"))
        kinds = ["full_attention" if index in attending else "conv" for index in range(count)]
    return by_kind(facts, "layer_types", kinds, {"conv": conv, "full_attention": whole})


def kimi_linear(facts: Facts) -> tuple[Layer, ...]:
    """Kimi delta attention beside MLA. Where the config counts layers, it does so from 1."""
    facts.need("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    count = layer_count(facts)
    whole = Layer(
        Span.FULL, latent=Latent(facts.number("kv_lora_rank"), facts.number("qk_rope_head_dim", lowest=0))
    )
    facts.settle("v_head_dim")
    if not facts.has("linear_attn_config"):
        facts.need("layer_types")
        return by_kind(
            facts,
            "layer_types",
            facts.words("layer_types", length=count),
            {"linear_attention": delta_layer(facts), "full_attention": whole},
        )
    linear = facts.inner("linear_attn_config")
    linear.need("full_attn_layers", "kda_layers")
    facts.settle("layer_types")
    attending = set(linear.numbers("full_attn_layers"))
    delta = set(linear.numbers("kda_layers"))
    if attending & delta or attending | delta != set(range(1, count + 1)):
        raise facts.refuse(f"full_attn_layers and kda_layers do not name each of {count} layers once")
    recurrent = delta_layer(facts)
    return tuple(whole if layer in attending else recurrent for layer in range(1, count + 1))


def delta_layer(facts: Facts) -> Layer:
    """Kimi delta attention: queries, keys and values are convolved, and a float32 matrix is kept per head."""
    if facts.has("linear_attn_config"):
        linear = facts.inner("linear_attn_config")
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        linear, names = facts, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    linear.need(*names)
    heads, dim, taps = (linear.number(name) for name in names)
    facts.note(
        f"the config does not say how wide the state's elements are: float32, as {facts.model_type} has it"
    )
    return Layer(Span.NONE, state=State(3 * heads * dim, taps - 1, heads, dim, dim, 4))
