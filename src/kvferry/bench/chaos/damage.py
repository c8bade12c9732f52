"""Damage to stored bytes, behind everybody's back: in Valkey's values and in a node's pool."""

import contextlib
import os
import random
from pathlib import Path

from kvferry.bench.chaos.cluster import Member
from kvferry.errors import KvferryError
from kvferry.identity.stripes import HEADER_BYTES
from kvferry.testing.servers import must

VALUES = 12
POOL_NAME = "kvferry-pool"
POOL_BITS = 24


def flip_bits(server: Member, rng: random.Random) -> int:
    """One bit in each of some values, in the header or behind it. Returns how many."""
    done = 0
    for key in _some_keys(server):
        length = must(server.ask("STRLEN", key))
        if isinstance(length, int) and length > HEADER_BYTES:
            at = rng.randrange(HEADER_BYTES if rng.random() < 0.5 else length)
            found = must(server.ask("GETRANGE", key, str(at), str(at)))
            if isinstance(found, bytes) and found:
                must(server.ask("SETRANGE", key, str(at), bytes([found[0] ^ 1 << rng.randrange(8)])))
                done += 1
    return done


def truncate(server: Member, rng: random.Random) -> int:
    """Cut some values short, or make them longer. Returns how many."""
    done = 0
    for key in _some_keys(server):
        value = must(server.ask("GET", key))
        if isinstance(value, bytes) and value:
            cut = value[: rng.randrange(len(value))] if rng.random() < 0.8 else value + b"more"
            must(server.ask("SET", key, cut))
            done += 1
    return done


def swap(server: Member, rng: random.Random) -> int:
    """Store some values under each other's keys. Returns how many."""
    keys = _some_keys(server)
    rng.shuffle(keys)
    values = [must(server.ask("GET", key)) for key in keys]
    done = 0
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        if isinstance(value, bytes):
            must(server.ask("SET", key, value))
            done += 1
    return done


def flip_pool(pid: int, rng: random.Random) -> int:
    """Some bits of the node's memory, as a failing DIMM would. Returns how many."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if POOL_NAME in os.readlink(fd):
                pool = os.open(fd, os.O_RDWR | os.O_CLOEXEC)
                try:
                    size = os.fstat(pool).st_size
                    for _ in range(POOL_BITS):
                        at = rng.randrange(size)
                        byte = os.pread(pool, 1, at)[0]
                        os.pwrite(pool, bytes([byte ^ 1 << rng.randrange(8)]), at)
                finally:
                    os.close(pool)
                return POOL_BITS
    return 0


def _some_keys(server: Member) -> list[bytes]:
    """Different keys of this server's own; fewer than wanted when it holds few or is going away."""
    found: set[bytes] = set()
    with contextlib.suppress(KvferryError):
        for _ in range(2 * VALUES):
            key = server.ask("RANDOMKEY")
            if isinstance(key, bytes) and len(found) < VALUES:
                found.add(key)
    return sorted(found)
