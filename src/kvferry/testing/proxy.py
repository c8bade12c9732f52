"""A TCP proxy that misbehaves on demand, between a client and a real server.

Run as a process of its own where its work must not share the client's interpreter:
``python -m kvferry.testing.proxy --target HOST:PORT --rate-bytes-s N`` prints its port and ends when its
standard input does.
"""

import argparse
import contextlib
import socket
import struct
import sys
import threading
import time

_CHUNK_BYTES = 64 << 10
_LINGER_RESET = struct.pack("ii", 1, 0)


_BURST_S = 0.02
"""How much time a throttle may catch up: a machine that is busy elsewhere must not lower the rate."""


class Throttle:
    """A rate shared by every connection of one direction."""

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Sleep until ``nbytes`` more may pass."""
        with self._lock:
            now = time.monotonic()
            starts_at = max(now - _BURST_S, self._free_at)
            self._free_at = starts_at + nbytes / self._rate_bytes_s
        if starts_at > now:
            time.sleep(starts_at - now)


class Proxy:
    """Forwards to ``target`` until told otherwise. Attributes may be changed at any time.

    black_hole: accept and take bytes, forward none. cut_after_bytes: how many more bytes of replies pass
    before the connection that carries them is closed (once). rate_bytes_s: of replies, and of requests.
    """

    def __init__(self, target: tuple[str, int], *, rate_bytes_s: float | None = None) -> None:
        self._target = target
        self._throttles = tuple(Throttle(rate_bytes_s) if rate_bytes_s else None for _ in range(2))
        self.black_hole = False
        self.cut_after_bytes: int | None = None
        self.accepted = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kvferry-proxy-accept", daemon=True)
        self._acceptor.start()

    def reset(self) -> None:
        """End every connection with a TCP reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
                _close(sock)

    def close(self) -> None:
        """Stop listening, end every connection, join the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.reset()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(self._target, 2.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pump, args=(source, sink, is_reply), name="kvferry-proxy-pump", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        throttle = self._throttles[is_reply]
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        try:
            while count := source.recv_into(buffer):
                if throttle is not None:
                    throttle.wait(count)
                if self.black_hole:
                    continue
                allowed = self._allowed(count) if is_reply else count
                sink.sendall(buffer[:allowed])
                if allowed < count:
                    break
        except OSError:
            pass  # either side went away: so does the pair
        _close(source)
        _close(sink)

    def _allowed(self, count: int) -> int:
        with self._lock:
            left = self.cut_after_bytes
            if left is None:
                return count
            self.cut_after_bytes = left - count if left >= count else None
            return min(left, count)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description="A throttling TCP proxy.")
    parser.add_argument("--target", required=True, metavar="HOST:PORT")
    parser.add_argument("--rate-bytes-s", type=float)
    arguments = parser.parse_args()
    host, _, port = arguments.target.rpartition(":")
    proxy = Proxy((host, int(port)), rate_bytes_s=arguments.rate_bytes_s)
    sys.stdout.write(f"{proxy.port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    proxy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
