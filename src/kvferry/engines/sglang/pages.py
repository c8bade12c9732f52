"""Where the pages of one of SGLang's host pools lie in memory, and the copies between them and node memory.

SGLang's pools describe a page as pieces (address, bytes), whose number depends on the layout: one per layer
and tensor for ``layer_first``, one per tensor for the page-first ones. A page is stored as its pieces, one
after the other. Pools that cannot say where a page lies are copied through a flat page of theirs.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvferry.errors import BrokenError, MisconfiguredError, RefusedError

MARKER_BYTES = 16

Where = Callable[[int], list[tuple[int, int]]]
"""(address, bytes) of each piece of the page that begins with a slot."""


class Pages(Protocol):
    """The pages of one pool. index: a page's first slot."""

    nbytes: int
    shape: str
    """Of the bytes of a page, for the namespace."""

    def copy_out(self, index: int, target: memoryview) -> None:
        """From the pool into node memory, ``nbytes`` of it."""

    def copy_in(self, index: int, source: memoryview) -> None:
        """From node memory, which is only read, into the pool."""


class PiecedPages:
    """Copied straight between the pool's memory and the node's."""

    def __init__(self, where: Where, *, pieces: Sequence[int], memory: Sequence[tuple[int, int]]) -> None:
        """pieces: bytes of each. memory: first and last address of the pool's tensors."""
        self._where = where
        self._pieces = tuple(pieces)
        self._memory = tuple(memory)
        self.nbytes = sum(pieces)
        self.shape = "pieces " + "+".join(map(str, _runs(self._pieces)))

    def copy_out(self, index: int, target: memoryview) -> None:
        """See ``Pages``."""
        at = _address(target, self.nbytes)
        for address, nbytes in self._places(index):
            ctypes.memmove(at, address, nbytes)
            at += nbytes

    def copy_in(self, index: int, source: memoryview) -> None:
        """See ``Pages``."""
        at = _address(source, self.nbytes)
        for address, nbytes in self._places(index):
            ctypes.memmove(address, at, nbytes)
            at += nbytes

    def _places(self, index: int) -> list[tuple[int, int]]:
        """Checked against the pool's own memory: a wrong index must not reach another's."""
        places = self._where(index)
        if tuple(nbytes for _, nbytes in places) != self._pieces:
            raise BrokenError(f"a page of {[n for _, n in places]} bytes, not {self._pieces} as the others")
        for address, nbytes in places:
            if not any(start <= address and address + nbytes <= end for start, end in self._memory):
                raise RefusedError(f"slot {index} lies outside the pool")
        return places


class FlatPages:
    """Copied through a flat page, by the pool's own methods."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        page = pool.get_dummy_flat_data_page()
        self.nbytes = int(page.numel() * page.element_size())
        self.shape = f"flat {self.nbytes}"
        _bytes_of(pool.get_data_page(0, flat=True), self.nbytes)  # a pool says now that it has none

    def copy_out(self, index: int, target: memoryview) -> None:
        """See ``Pages``."""
        page = self._pool.get_data_page(index, flat=True)
        np.copyto(_array(target, self.nbytes), _bytes_of(page, self.nbytes))

    def copy_in(self, index: int, source: memoryview) -> None:
        """See ``Pages``."""
        page = self._pool.get_dummy_flat_data_page()
        np.copyto(_bytes_of(page, self.nbytes), _array(source, self.nbytes))
        self._pool.set_from_flat_data_page(index, page)


class MarkerPages:
    """Of a pool that numbers pages and holds no bytes: that a page was stored is all there is to store."""

    nbytes = MARKER_BYTES
    shape = "marker"

    def copy_out(self, index: int, target: memoryview) -> None:
        """See ``Pages``."""
        del index
        target[:] = bytes(MARKER_BYTES)

    def copy_in(self, index: int, source: memoryview) -> None:
        """See ``Pages``."""


def describe(pool: Any, name: str) -> Pages:
    """How this pool's pages are copied. Raises MisconfiguredError for a pool whose pages cannot be."""
    if getattr(pool, "placement", None) is not None or getattr(pool, "stores_page_envelope", False):
        raise MisconfiguredError(
            f"host pool {name} ({type(pool).__name__}) is divided among ranks page by page, or shared by "
            "pools: its pages cannot be stored; switch that off, or this backend"
        )
    if getattr(pool, "kv_buffer", None) is None and not getattr(pool, "size_per_token", 0):
        return MarkerPages()
    where = _where(pool)
    if where is not None:
        return PiecedPages(where, pieces=[nbytes for _, nbytes in where(0)], memory=_memory(pool))
    try:
        return FlatPages(pool)
    except Exception as error:  # in its own way a pool says that it has no flat pages
        raise MisconfiguredError(
            f"host pool {name} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')}) does not say "
            "where its pages lie: choose --hicache-mem-layout page_first"
        ) from error


def page_indices(host_indices: Any, *, pages: int, page_slots: int) -> list[int]:
    """The first slot of every page. Raises RefusedError for slots that are not whole, aligned pages."""
    slots = np.asarray(host_indices.detach().cpu().numpy(), dtype=np.int64).reshape(-1)
    if slots.size != pages * page_slots:
        raise RefusedError(f"{slots.size} slots for {pages} pages of {page_slots}")
    rows = slots.reshape(pages, page_slots)
    firsts = rows[:, 0] if pages else rows.reshape(-1)
    if np.any(firsts % page_slots) or np.any(rows != firsts[:, None] + np.arange(page_slots)):
        raise RefusedError("slots that are not whole pages")
    return [int(first) for first in firsts]


def _where(pool: Any) -> Where | None:
    """None where the pool cannot tell."""
    import torch

    unified = getattr(pool, "page_unified_layout", None)
    if unified is not None:
        base, nbytes, slots = pool.kv_buffer.data_ptr(), int(unified.bytes_per_page), int(pool.page_size)
        return lambda index: [(base + index // slots * nbytes, nbytes)]
    slots_of_page = torch.arange(int(pool.page_size))

    def where(index: int) -> list[tuple[int, int]]:
        addresses, sizes = pool.get_page_buffer_meta(slots_of_page + index)
        return [(int(address), int(nbytes)) for address, nbytes in zip(addresses, sizes, strict=True)]

    try:
        return where if where(0) else None
    except Exception:  # noqa: BLE001 - by which pools say that the layout or their side states prevent it
        return None


def _runs(sizes: Sequence[int]) -> list[str]:
    """Equal neighbours counted, so that the text stays short."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return [f"{count}x{size}" for count, size in runs]


def _memory(pool: Any) -> list[tuple[int, int]]:
    """First and last address of the pool's tensors."""
    found = []
    tensors = [getattr(pool, "kv_buffer", None)]
    if hasattr(pool, "get_hybrid_pool_buffer"):
        tensors += list(pool.get_hybrid_pool_buffer())
    while tensors:
        tensor = tensors.pop()
        if isinstance(tensor, (list, tuple)):
            tensors += list(tensor)
        elif tensor is not None and tensor.numel():
            if str(tensor.device) != "cpu":
                raise MisconfiguredError(f"a host pool of SGLang lies on {tensor.device}")
            found.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
    return found


def _array(view: memoryview, nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if view.nbytes != nbytes:
        raise BrokenError(f"a slot of {view.nbytes} bytes for a page of {nbytes}")
    return np.frombuffer(view, dtype=np.uint8)


def _address(view: memoryview, nbytes: int) -> int:
    return int(_array(view, nbytes).__array_interface__["data"][0])


def _bytes_of(page: Any, nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    import torch

    array: np.ndarray[Any, np.dtype[np.uint8]] = page.contiguous().view(torch.uint8).numpy()
    if array.nbytes != nbytes:
        raise BrokenError(f"a flat page of {array.nbytes} bytes, not {nbytes}")
    return array
