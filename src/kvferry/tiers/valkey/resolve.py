"""Names to socket addresses, with a deadline that the system's resolver does not have.

``getaddrinfo`` may block for as long as the resolver's own configuration says, often 30 s. It runs on a
thread of its own, one per name however many wait for it; who waits gives up at its own deadline.
"""

import contextlib
import socket
import threading
import time
from typing import NamedTuple

from kvferry.addresses import Address

MAX_LOOKUPS = 16
"""Names being looked up at a time: a resolver that hangs must not cost a thread per attempt."""


class SocketAddress(NamedTuple):
    """What ``socket.socket`` and ``connect`` want."""

    family: int
    kind: int
    protocol: int
    target: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class _Lookup:
    """One running question and its answer."""

    def __init__(self, address: Address) -> None:
        self.done = threading.Event()
        self.found: tuple[SocketAddress, ...] = ()
        self.error: OSError | None = None
        thread = threading.Thread(
            target=self._run, args=(address,), name=f"kvferry-resolve-{address}", daemon=True
        )
        thread.start()

    def _run(self, address: Address) -> None:
        try:
            self.found = _ask(address, flags=0)
        except OSError as error:
            self.error = error
        finally:
            with _lock:
                _running.pop(address, None)
            self.done.set()


_lock = threading.Lock()
_running: dict[Address, _Lookup] = {}


def resolve(address: Address, *, timeout_s: float) -> tuple[SocketAddress, ...]:
    """Where to connect to, best first. OSError if the name is unknown, TimeoutError after ``timeout_s``."""
    with contextlib.suppress(socket.gaierror):
        return _ask(address, flags=socket.AI_NUMERICHOST)
    with _lock:
        lookup = _running.get(address)
        if lookup is None:
            if len(_running) >= MAX_LOOKUPS:
                raise OSError(f"{MAX_LOOKUPS} names are being looked up already: is the resolver answering?")
            lookup = _running[address] = _Lookup(address)
    if not lookup.done.wait(timeout_s):
        raise TimeoutError("the resolver did not answer")
    if lookup.error is not None:
        raise lookup.error
    return lookup.found


def time_left(until: float) -> float:
    """Seconds left; a little when none are, since zero would mean not to wait at all."""
    return max(until - time.monotonic(), 0.001)


def connect(address: Address, until: float) -> socket.socket:
    """To the first of the name's addresses that answers; they share the time until then. Raises OSError."""
    found = resolve(address, timeout_s=time_left(until))
    failure = OSError("the name has no address")
    for number, (family, kind, protocol, target) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(time_left(until) / (len(found) - number))
            sock.connect(target)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _ask(address: Address, *, flags: int) -> tuple[SocketAddress, ...]:
    try:
        answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # a label that is empty or too long, as in "a..b"
        raise OSError(f"not a host name: {error}") from error
    return tuple(SocketAddress(family, kind, proto, to) for family, kind, proto, _, to in answers)
