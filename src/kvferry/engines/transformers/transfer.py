"""Copies between parts in the pool and a model's tensors: the callbacks of ``PrefixStore``."""

import torch

from kvferry.engines.transformers.layout import Kv, KvLayout, LayerForm, PartForm
from kvferry.engines.transformers.states import Span


class Loaded:
    """The layers' KV of a load, as it arrives. Parts of full attention are copied to where they stay.

    Of sliding windows only the last chunks before a boundary come; which that is, the load decides.
    """

    def __init__(self, layout: KvLayout, *, chunks: int) -> None:
        self._layout = layout
        tokens = chunks * layout.chunk_tokens
        self._whole = {
            form.index: _empty(form, tokens, layout)
            for part in layout.parts
            if not part.window_tokens
            for form in part.layers
        }
        self._trailing: dict[tuple[int, int], torch.Tensor] = {}  # by part and chunk

    def take(self, chunk: int, part: int, view: memoryview) -> None:
        """Copy a part out of the pool. Returns when the bytes are read."""
        flat = self._layout.flat(view)
        form = self._layout.parts[part]
        if form.window_tokens:
            self._trailing[part, chunk] = flat.to(self._layout.device, copy=True)
            return
        # Across a bus in one piece, and scattered there.
        near = flat if self._layout.device.type == "cpu" else flat.to(self._layout.device)
        first = chunk * self._layout.chunk_tokens
        for layer, kv in form.views(near):
            self._whole[layer.index].tokens(first, first + form.tokens).copy_from(kv)

    def layers(self, chunks: int) -> dict[int, Kv]:
        """What the layers need to go on after so many chunks."""
        tokens = chunks * self._layout.chunk_tokens
        found = {index: kv.tokens(0, tokens) for index, kv in self._whole.items()}
        for part, form in enumerate(self._layout.parts):
            if form.window_tokens:
                found.update(self._windows(part, form, chunks))
        return found

    def _windows(self, part: int, form: PartForm, chunks: int) -> dict[int, Kv]:
        needed = -(-(form.window_tokens - 1) // self._layout.chunk_tokens)
        pieces: dict[int, list[Kv]] = {layer.index: [] for layer in form.layers}
        for chunk in range(max(0, chunks - needed), chunks):
            for layer, kv in form.views(self._trailing[part, chunk]):
                pieces[layer.index].append(kv)
        kept = min(form.window_tokens - 1, chunks * self._layout.chunk_tokens)
        found = {}
        for index, kvs in pieces.items():
            keys = torch.cat([kv.keys for kv in kvs], dim=1)[:, -kept:]
            found[index] = Kv(keys, torch.cat([kv.values for kv in kvs], dim=1)[:, -kept:])
        return found


class Stored:
    """What a cache holds, as parts. spans: of each layer."""

    def __init__(self, layout: KvLayout, spans: dict[int, Span]) -> None:
        self._layout = layout
        self._spans = spans
        # Of layers that keep a window, a part is there when none of them has dropped its first token.
        self._first = [max(spans[layer.index].first for layer in part.layers) for part in layout.parts]

    def has(self, chunk: int, part: int) -> bool:
        """Whether the cache holds all of that part."""
        return self._first[part] <= self._start(chunk, part)

    def lacks(self, chunks: range) -> bool:
        """Whether the cache has dropped something of these."""
        return not all(self.has(chunk, part) for chunk in chunks for part in range(len(self._layout.parts)))

    def fill(self, chunk: int, part: int, view: memoryview) -> None:
        """Copy a part into the pool. Returns when the bytes are there."""
        flat = self._layout.flat(view)
        form = self._layout.parts[part]
        first = self._start(chunk, part)
        device = self._layout.device
        near = flat if device.type == "cpu" else torch.empty_like(flat, device=device)
        for layer, kv in form.views(near):
            span = self._spans[layer.index]
            kv.copy_from(span.kv.tokens(first - span.first, first - span.first + form.tokens))
        if near is not flat:
            flat.copy_(near)

    def _start(self, chunk: int, part: int) -> int:
        return (chunk + 1) * self._layout.chunk_tokens - self._layout.parts[part].tokens


def _empty(form: LayerForm, tokens: int, layout: KvLayout) -> Kv:
    keys = (form.key_heads, tokens, form.key_size)
    values = (form.value_heads, tokens, form.value_size)
    return Kv(
        torch.empty(keys, dtype=layout.dtype, device=layout.device),
        torch.empty(values, dtype=layout.dtype, device=layout.device),
    )
