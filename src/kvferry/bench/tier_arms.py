"""The arms of ``kvferry bench tiers``: the tier itself, bare sockets, and the usual clients.

Every arm moves the same bytes between the same server and the same memory. The bare arm is the limit: one
socket, one pipeline, recv_into and sendmsg, nothing verified.
"""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvferry.addresses import Address
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import HEADER_BYTES, part_checksums, stripe_plan
from kvferry.pool.arena import Arena
from kvferry.pool.prepare import PrepareThread
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier
from kvferry.tiers.valkey.jobs import stripe_key

BARE_DEPTH = 8
WAIT_S = 60.0
NAMESPACE = b"bench" + bytes(11)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one measurement moves: the parts, their bytes, and where fetched bytes go."""

    refs: tuple[PartRef, ...]
    source: tuple[memoryview, ...]
    target: tuple[memoryview, ...]
    checksums: tuple[tuple[bytes, ...], ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes of all parts."""
        return sum(ref.nbytes for ref in self.refs)

    def renamed(self) -> "Parts":
        """The same parts under names that nobody has used."""
        refs = tuple(
            PartRef(PartKey(ref.key.namespace, os.urandom(32), ref.key.part), ref.nbytes) for ref in self.refs
        )
        return replace(self, refs=refs)

    def verify(self) -> None:
        """BrokenError unless the target holds the source's bytes."""
        if any(a != b for a, b in zip(self.source, self.target, strict=True)):
            raise BrokenError("bytes that came back differ from those stored")


@contextlib.contextmanager
def parts_in_memory(
    part_bytes: int, total_bytes: int, *, digest: Callable[[int], bytes] = lambda number: os.urandom(32)
) -> Iterator[Parts]:
    """As many parts as fit ``total_bytes`` (at least one), in an arena prepared as the pool's is.

    digest: the chunk digest of the part with that number.
    """
    count = max(1, total_bytes // part_bytes)
    arena = Arena.create(2 * count * part_bytes, name="kvferry-bench")
    preparation = PrepareThread(arena, duty=1.0)
    preparation.start()
    preparation.join(WAIT_S)
    views = [arena.view(i * part_bytes, part_bytes) for i in range(2 * count)]
    try:
        random = os.urandom(part_bytes)
        for number, view in enumerate(views):
            view[:] = random
            view[:8] = number.to_bytes(8, "little")
        source, target = tuple(views[:count]), tuple(views[count:])
        refs = tuple(PartRef(PartKey(NAMESPACE, digest(i), 0), part_bytes) for i in range(count))
        yield Parts(refs, source, target, tuple(part_checksums(view) for view in source))
    finally:
        for view in views:
            view.release()
        preparation.close()
        arena.close()


class Arm(Protocol):
    """One way to move the parts. ``get`` finds what ``prepare`` stored; ``set`` finds an empty server."""

    name: str

    def prepare(self, parts: Parts) -> None:
        """Store what ``get`` reads."""

    def get(self, parts: Parts) -> None:
        """Read all parts into their target."""

    def set(self, parts: Parts) -> None:
        """Write all parts."""

    def close(self) -> None:
        """Disconnect."""


class TierArm:
    """The tier as the node uses it: verified, with headers and checksums."""

    name = "kvferry"

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def prepare(self, parts: Parts) -> None:
        """See Arm."""
        self.set(parts)

    def get(self, parts: Parts) -> None:
        """See Arm."""
        items = [FetchItem(ref, view) for ref, view in zip(parts.refs, parts.target, strict=True)]

        def start(done: Callable[[int, FetchResult], None]) -> None:
            self._tier.fetch(items, deadline=time.monotonic() + WAIT_S, done=done)

        for result in _collect(start, len(items)):
            _must_be_ok(result.outcome)

    def set(self, parts: Parts) -> None:
        """See Arm."""
        items = [StoreItem(*each) for each in zip(parts.refs, parts.source, parts.checksums, strict=True)]

        def start(done: Callable[[int, Outcome], None]) -> None:
            self._tier.store(items, deadline=time.monotonic() + WAIT_S, done=done)

        for outcome in _collect(start, len(items)):
            _must_be_ok(outcome)

    def close(self) -> None:
        """See Arm."""
        self._tier.close()


class BareArm:
    """recv_into and sendmsg on one socket: the stripes that the tier stored, and values of their size."""

    name = "bare"

    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection(address, WAIT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._small = memoryview(bytearray(64))

    def prepare(self, parts: Parts) -> None:
        """Reads what the tier stored."""

    def get(self, parts: Parts) -> None:
        """See Arm."""
        plan = _stripes(parts)
        header = memoryview(bytearray(HEADER_BYTES))
        sent = 0
        for number, (_, part, start, nbytes) in enumerate(plan):
            while sent < min(len(plan), number + BARE_DEPTH):
                key = plan[sent][0]
                self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                sent += 1
            self._fill(self._small[: len(b"$%d\r\n" % (nbytes + HEADER_BYTES))])
            self._fill(header)
            self._fill(parts.target[part][start : start + nbytes])
            self._fill(self._small[:2])

    def set(self, parts: Parts) -> None:
        """See Arm."""
        header = bytes(HEADER_BYTES)
        waiting: deque[int] = deque()
        for key, part, start, nbytes in _stripes(parts):
            command = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes + HEADER_BYTES)
            buffers = [memoryview(command), memoryview(header), parts.source[part][start : start + nbytes]]
            buffers.append(memoryview(b"\r\n"))
            while buffers:
                sent = self._socket.sendmsg(buffers)
                while buffers and sent >= buffers[0].nbytes:
                    sent -= buffers.pop(0).nbytes
                if sent:
                    buffers[0] = buffers[0][sent:]
            waiting.append(nbytes)
            if len(waiting) >= BARE_DEPTH:
                self._fill(self._small[: len(b"+OK\r\n")])
                waiting.popleft()
        for _ in waiting:
            self._fill(self._small[: len(b"+OK\r\n")])

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            count = self._socket.recv_into(view)
            if not count:
                raise BrokenError("the server closed the bare connection")
            view = view[count:]

    def close(self) -> None:
        """See Arm."""
        self._socket.close()


class ClientArm:
    """A client library: one value per part, copied into the memory that the engine reads."""

    def __init__(self, name: str, client: Any) -> None:
        self.name = name
        self._client = client

    def prepare(self, parts: Parts) -> None:
        """See Arm."""
        self.set(parts)

    def get(self, parts: Parts) -> None:
        """See Arm."""
        for ref, view in zip(parts.refs, parts.target, strict=True):
            view[:] = self._client.get(ref.key.chunk)

    def set(self, parts: Parts) -> None:
        """See Arm."""
        for ref, view in zip(parts.refs, parts.source, strict=True):
            self._client.set(ref.key.chunk, bytes(view))

    def close(self) -> None:
        """See Arm."""
        self._client.close()


def valkey_py(address: Address) -> ClientArm:
    """valkey-py with its own parser. MisconfiguredError where it is not installed."""
    try:
        import valkey
    except ImportError as error:
        raise MisconfiguredError("valkey-py is not installed") from error
    return ClientArm("valkey-py", valkey.Valkey(host=address.host, port=address.port))


def glide_sync(address: Address) -> ClientArm:
    """valkey-glide's synchronous client. MisconfiguredError where it is not installed."""
    try:
        import glide_sync as glide
    except ImportError as error:
        raise MisconfiguredError("valkey-glide-sync is not installed") from error
    nodes = [glide.NodeAddress(address.host, address.port)]
    return ClientArm(
        "glide-sync", glide.GlideClient.create(glide.GlideClientConfiguration(nodes, request_timeout=10000))
    )


def _stripes(parts: Parts) -> list[tuple[bytes, int, int, int]]:
    """(key, index of the part, offset, bytes) of every stripe."""
    return [
        (stripe_key(ref.key, stripe.index), part, stripe.offset, stripe.nbytes)
        for part, ref in enumerate(parts.refs)
        for stripe in stripe_plan(ref.nbytes)
    ]


def _collect(start: Callable[[Callable[[int, Any], None]], None], count: int) -> list[Any]:
    found: list[Any] = []
    whole = threading.Event()

    def done(index: int, result: Any) -> None:
        found.append(result)
        if len(found) == count:
            whole.set()

    start(done)
    if not whole.wait(WAIT_S + 5):
        raise BrokenError(f"only {len(found)} of {count} items were reported")
    return found


def _must_be_ok(outcome: Outcome) -> None:
    if outcome is not Outcome.OK:
        raise BrokenError(f"a part ended as {outcome.value}: the measurement is void")
