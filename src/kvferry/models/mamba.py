"""Mamba, and hybrids that put it beside attention. Its state keeps the model's own 16 bits unless said."""

from dataclasses import replace

from kvferry.models.attention import head_dim, layer_count, plain_heads
from kvferry.models.facts import Facts
from kvferry.models.layers import Heads, Layer, Span, State
from kvferry.models.recurrent import by_kind, mamba2, state_bytes


def mamba1(facts: Facts, *, inner: int, width: int, taps: int) -> Layer:
    """A Mamba layer of ``inner`` channels with a state ``width`` wide per channel."""
    nbytes = state_bytes(facts, "mamba_ssm_cache_dtype", "bfloat16")
    return Layer(Span.NONE, state=State(inner, taps - 1, inner, 1, width, nbytes))


def mamba(facts: Facts) -> tuple[Layer, ...]:
    """Mamba alone."""
    facts.need("num_hidden_layers", "hidden_size", "state_size", "conv_kernel")
    layer = mamba1(
        facts,
        inner=inner_size(facts, "expand", "intermediate_size"),
        width=facts.number("state_size"),
        taps=facts.number("conv_kernel"),
    )
    return (layer,) * layer_count(facts)


def mamba_2(facts: Facts) -> tuple[Layer, ...]:
    """Mamba-2 alone."""
    facts.need("num_hidden_layers", "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    layer = mamba2(
        facts,
        heads=facts.number("num_heads"),
        dim=facts.number("head_dim"),
        width=facts.number("state_size"),
        groups=facts.number("n_groups"),
        taps=facts.number("conv_kernel"),
        nbytes=state_bytes(facts, "mamba_ssm_cache_dtype", "bfloat16"),
    )
    return (layer,) * layer_count(facts)


def inner_size(facts: Facts, expand: str, given: str) -> int:
    """Channels of a Mamba layer: as given, or the hidden size so many times."""
    if facts.has(given):
        return facts.number(given)
    facts.need("hidden_size", expand)
    return facts.number("hidden_size") * facts.number(expand)


def jamba(facts: Facts) -> tuple[Layer, ...]:
    """Mamba, and attention in every ``attn_layer_period``-th layer."""
    facts.need(
        "num_hidden_layers", "num_key_value_heads", "hidden_size", "attn_layer_period", "attn_layer_offset",
        "mamba_d_state", "mamba_d_conv", "mamba_expand",
    )  # fmt: skip
    facts.settle("layers_block_type", "layer_types")
    period = facts.number("attn_layer_period")
    offset = facts.number("attn_layer_offset", lowest=0)
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    inner = facts.number("hidden_size") * facts.number("mamba_expand")
    recurrent = mamba1(
        facts, inner=inner, width=facts.number("mamba_d_state"), taps=facts.number("mamba_d_conv")
    )
    return tuple(
        whole if index % period == offset % period else recurrent for index in range(layer_count(facts))
    )


def _mamba2_of(facts: Facts, *, inner: int) -> Layer:
    facts.need("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    heads = facts.number("mamba_n_heads")
    if facts.has("mamba_d_head") and facts.fields["mamba_d_head"] != "auto":
        dim = facts.number("mamba_d_head")
    else:
        dim = inner // heads
    if heads * dim != inner:
        raise facts.refuse(f"{heads} Mamba heads of {dim} are not the {inner} channels of the layer")
    return mamba2(
        facts,
        heads=heads,
        dim=dim,
        width=facts.number("mamba_d_state"),
        groups=facts.number("mamba_n_groups"),
        taps=facts.number("mamba_d_conv"),
        nbytes=state_bytes(facts, "mamba_ssm_cache_dtype", "bfloat16"),
    )


def bamba(facts: Facts) -> tuple[Layer, ...]:
    """Mamba-2, and attention in the layers of ``attn_layer_indices``."""
    facts.need("num_hidden_layers", "num_key_value_heads", "hidden_size", "mamba_expand")
    count = layer_count(facts)
    kinds = facts.words("layer_types", length=count)
    if not kinds:
        facts.need("attn_layer_indices")
        attending = set(facts.numbers("attn_layer_indices"))
        kinds = ["attention" if index in attending else "mamba" for index in range(count)]
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    recurrent = _mamba2_of(facts, inner=facts.number("hidden_size") * facts.number("mamba_expand"))
    known = {
        "mamba": recurrent, "linear_attention": recurrent, "attention": whole, "full_attention": whole,
    }  # fmt: skip
    return by_kind(facts, "layer_types", kinds, known)


def falcon_h1(facts: Facts) -> tuple[Layer, ...]:
    """Attention and Mamba-2 side by side in every layer."""
    facts.need("num_hidden_layers", "num_key_value_heads")
    whole = Layer(Span.FULL, heads=plain_heads(facts))
    recurrent = replace(
        _mamba2_of(facts, inner=inner_size(facts, "mamba_expand", "mamba_d_ssm")), beside=True
    )
    facts.note("each layer of this architecture attends and recurs: two entries here for one of the config")
    return (whole, recurrent) * layer_count(facts)


def zamba2(facts: Facts) -> tuple[Layer, ...]:
    """Mamba-2 in every layer; in some, an attention whose weights are shared, with a KV of its own."""
    facts.need(
        "num_hidden_layers", "hidden_size", "layers_block_type", "num_key_value_heads", "attention_head_dim",
        "n_mamba_heads", "mamba_d_state", "mamba_ngroups", "mamba_d_conv", "mamba_expand",
    )  # fmt: skip
    facts.settle("hybrid_layer_ids")
    inner, heads = facts.number("hidden_size") * facts.number("mamba_expand"), facts.number("n_mamba_heads")
    if inner % heads:
        raise facts.refuse(f"{heads} Mamba heads do not divide the {inner} channels of the layer")
    recurrent = mamba2(
        facts,
        heads=heads,
        dim=inner // heads,
        width=facts.number("mamba_d_state"),
        groups=facts.number("mamba_ngroups"),
        taps=facts.number("mamba_d_conv"),
        nbytes=state_bytes(facts, "mamba_ssm_cache_dtype", "bfloat16"),
    )
    width = facts.number("attention_head_dim")
    whole = Layer(Span.FULL, heads=Heads(facts.number("num_key_value_heads"), width, width), beside=True)
    known = {
        "mamba": (recurrent,), "linear_attention": (recurrent,), "hybrid": (recurrent, whole),
        "g": (recurrent, whole), "m": (recurrent,),
    }  # fmt: skip
    kinds = facts.words("layers_block_type", length=layer_count(facts))
    for kind in kinds:
        if kind not in known:
            raise facts.unknown("layers_block_type", kind, known)
    return tuple(entry for kind in kinds for entry in known[kind])


def recurrent_gemma(facts: Facts) -> tuple[Layer, ...]:
    """Gated linear recurrences (their state in float32) and windows, in a pattern that repeats."""
    facts.need(
        "num_hidden_layers", "num_key_value_heads", "attention_window_size", "block_types", "conv1d_width"
    )
    width = head_dim(facts)
    window = Layer(
        Span.WINDOW,
        facts.number("attention_window_size"),
        heads=Heads(facts.number("num_key_value_heads"), width, width),
    )
    channels = facts.number("lru_width") if facts.has("lru_width") else facts.number("hidden_size")
    state = State(channels, facts.number("conv1d_width") - 1, channels, 1, 1, 4)
    pattern = facts.words("block_types")
    if not pattern:
        raise facts.refuse("block_types is empty")
    kinds = [pattern[index % len(pattern)] for index in range(layer_count(facts))]
    return by_kind(
        facts, "block_types", kinds, {"attention": window, "recurrent": Layer(Span.NONE, state=state)}
    )


def minimax(facts: Facts) -> tuple[Layer, ...]:
    """Lightning attention, whose state is a matrix per head, beside full attention."""
    facts.need("num_hidden_layers", "num_key_value_heads", "num_attention_heads")
    count = layer_count(facts)
    kinds = facts.words("layer_types", length=count)
    field = "layer_types"
    if not kinds:
        field = "attn_type_list"
        facts.need(field)
        kinds = [
            "full_attention" if mark else "linear_attention" for mark in facts.numbers(field, length=count)
        ]
    heads = plain_heads(facts)
    many, width = facts.number("num_attention_heads"), heads.key_dim
    facts.note("the state of lightning attention is counted in the model's own 16 bits, as engines keep it")
    state = State(0, 0, many, width, width, 2)
    known = {
        "full_attention": Layer(Span.FULL, heads=heads),
        "linear_attention": Layer(Span.NONE, state=state),
    }
    return by_kind(facts, field, kinds, known)
