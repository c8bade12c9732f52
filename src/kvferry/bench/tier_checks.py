"""The checks of ``kvferry bench tiers`` that need servers of their own: allocator and shards."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from kvferry.addresses import Address
from kvferry.bench.tier_arms import NAMESPACE, Parts, TierArm, parts_in_memory
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import LARGEST_CLASS_BYTES, STRIPE_OVERHEAD_BYTES
from kvferry.testing.servers import (
    Server,
    redis_binary,
    running_cluster,
    running_server,
)
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.slots import SLOTS, key_slot
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

ALLOCATOR_PART_BYTES = tuple(int(mib * (1 << 20)) for mib in (1, 2.5, 4, 8, 10, 32))
MAX_OVERHEAD = 0.03
SHARD_RATE_BYTES_S = 100e6
SHARDS = 3
ROOM = ("--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru")


def allocator_overhead(total_bytes: int) -> dict[int, float]:
    """Server memory per payload byte, minus one, for each part size, on jemalloc.

    MisconfiguredError where no server with jemalloc is installed.
    """
    binary = redis_binary()
    if binary is None:
        raise MisconfiguredError("no server with jemalloc: apt-get install redis-server")
    found: dict[int, float] = {}
    with running_server(*ROOM, binary=binary) as server:
        if _info(server, "mem_allocator").partition("-")[0] != "jemalloc":
            raise MisconfiguredError(f"{binary} does not use jemalloc")
        arm = TierArm(ValkeyTier.connect(server.settings()))
        try:
            for part_bytes in ALLOCATOR_PART_BYTES:
                server.ask("FLUSHALL", "SYNC")
                with parts_in_memory(part_bytes, total_bytes) as parts:
                    before = _settled(server)
                    arm.set(parts)
                    found[part_bytes] = (_settled(server) - before) / parts.nbytes - 1
        finally:
            arm.close()
    return found


def _settled(server: Server) -> int:
    """used_memory once the buffers that clients no longer need have been given back.

    used_memory counts what the allocator hands out, size classes and not requests.
    """
    last = -1
    for _ in range(50):
        used = int(_info(server, "used_memory")) - int(_info(server, "mem_clients_normal"))
        if used == last:
            return used
        last = used
        time.sleep(0.25)
    return last


def _info(server: Server, name: str) -> str:
    reply = server.ask("INFO", "memory")
    for line in reply.decode().splitlines() if isinstance(reply, bytes) else ():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2]
    raise BrokenError(f"INFO memory does not tell {name}")


def shards_add_up(parts_per_shard: int, rounds: int) -> tuple[list[float], list[float]]:
    """GET bytes/s through one throttled server and through three, ``rounds`` times, interleaved.

    The parts are of one stripe each, and each of the three servers has ``parts_per_shard`` of them, so that
    the figure shows what the client can do; a single short load of random keys is as uneven as chance makes
    it. The first round warms up and is not counted.
    """
    with contextlib.ExitStack() as stack:
        part_bytes = LARGEST_CLASS_BYTES - STRIPE_OVERHEAD_BYTES
        total_bytes = SHARDS * parts_per_shard * part_bytes
        parts = stack.enter_context(parts_in_memory(part_bytes, total_bytes, digest=_evenly_spread))
        arms = [stack.enter_context(_throttled_cluster(parts, count)) for count in (1, SHARDS)]
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for arm, found in zip(arms, rates, strict=True):
                began = time.perf_counter()
                arm.get(parts)
                if number:
                    found.append(parts.nbytes / (time.perf_counter() - began))
    return rates


def _evenly_spread(number: int) -> bytes:
    """A digest whose first stripe belongs to shard ``number % SHARDS``."""
    while True:
        digest = os.urandom(32)
        slot = key_slot(stripe_key(PartKey(NAMESPACE, digest, 0), 0))
        if slot * SHARDS // SLOTS == number % SHARDS:
            return digest


@contextlib.contextmanager
def _throttled_cluster(parts: Parts, shards: int) -> Iterator[TierArm]:
    """A Cluster whose servers are each reached through a proxy in a process of its own."""
    with contextlib.ExitStack() as stack:
        proxies: list[int] = []

        def announced(port: int) -> int:
            proxies.append(stack.enter_context(_proxy(port)))
            return proxies[-1]

        cluster = stack.enter_context(running_cluster(*ROOM, shards=shards, announced=announced))
        direct = cluster.servers
        seed = Address("127.0.0.1", proxies[0])
        tier = ValkeyTier.connect(ValkeySettings(ValkeyUrl((seed,), cluster=True)))
        arm = TierArm(tier)
        stack.callback(arm.close)
        arm.prepare(parts)
        if len(direct) != shards:
            raise BrokenError(f"{len(direct)} servers instead of {shards}")
        yield arm


@contextlib.contextmanager
def _proxy(port: int) -> Iterator[int]:
    command = [sys.executable, "-m", "kvferry.testing.proxy", "--target", f"127.0.0.1:{port}"]
    command += ["--rate-bytes-s", str(SHARD_RATE_BYTES_S)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise BrokenError("the proxy has no output")
        yield int(process.stdout.readline())
    finally:
        process.communicate("", timeout=10)
