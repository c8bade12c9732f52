"""A TCP proxy that misbehaves on demand, between a client and a real server.

    with Proxy(("127.0.0.1", port)) as proxy:
        proxy.replies.latency_s = 0.05
        proxy.replies.once(Cut(1000, Ending.RESET))

Run as a process of its own where its work must not share the client's interpreter:
``python -m kvferry.testing.proxy --target HOST:PORT`` prints its port, takes one command per line of its
standard input and ends when that does.
"""

import argparse
import contextlib
import math
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Self

from kvferry.errors import BrokenError, ClosedError, KvferryError, MisconfiguredError, RefusedError
from kvferry.testing.faults import Corrupt, Cut, Ending, Insert, Way, soonest
from kvferry.testing.relay import HELD_POLL_S, Link, Side, shut
from kvferry.values import parse_count

_ANSWER_S = 20.0
MAX_DELAY_S = 3600.0
MIN_RATE_BYTES_S, MAX_RATE_BYTES_S = 1.0, 1e12
MAX_BYTE = 1 << 62
MAX_FAULT_BYTES = 1 << 30  # of one fault: as many random bytes are made at once


class Proxy:
    """Forwards to ``target`` until told otherwise, all in one thread.

    requests: the way to the server. replies: the way back. refusing: new connections are reset at once.
    accepted: connections so far. port: 0 for any free one. Random bytes are a function of ``seed``.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate_bytes_s: float | None = None,
        port: int = 0,
        seed: int = 0,
    ) -> None:
        found = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0]
        self._family, self._target = found[0], found[4]
        self.requests = Way(seed=2 * seed)
        self.replies = Way(seed=2 * seed + (1 << 32))
        self.requests.rate_bytes_s = self.replies.rate_bytes_s = rate_bytes_s
        self.refusing = False
        self.accepted = 0
        self._links: list[Link] = []
        self._orders: deque[Callable[[], None]] = deque()
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(0.0)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._bell, self._wakes = socket.socketpair()
        for sock in (self._bell, self._wakes):
            sock.settimeout(0.0)
        self._thread = threading.Thread(target=self._run, name="kvferry-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._links)

    @property
    def black_hole(self) -> bool:
        """Whether nothing passes, either way. Bytes are taken and kept until it ends."""
        return self.requests.black_hole and self.replies.black_hole

    @black_hole.setter
    def black_hole(self, on: bool) -> None:
        self.requests.black_hole = self.replies.black_hole = on

    def reset(self) -> None:
        """End every connection with a TCP reset."""
        self._order(lambda: self._for_all(lambda link: link.end(Ending.RESET)))

    def vanish(self, side: Side) -> None:
        """That side of every connection goes away and the other is not told: half-open connections."""
        self._order(lambda: self._for_all(lambda link: link.vanish(side)))

    def heal(self) -> None:
        """As at the start. What was held back is passed on."""
        self.refusing = False
        for way in (self.requests, self.replies):
            way.heal()
        self.release()

    def release(self) -> None:
        """Pass on what a stall held back. All else stays as it is."""

        def release(link: Link) -> None:
            for lane in link.lanes:
                lane.stalled = False

        self._order(lambda: self._for_all(release))

    def close(self) -> None:
        """Stop listening, reset every connection, join the thread. Idempotent."""
        self._closing = True
        self._ring()
        self._thread.join()

    # -- orders to the thread ----------------------------------------------------------------------

    def _order(self, what: Callable[[], None]) -> None:
        """Have it done between two turns of the thread, and wait for that."""
        done = threading.Event()

        def work() -> None:
            what()
            done.set()

        self._orders.append(work)
        self._ring()
        give_up = time.monotonic() + _ANSWER_S
        while not done.wait(0.05):
            if not self._thread.is_alive():
                raise ClosedError("the proxy is closed")
            if time.monotonic() > give_up:
                raise BrokenError(f"the proxy's thread did not answer within {_ANSWER_S:.0f} s")

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _for_all(self, what: Callable[[Link], None]) -> None:
        for link in self._links:
            if not link.closed:
                what(link)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._closing:
                self._turn()
        finally:
            self._for_all(lambda link: link.end(Ending.RESET))
            self._links.clear()
            for sock in (self._listener, self._bell, self._wakes):
                sock.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        for link in self._links:
            link.advance(now)
        self._links = [link for link in self._links if not link.closed]
        ready = self._selector.select(self._watch(now))
        now = time.monotonic()
        for key, events in ready:
            if key.fileobj is self._wakes:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                key.data.ready(key.fileobj, events, now=now)
        while self._orders:
            self._orders.popleft()()

    def _watch(self, now: float) -> float | None:
        """Register what each link waits for; how long to wait at most, seconds."""
        wanted: dict[socket.socket, tuple[int, Link]] = {}
        times: list[float | None] = []
        for link in self._links:
            wanted.update((sock, (events, link)) for sock, events in link.sockets() if events)
            times += [lane.next_at for lane in link.lanes if not lane.blocked]
            if any(lane.held and not lane.done for lane in link.lanes):
                times.append(now + HELD_POLL_S)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj in wanted:
                events, link = wanted.pop(key.fileobj)
                if events != key.events:
                    self._selector.modify(key.fileobj, events, link)
            elif key.fileobj not in (self._wakes, self._listener):
                self._selector.unregister(key.fileobj)
        for sock, (events, link) in wanted.items():
            self._selector.register(sock, events, link)
        return soonest(*times)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        self.accepted += 1
        if self.refusing:
            shut(client, reset=True)
            return
        server = socket.socket(self._family, socket.SOCK_STREAM)
        for sock in (client, server):
            sock.settimeout(0.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.connect_ex(self._target)
        self._links.append(Link(client, server, self.requests, self.replies))


_COMMANDS = """\
commands, one a line, WAY is requests, replies or both:
  WAY latency_s|rate_bytes_s|close_delay_s NUMBER
  WAY black_hole on|off
  WAY cut BYTE [close|reset|vanish|stall]   once, after so many more bytes
  WAY corrupt|insert BYTE [COUNT]           once
  reset | vanish client|server | refusing on|off | release | heal
each is answered with "ok" or "error: ..."
"""
_SWITCH = {"on": True, "off": False}


def obey(proxy: Proxy, line: str) -> None:
    """Do what a command line says. RefusedError for one that is not understood."""
    try:
        match line.split():
            case ["reset"]:
                proxy.reset()
            case ["heal"]:
                proxy.heal()
            case ["release"]:
                proxy.release()
            case ["vanish", side]:
                proxy.vanish(Side(side))
            case ["refusing", switch]:
                proxy.refusing = _SWITCH[switch]
            case ["both", *words]:
                for way in (proxy.requests, proxy.replies):
                    _bend(way, words)
            case ["requests", *words]:
                _bend(proxy.requests, words)
            case ["replies", *words]:
                _bend(proxy.replies, words)
            case _:
                raise RefusedError(f"{line.strip()!r} is no command: see --help")
    except MisconfiguredError as error:
        raise RefusedError(f"{line.strip()!r}: {error}: see --help") from error
    except (ValueError, KeyError) as error:
        raise RefusedError(f"{line.strip()!r}: {error} is not understood: see --help") from error


def _bend(way: Way, words: list[str]) -> None:
    match words:
        case ["latency_s", number]:
            way.latency_s = _number(number, lowest=0.0, highest=MAX_DELAY_S)
        case ["rate_bytes_s", number]:
            way.rate_bytes_s = _rate(number)
        case ["close_delay_s", number]:
            way.close_delay_s = _number(number, lowest=0.0, highest=MAX_DELAY_S)
        case ["black_hole", switch]:
            way.black_hole = _SWITCH[switch]
        case ["cut", byte, *how]:
            way.once(Cut(_byte(byte), *map(Ending, how)))
        case ["corrupt", byte]:
            way.once(Corrupt(_byte(byte)))
        case ["corrupt", byte, count]:
            way.once(Corrupt(_byte(byte), parse_count(count, lowest=1, highest=MAX_FAULT_BYTES)))
        case ["insert", byte]:
            way.once(Insert(_byte(byte)))
        case ["insert", byte, count]:
            way.once(Insert(_byte(byte), parse_count(count, lowest=1, highest=MAX_FAULT_BYTES)))
        case _:
            raise ValueError(" ".join(words))


def _byte(text: str) -> int:
    return parse_count(text, lowest=0, highest=MAX_BYTE)


def _number(text: str, *, lowest: float, highest: float) -> float:
    """Within bounds. Raises MisconfiguredError."""
    try:
        number = float(text)
    except ValueError as error:
        raise MisconfiguredError(f"{text!r} is no number") from error
    if not (math.isfinite(number) and lowest <= number <= highest):
        raise MisconfiguredError(f"{text!r} is outside {lowest:g} to {highest:g}")
    return number


def _rate(text: str) -> float | None:
    """Bytes per second; 0 for no limit. Raises MisconfiguredError."""
    if _number(text, lowest=0.0, highest=MAX_RATE_BYTES_S) == 0:
        return None
    return _number(text, lowest=MIN_RATE_BYTES_S, highest=MAX_RATE_BYTES_S)


def _target(text: str) -> tuple[str, int]:
    """HOST:PORT; the brackets of an IPv6 address are left out. Raises MisconfiguredError."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise MisconfiguredError(f"{text!r} is not HOST:PORT, like 127.0.0.1:6379")
    return host, parse_count(port, lowest=1, highest=65535)


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what ``main`` prints."""
        raise MisconfiguredError(f"{message}: see --help")


def _started(argv: Sequence[str] | None) -> Proxy:
    """The proxy that the arguments ask for. Raises MisconfiguredError."""
    parser = _Parser(
        prog="python -m kvferry.testing.proxy",
        description="A TCP proxy that misbehaves on demand. Prints its port; ends with its standard input.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="HOST:PORT")
    parser.add_argument("--port", default="0", help="to listen on, at 127.0.0.1; any free one if not given")
    parser.add_argument("--rate-bytes-s", default="0", metavar="N", help="each way, over all connections")
    arguments = parser.parse_args(argv)
    flag = "--target"
    try:
        target = _target(arguments.target)
        flag = "--port"
        port = parse_count(arguments.port, lowest=0, highest=65535)
        flag = "--rate-bytes-s"
        rate = _rate(arguments.rate_bytes_s)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error
    try:
        return Proxy(target, rate_bytes_s=rate, port=port)
    except (socket.gaierror, UnicodeError) as error:
        raise MisconfiguredError(f"--target: the host {target[0]!r} is not found: {error}") from error
    except OSError as error:
        raise MisconfiguredError(f"--port: cannot listen on {port}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until standard input ends. 2 where the arguments make no sense."""
    try:
        started = _started(argv)
    except MisconfiguredError as error:
        sys.stderr.write(f"kvferry.testing.proxy: {error}\n")
        return 2
    with started as proxy:
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            try:
                obey(proxy, line)
                answer = "ok"
            except KvferryError as error:
                answer = f"error: {error}"
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
