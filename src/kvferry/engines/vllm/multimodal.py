"""Names multimodal items by what the model is given of them: the processed tensors.

vLLM's own identifier of an item will not do. A client may choose it (``uuid``), and two images under one of
them would be one to every engine that shares our store. The processed tensors say content and processing.

vLLM itself goes by identifiers: encoder outputs and its own prefix cache are found by them. What is
computed under an identifier that had two contents may be of either, so it is refused from then on.
"""

import hashlib
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvferry.errors import RefusedError
from kvferry.identity.chunks import Extras, MultimodalItem

MAX_IDENTIFIERS = 1 << 17  # remembered; far more than the items whose KV an engine can hold
MAX_REFUSED = 1 << 16
MAX_WAITING = 1024  # requests whose items wait to be read
MAX_DATA = 4096  # items whose digest is kept as long as vLLM keeps them
MAX_NESTING = 8
MIN_BYTES_PER_TOKEN = 32  # real items have hundreds; what only measures an item has a handful in all

_ADDRESS = "address"  # vLLM's own mark of an item in shared memory

_FORMAT = b"kvferry multimodal item 1\0"

Items = tuple[MultimodalItem, ...]


class ItemDigests:
    """Scheduler's thread, but for the reading itself, which has a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._refused: set[str] = set()
        self._overrun = False
        self._waiting = 0
        self._by_data: OrderedDict[int, tuple[weakref.ref[Any], bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvferry-items")

    def items(self, features: Sequence[Any]) -> "Future[Items] | None":
        """Of a request's ``mm_features``, whether it takes part or not. None where they cannot be named.

        A failed future counts the same.
        """
        with self._lock:
            if self._waiting >= MAX_WAITING or any(_unreadable(feature) for feature in features):
                self._refuse(features)
                return None
            self._waiting += 1
        return self._pool.submit(self._name, list(features))

    def unchanged(self, features: Sequence[Any]) -> bool:
        """Whether what a request with these computes may still be stored."""
        with self._lock:
            return not self._overrun and not any(one.identifier in self._refused for one in features)

    def close(self) -> None:
        """Stop the thread; what is being read is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _name(self, features: list[Any]) -> Items:
        """Raises RefusedError for an identifier of two contents, or an item that chunks cannot name."""
        try:
            digests = [self._digest(feature) for feature in features]
        except RefusedError:
            with self._lock:
                self._refuse(features)
            raise
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            for feature, digest in zip(features, digests, strict=True):
                known = self._contents.setdefault(feature.identifier, digest)
                self._contents.move_to_end(feature.identifier)
                if known != digest:
                    self._refuse([feature])
            while len(self._contents) > MAX_IDENTIFIERS:
                self._contents.popitem(last=False)
        if not self.unchanged(features):
            raise RefusedError("a multimodal identifier stood for two contents")
        spans = [(feature.mm_position.offset, feature.mm_position.length) for feature in features]
        items = tuple(MultimodalItem(digest, *span) for digest, span in zip(digests, spans, strict=True))
        Extras(items=items)  # raises RefusedError for what a chunk cannot name
        return items

    def _refuse(self, features: Sequence[Any]) -> None:
        """For good. Too many of them: all are, since none can be forgotten."""
        self._refused.update(str(getattr(feature, "identifier", "")) for feature in features)
        if len(self._refused) > MAX_REFUSED:
            self._overrun = True
            self._refused.clear()

    def _digest(self, feature: Any) -> bytes:
        """Of the data alone it is kept: vLLM hands out one object for an item that it has seen before."""
        data = feature.data
        known = self._by_data.get(id(data))
        if known is None or known[0]() is not data:
            known = weakref.ref(data), _content(feature.modality, data)
            self._by_data[id(data)] = known
            if len(self._by_data) > MAX_DATA:
                self._by_data.popitem(last=False)
        hasher = hashlib.sha256(known[1])
        mask = feature.mm_position.is_embed  # where in its span the item stands, if not everywhere
        if mask is not None:
            _update(hasher, mask)
        return hasher.digest()


def _unreadable(feature: Any) -> bool:
    """Without the tensors that make it what it is.

    An engine that receives embeddings or KV from elsewhere may be given an item's measures alone; with the
    shared-memory processor cache it is given an address. Neither says what the item shows.
    """
    data = getattr(feature, "data", None)
    if not data or _ADDRESS in data or any(element.data is None for element in data.values()):
        return True
    told = sum(_content_bytes(element.data) for element in data.values())
    return told < MIN_BYTES_PER_TOKEN * int(feature.mm_position.length)


def _content_bytes(value: Any, *, depth: int = 0) -> int:
    """Of pixels, waveforms, features or embeddings: measures are integers, or few."""
    import torch

    if isinstance(value, list | tuple):
        return sum(_content_bytes(one, depth=depth + 1) for one in value) if depth < MAX_NESTING else 0
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype is torch.uint8):
        return int(value.nbytes)
    return 0


def _content(modality: str, data: Any) -> bytes:
    hasher = hashlib.sha256(_FORMAT)
    _update_sized(hasher, b"M", str(modality).encode())
    for name in sorted(data):
        _update_sized(hasher, b"K", str(name).encode())
        _update(hasher, data[name].data)
    return hasher.digest()


def _update(hasher: Any, value: Any, *, depth: int = 0) -> None:
    """Canonical and prefix-free: kind, then shape or count, then content. RefusedError for anything else."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise RefusedError(f"a multimodal tensor on {value.device} with layout {value.layout}")
        shape = struct.pack(f"<B{value.dim()}q", value.dim(), *value.shape)
        _update_sized(hasher, b"T", str(value.dtype).encode())
        hasher.update(shape)
        hasher.update(memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(value, list | tuple) and depth < MAX_NESTING:
        hasher.update(b"L" + struct.pack("<Q", len(value)))
        for one in value:
            _update(hasher, one, depth=depth + 1)
    elif value is None or isinstance(value, bool | int | float | str):
        _update_sized(hasher, b"V", f"{type(value).__name__} {value!r}".encode())
    else:
        raise RefusedError(f"a multimodal item holds a {type(value).__name__}")


def _update_sized(hasher: Any, kind: bytes, text: bytes) -> None:
    hasher.update(kind + struct.pack("<Q", len(text)) + text)
