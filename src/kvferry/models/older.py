"""Architectures whose configs name layers, heads and widths in words of their own."""

from collections.abc import Mapping

from kvferry.models.attention import head_dim, layer_count, own_heads
from kvferry.models.facts import Facts
from kvferry.models.layers import Heads, Layer, Span

# usual field -> the names that older configs give it
_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "attention_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
}


def renamed(facts: Facts) -> Facts:
    """The config under the usual names. Raises MisconfiguredError where two names contradict each other."""
    fields = dict(facts.fields)
    for usual, others in _NAMES.items():
        for other in others:
            if fields.get(other) is None:
                continue
            if fields.get(usual) not in (None, fields[other]):
                raise facts.refuse(f"{usual} is {fields[usual]!r}, {other} is {fields[other]!r}: which one?")
            fields[usual] = fields[other]
    return facts.under(fields)


def one_head_each(facts: Facts) -> tuple[Layer, ...]:
    """As many KV heads as attention heads, always (GPT-2, OPT, BLOOM and their like)."""
    facts = renamed(facts)
    return (Layer(Span.FULL, heads=own_heads(facts)),) * layer_count(facts)


def grouped(facts: Facts) -> tuple[Layer, ...]:
    """Grouped heads under the usual name, layers under another (EXAONE)."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_key_value_heads")
    return _alike(facts, facts.number("num_key_value_heads"))


def falcon(facts: Facts) -> tuple[Layer, ...]:
    """``num_kv_heads`` counts in the new decoder alone; before, there is one KV head or one for each."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_attention_heads", "hidden_size")
    if facts.flag("new_decoder_architecture", default=False):
        field = "num_kv_heads" if facts.has("num_kv_heads") else "n_head_kv"
        return _alike(facts, facts.number(field))
    facts.need("multi_query")
    many = facts.number("num_attention_heads")
    return _alike(facts, 1 if facts.flag("multi_query", default=True) else many)


def gpt_bigcode(facts: Facts) -> tuple[Layer, ...]:
    """One KV head, or one for each attention head."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_attention_heads", "hidden_size", "multi_query")
    many = facts.number("num_attention_heads")
    return _alike(facts, 1 if facts.flag("multi_query", default=True) else many)


def mosaic(facts: Facts) -> tuple[Layer, ...]:
    """``attn_config`` says how many KV heads (DBRX, MPT)."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_attention_heads", "hidden_size", "attn_config")
    inner = facts.inner("attn_config")
    kind = inner.choice("attn_type")
    many = facts.number("num_attention_heads")
    if inner.has("kv_n_heads"):
        return _alike(facts, inner.number("kv_n_heads"))
    if kind not in ("multihead_attention", "multiquery_attention"):
        inner.need("kv_n_heads")
    return _alike(facts, 1 if kind == "multiquery_attention" else many)


def chatglm(facts: Facts) -> tuple[Layer, ...]:
    """``multi_query_group_num`` KV heads where ``multi_query_attention`` says so."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_attention_heads", "kv_channels", "multi_query_attention")
    kv_heads = facts.number("num_attention_heads")
    if facts.flag("multi_query_attention", default=True):
        kv_heads = facts.number("multi_query_group_num")
    width = facts.number("kv_channels")
    return (Layer(Span.FULL, heads=Heads(kv_heads, width, width)),) * layer_count(facts)


def jetmoe(facts: Facts) -> tuple[Layer, ...]:
    """Heads are ``kv_channels`` wide, whatever the hidden size."""
    facts.need("num_hidden_layers", "num_key_value_heads", "kv_channels")
    width = facts.number("kv_channels")
    return (Layer(Span.FULL, heads=Heads(facts.number("num_key_value_heads"), width, width)),) * layer_count(
        facts
    )


def step3(facts: Facts) -> tuple[Layer, ...]:
    """KV heads are called attention groups."""
    facts.need("num_hidden_layers", "num_attention_groups", "head_dim")
    width = facts.number("head_dim")
    heads = Heads(facts.number("num_attention_groups"), width, width)
    return (Layer(Span.FULL, heads=heads),) * layer_count(facts)


def openelm(facts: Facts) -> tuple[Layer, ...]:
    """Each layer has KV heads of its own number, in a list."""
    facts = renamed(facts)
    facts.need("num_hidden_layers", "num_kv_heads", "head_dim")
    width = facts.number("head_dim")
    return tuple(
        Layer(Span.FULL, heads=Heads(kv_heads, width, width))
        for kv_heads in facts.numbers("num_kv_heads", length=layer_count(facts))
    )


def _alike(facts: Facts, kv_heads: int) -> tuple[Layer, ...]:
    many = facts.number("num_attention_heads")
    if many % kv_heads:
        raise facts.refuse(f"{kv_heads} KV heads do not divide {many} attention heads")
    width = head_dim(facts)
    return (Layer(Span.FULL, heads=Heads(kv_heads, width, width)),) * layer_count(facts)
