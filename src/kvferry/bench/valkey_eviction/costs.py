"""What the commands of each way cost the server: CPU by the thousand keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.valkey_eviction.shelf import VALUE_BYTES, Pipeline
from kvferry.bench.valkey_eviction.steering import encoded
from kvferry.errors import BrokenError
from kvferry.testing.servers import Server, must, running_server

KEYS = 20_000
ROUNDS = 5
_LIFE = b"2592000000"
_VALUE = b"x" * VALUE_BYTES
_COMMANDS = {
    "TOUCH": (b"TOUCH",),
    "PEXPIRE": (b"PEXPIRE", _LIFE),
    "SET": (b"SET", _VALUE),
    "PSETEX": (b"PSETEX", _LIFE, _VALUE),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Server CPU, user and system. samples: of evictions, one a command; None where there was room."""

    command: str
    samples: int | None
    ms_per_1000: float


def measure_costs(samples: Sequence[int]) -> list[Cost]:
    """Each command on keys that are there, then stores at a full server."""
    costs: list[Cost] = []
    again = [b"k"] * ROUNDS
    with running_server() as server:
        pipeline = Pipeline(server.port)
        try:
            for name, words in _COMMANDS.items():
                _spent(server, pipeline, words, prefixes=again[:1])
                spent = _spent(server, pipeline, words, prefixes=again)
                costs.append(Cost(name, None, spent))
            for policy, name in (("allkeys-lru", "SET"), ("volatile-ttl", "PSETEX")):
                for number in samples:
                    _fill(server, pipeline, policy, name, samples=number)
                    new = [b"%d" % turn for turn in range(ROUNDS)]
                    spent = _spent(server, pipeline, _COMMANDS[name], prefixes=new)
                    costs.append(Cost(name, number, spent))
        finally:
            pipeline.close()
    return costs


def _fill(server: Server, pipeline: Pipeline, policy: str, name: str, *, samples: int) -> None:
    """Leave no room beyond ``KEYS`` keys."""
    must(server.ask("CONFIG", "SET", "maxmemory", "0"))
    must(server.ask("FLUSHALL", "SYNC"))
    must(server.ask("CONFIG", "SET", "maxmemory-policy", policy, "maxmemory-samples", str(samples)))
    _spent(server, pipeline, _COMMANDS[name], prefixes=[b"k"])
    must(server.ask("CONFIG", "SET", "maxmemory", f"{_figure(server, 'used_memory'):.0f}"))


def _spent(server: Server, pipeline: Pipeline, words: Sequence[bytes], *, prefixes: Sequence[bytes]) -> float:
    """The server's milliseconds per 1,000 commands, each of them on ``KEYS`` keys of each prefix."""
    before = _cpu_s(server)
    for prefix in prefixes:
        for reply in pipeline.ask(
            [encoded((words[0], b"%b:%d" % (prefix, key), *words[1:]), b"") for key in range(KEYS)]
        ):
            if reply.startswith(b"-"):
                raise BrokenError(f"the server says {reply.decode()}")
    return (_cpu_s(server) - before) * 1000 / (len(prefixes) * KEYS / 1000)


def _cpu_s(server: Server) -> float:
    return _figure(server, "used_cpu_user") + _figure(server, "used_cpu_sys")


def _figure(server: Server, name: str) -> float:
    info = server.ask("INFO")
    if isinstance(info, bytes):
        for line in info.decode().splitlines():
            if line.startswith(f"{name}:"):
                return float(line.partition(":")[2])
    raise BrokenError(f"INFO has no {name}")
