"""The few system calls Python's mmap does not offer: aligned shared mappings and memory advice.

Constants are those of Linux on every architecture that runs engines (x86-64, arm64).
"""

import ctypes
import errno
import os

from kvferry.errors import MisconfiguredError

HUGE_BYTES = 2 << 20

MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(fd: int, nbytes: int) -> int:
    """Map a file readable and writable at a 2 MiB-aligned address; returns the address.

    Reserves more address space than needed and maps over its aligned middle, because the kernel only
    uses huge pages where address and file offset agree. Raises MisconfiguredError when it cannot.
    """
    room = nbytes + HUGE_BYTES
    base = _mmap(None, room, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-base // HUGE_BYTES) * HUGE_BYTES
    try:
        _mmap(address, nbytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
    except MisconfiguredError:
        unmap(base, room)
        raise
    unmap(base, address - base)
    unmap(address + nbytes, base + room - address - nbytes)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Unmap whole pages that this module mapped."""
    if nbytes:
        _libc.munmap(address, nbytes)


def advise(address: int, nbytes: int, advice: int) -> int:
    """madvise; returns 0 or the errno. The GIL is free meanwhile; interrupted calls are repeated."""
    while _libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise MisconfiguredError(f"cannot map {nbytes} bytes: {os.strerror(code)}; make the pool smaller")
    return int(result)
