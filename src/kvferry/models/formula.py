"""The sizes as formulas with their numbers filled in, for people."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.models.layers import Layer, Span
from kvferry.models.precision import KvDtype
from kvferry.models.sizes import CONV_BYTES, Sizing, live_tokens, state_bytes, token_bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """Entries that are all alike. indices: which of the model's, counted from 0."""

    layer: Layer
    indices: tuple[int, ...]


def kinds(layers: Iterable[Layer]) -> tuple[Kind, ...]:
    """Alike layers together, in the order of their first. Those that share KV count as alike."""
    found: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        key = Layer(Span.NONE, shares_layer=-1) if layer.shares_layer is not None else layer
        found.setdefault(key, []).append(index)
    return tuple(Kind(layer, tuple(indices)) for layer, indices in found.items())


def kind_name(layer: Layer) -> str:
    """``full attention``, ``window of 128 tokens``, ``recurrent state``, ``shares another's KV``."""
    if layer.shares_layer is not None:
        return "shares another's KV"
    if layer.state is not None:
        return "recurrent state" if layer.state.heads else "convolution state"
    if not layer.keeps:
        return "keeps nothing"
    if layer.every > 1:
        return f"an entry per {layer.every} tokens" + (", indexer" if layer.index else "")
    attention = "latent attention" if layer.latent else "full attention"
    if layer.span is Span.WINDOW:
        return f"window of {layer.span_tokens:,} tokens"
    if layer.span is Span.CHUNK:
        return f"chunks of {layer.span_tokens:,} tokens"
    return f"{attention}, indexer" if layer.index else attention


def layer_formula(layer: Layer, dtype: KvDtype) -> str:
    """What one layer keeps per token, or per sequence, with the numbers filled in."""
    terms = []
    if layer.heads is not None:
        heads = layer.heads
        widths = (
            f"2 x {heads.key_dim}"
            if heads.key_dim == heads.value_dim
            else f"({heads.key_dim} key + {heads.value_dim} value)"
        )
        plural = "s" if heads.kv_heads > 1 else ""
        terms.append(f"{heads.kv_heads} KV head{plural} x {widths} x {_bytes(dtype)}")
    if layer.latent is not None:
        terms.append(f"({layer.latent.latent_dim} latent + {layer.latent.rope_dim} rotary) x {_bytes(dtype)}")
    if layer.index is not None:
        terms.append(f"{dtype.index_bytes(layer.index)} B index key")
    state = layer.state
    if state is not None:
        terms.append(f"{state.conv_channels:,} channels x {state.conv_taps} taps x {CONV_BYTES} B")
        if state.heads:
            terms.append(f"{state.heads} heads x {state.rows} x {state.columns} x {state.recurrent_bytes} B")
    total = token_bytes(layer, dtype) or state_bytes(layer)
    what = "sequence" if state else "token" if layer.every == 1 else "entry"
    return f"{' + '.join(terms)} = {total:,} B per {what}"


def _bytes(dtype: KvDtype) -> str:
    if dtype.bits % 8:
        text = f"{dtype.bits / 8:g} B"
    else:
        text = f"{dtype.bits // 8} B"
    return f"{text} and scales" if dtype.scale_group is not None else text


def explain(sizing: Sizing, tokens: int) -> list[str]:
    """Line by line from the config to the bytes of one request of ``tokens`` tokens, one copy."""
    lines = []
    sums = []
    numbers = sizing.model.numbers
    for kind in kinds(sizing.model.layers):
        count = len(kind.indices)
        layers = len({numbers[index] for index in kind.indices})
        head = f"{layers} layer{'s' if layers > 1 else ''}, {kind_name(kind.layer)}"
        if layers < count:
            head += f" {count // layers} times"
        if not kind.layer.keeps:
            lines.append(f"{head}: 0 B")
            continue
        lines.append(f"{head}: {layer_formula(kind.layer, sizing.dtype)} and layer")
        each = token_bytes(kind.layer, sizing.dtype)
        if each:
            live = live_tokens(kind.layer, tokens)
            what = "live" if kind.layer.every == 1 else "entries"
            lines.append(
                f"  {count} x {each:,} B x {live:,} {what} of {tokens:,} tokens = {count * each * live:,} B"
            )
            sums.append(count * each * live)
        else:
            lines.append(f"  {count} x {state_bytes(kind.layer):,} B = {count * state_bytes(kind.layer):,} B")
            sums.append(count * state_bytes(kind.layer))
    if len(sums) > 1:
        lines.append(f"sum, one copy of one request: {sum(sums):,} B")
    return lines
