"""A small real server as the place where a fleet's chunks lie, each as several keys as a part has stripes."""

import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from kvferry.bench.valkey_eviction.steering import KEY, Beginning, Steering, Use, encoded
from kvferry.errors import BrokenError
from kvferry.testing.servers import Server, must, running_server
from kvferry.tiers.valkey.resp import Reply, info_facts

VALUE_BYTES = 400
_SAMPLE_KEYS = 4096
_MAX_PIPELINE = 256
_SCAN_KEYS = 20000
_DRAWN = 500
_RECEIVE = 1 << 18


class Pipeline:
    """A socket for many small commands. Replies are integers, simple strings or errors: a line each."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._rest = b""

    def ask(self, commands: Sequence[bytes], *, lines: int = 1) -> Iterator[bytes]:
        """The replies, in order. lines: of each reply."""
        for at in range(0, len(commands), _MAX_PIPELINE):
            batch = commands[at : at + _MAX_PIPELINE]
            self._socket.sendall(b"".join(batch))
            data = self._rest
            while data.count(b"\r\n") < len(batch) * lines:
                more = self._socket.recv(_RECEIVE)
                if not more:
                    raise BrokenError("the server closed the connection")
                data += more
            found = data.split(b"\r\n", len(batch) * lines)
            self._rest = found.pop()
            yield from found

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


class ServerShelf:
    """Chunks by number. A chunk is there when all its keys are."""

    def __init__(self, server: Server, steering: Steering, *, chunks: int, stripes: int) -> None:
        """chunks: how many it should have room for; ``balance`` sees to it."""
        self._server = server
        self._steering = steering
        self._chunks = chunks
        self._stripes = stripes
        self.empty = self.room = 0  # bytes: of the server without values, and for them
        self._pipeline = Pipeline(server.port)
        self.commands = 0
        self.rejected = 0

    def held(self, chunks: Sequence[int]) -> list[bool]:
        """Which are there, without marking them as used."""
        words = [b"EXISTS"] + [KEY] * self._stripes
        head = b"*%d\r\n$6\r\nEXISTS\r\n" % len(words)
        asked = [
            head + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in self._keys(chunk))
            for chunk in chunks
        ]
        whole = b":%d" % self._stripes
        return [reply == whole for reply in self._pipeline.ask(asked)]

    def mark(self, uses: Iterable[tuple[int, Use]]) -> None:
        """Store or use chunks, in this order; the keys of one chunk last first."""
        commands = []
        for chunk, use in uses:
            if self._steering.asks(use.at_s):
                self._steering.learn(self._expiries())
            words = self._steering.command(use)
            commands += [encoded(words, key) for key in reversed(self._keys(chunk))]
        self.commands += len(commands)
        for reply in self._pipeline.ask(commands):
            if reply.startswith(b"-"):
                if not reply.startswith(b"-OOM"):
                    raise BrokenError(f"the server says {reply.decode()}")
                self.rejected += 1

    def balance(self) -> None:
        """Give it memory for the chunks it should hold: what a key takes depends on commands and tables."""
        held = _number(self._server.ask("DBSIZE")) / self._stripes
        if self._evicted_keys() and held:
            self.room = round(self.room * min(max(self._chunks / held, 0.9), 1.1))
        must(self._server.ask("CONFIG", "SET", "maxmemory", str(self.empty + self.room)))

    def _evicted_keys(self) -> int:
        return _figure(self._server, "evicted_keys")

    def keys(self) -> dict[int, int]:
        """How many keys of each chunk are there."""
        names: set[bytes] = set()
        cursor: bytes = b"0"
        while True:
            match must(self._server.ask("SCAN", cursor, "COUNT", str(_SCAN_KEYS))):
                case [bytes(cursor), [*found]]:
                    names.update(name for name in found if isinstance(name, bytes))
                case other:
                    raise BrokenError(f"SCAN: {other!r}")
            if cursor == b"0":
                break
        return dict(Counter(int(name.partition(b":")[0]) for name in names))

    def close(self) -> None:
        """Disconnect."""
        self._pipeline.close()

    def _expiries(self) -> list[int]:
        """When some keys expire, drawn at random. ``INFO`` has a mean of all, which moves in real time."""
        lines = list(self._pipeline.ask([b"RANDOMKEY\r\n"] * _DRAWN, lines=2))
        if lines[0].startswith(b"$-1"):
            return []
        asked = [b"PEXPIRETIME %b\r\n" % key for key in lines[1::2]]
        found = [int(reply[1:]) for reply in self._pipeline.ask(asked)]
        return [expiry for expiry in found if expiry > 0]  # some were evicted in between

    def _keys(self, chunk: int) -> list[bytes]:
        return [b"%d:%d" % (chunk, stripe) for stripe in range(self._stripes)]


@contextmanager
def server_shelf(
    steering: Steering, *, chunks: int, stripes: int, samples: int, end_s: float
) -> Iterator[ServerShelf]:
    """An empty server with room for so many chunks."""
    with running_server("--maxmemory-samples", str(samples)) as server:
        value = Random(5).randbytes(VALUE_BYTES)
        must(server.ask("SET", "value", value))
        dump = must(server.ask("DUMP", "value"))
        if not isinstance(dump, bytes):
            raise BrokenError(f"DUMP: {dump!r}")
        match must(server.ask("TIME")):
            case [bytes(seconds), bytes(micros)]:
                server_s = int(seconds) + int(micros) / 1e6
            case other:
                raise BrokenError(f"TIME: {other!r}")
        steering.begin(Beginning(value, dump, end_s, server_s, time.monotonic()))
        shelf = ServerShelf(server, steering, chunks=chunks, stripes=stripes)
        try:
            count = max(chunks, -(-_SAMPLE_KEYS // stripes))
            before = _used(server)
            shelf.mark((1_000_000 + number, Use(0.0, 0, 0, stored=True)) for number in range(count))
            shelf.room = (_used(server) - before) * chunks // count
            must(server.ask("FLUSHALL", "SYNC"))
            shelf.empty = _used(server)
            shelf.balance()
            must(server.ask("CONFIG", "SET", "maxmemory-policy", steering.policy))
            shelf.commands = 0
            yield shelf
        finally:
            shelf.close()


def _number(reply: Reply) -> int:
    if isinstance(reply, int):
        return reply
    raise BrokenError(f"no number: {reply!r}")


def _used(server: Server) -> int:
    return _figure(server, "used_memory")


def _figure(server: Server, name: str) -> int:
    info = server.ask("INFO")
    facts = info_facts(info) if isinstance(info, bytes) else {}
    if name not in facts:
        raise BrokenError(f"INFO has no {name}")
    return int(facts[name])
