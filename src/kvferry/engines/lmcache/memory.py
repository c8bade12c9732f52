"""LMCache's own memory: views of its objects, their layouts, and huge pages beneath them.

Torch is used only through the objects given: nothing here imports it.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from kvferry.engines.lmcache.names import Layout, layout_of
from kvferry.errors import RefusedError

HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_log = logging.getLogger("kvferry.lmcache")


class MemoryObject(Protocol):
    """LMCache's ``MemoryObj``, as far as it is used."""

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        ...

    @property
    def metadata(self) -> Any:
        """Has ``shapes`` and ``dtypes``, or ``shape`` and ``dtype`` alone."""
        ...

    def get_physical_size(self) -> int:
        """Bytes that belong to it from ``data_ptr`` on."""
        ...


def tensors_layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
    """From torch's sizes and types. Raises RefusedError."""
    return layout_of(shapes, [str(dtype) for dtype in dtypes], [dtype.itemsize for dtype in dtypes])


class Layouts:
    """Layouts of objects, remembered by the metadata's own values: a batch has one or two of them."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any, Layout] | None = None

    def of(self, thing: MemoryObject) -> Layout:
        """The whole layout, even of an object that a serde filled only in part. Raises RefusedError."""
        meta = thing.metadata
        shapes, dtypes = getattr(meta, "shapes", None), getattr(meta, "dtypes", None)
        if shapes is None or dtypes is None:
            shapes, dtypes = [meta.shape], [meta.dtype]
        last = self._last
        if last is not None and last[0] == shapes and last[1] == dtypes:
            return last[2]
        layout = tensors_layout(shapes, dtypes)
        self._last = (list(shapes), list(dtypes), layout)
        return layout


def view(thing: MemoryObject, nbytes: int) -> memoryview:
    """The object's first ``nbytes`` bytes, writable; good for as long as LMCache keeps the object.

    Raises RefusedError for an object that does not have them in host memory.
    """
    raw = getattr(thing, "raw_data", None)
    if raw is not None and not getattr(raw, "is_cpu", True):
        raise RefusedError("an object outside host memory: give LMCache an L1 of type DRAM")
    if nbytes > thing.get_physical_size():
        raise RefusedError(f"an object of {thing.get_physical_size()} bytes with a layout of {nbytes}")
    try:
        address = thing.data_ptr
    except NotImplementedError as error:
        raise RefusedError(f"{error}: give LMCache an L1 of type DRAM") from error
    return memoryview(_array_type(nbytes).from_address(address)).cast("B")


_ARRAY_TYPES: dict[int, Any] = {}
MAX_ARRAY_TYPES = 1024


def _array_type(nbytes: int) -> Any:
    """ctypes makes a new class for every size asked for and never frees one: keep them."""
    found = _ARRAY_TYPES.get(nbytes)
    if found is None:
        if len(_ARRAY_TYPES) >= MAX_ARRAY_TYPES:
            _ARRAY_TYPES.clear()
        found = _ARRAY_TYPES[nbytes] = ctypes.c_ubyte * nbytes
    return found


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for huge pages beneath LMCache's memory: copying into 4 KiB pages takes half as long again.

    Whether the kernel took the advice. It refuses where the memory is no plain memory; nothing is lost then.
    """
    start = -(-address // HUGE_BYTES) * HUGE_BYTES
    length = (address + nbytes - start) // HUGE_BYTES * HUGE_BYTES
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(start, length, _MADV_HUGEPAGE) != 0:
        _log.debug("no huge pages beneath LMCache's memory: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
