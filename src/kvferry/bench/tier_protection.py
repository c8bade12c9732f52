"""What protection costs in ``kvferry bench tiers``: each way beside a path that checks nothing.

The unchecked path exists here alone: no setting of a node leads to it.
"""

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.spread import spread
from kvferry.bench.tier_arms import Parts, TierArm, parts_in_memory
from kvferry.identity.header import verify_header
from kvferry.identity.sealing import KEY_BYTES, KeyRing, SealingKey
from kvferry.testing.servers import Server, running_server, running_tls_server
from kvferry.tiers.valkey.protection import (
    PIECE_BYTES,
    Checksums,
    Guard,
    Intake,
    Protection,
    Received,
    Sealed,
    ValueName,
)
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl, parse_url

UNCHECKED = "unchecked"
PART_MIB = 10.0
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Unchecked(Checksums):
    """Headers are verified, payloads taken as they come."""

    def guard(self) -> Guard:
        """See Protection."""
        return self

    def receiving(self, header: bytes, name: ValueName, *, version: int, into: memoryview) -> Intake:
        """See Guard."""
        del version
        return _Taken(verify_header(header, name.key, part_bytes=name.part_bytes, stripe=name.stripe), into)


class _Taken:
    def __init__(self, expected: bytes, into: memoryview) -> None:
        self._expected = expected
        self._into = into

    def pieces(self) -> Iterator[memoryview]:
        """See Intake. In the pieces of the others, so that only their work differs."""
        for start in range(0, self._into.nbytes, PIECE_BYTES):
            yield self._into[start : start + PIECE_BYTES]

    def result(self) -> Received:
        """See Intake."""
        return Received(self._expected, intact=True)


@dataclass(frozen=True, slots=True)
class Protected:
    """One way to protect, one operation. ratio: of its GB/s to the unchecked path's, medians over pairs.

    cpu_s_gb: of the client and of the server, CPU seconds per GB; cpu_ratio: of their sum.
    """

    server: str
    operation: str
    protection: str
    gb_s: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    client_cpu_s_gb: float
    server_cpu_s_gb: float
    client_cpu_added_s_gb: float
    cpu_ratio: float


@dataclass(frozen=True, slots=True)
class _Sample:
    gb_s: float
    client_s_gb: float
    server_s_gb: float


def measure_protection(
    rounds: int, sample_bytes: int, *, room: Sequence[str], part_mib: float = PART_MIB
) -> list[Protected]:
    """Checksum and AES-GCM on Valkey; the same with TLS on a server that speaks it.

    MisconfiguredError where a part is missing.
    """
    keys = KeyRing([SealingKey(secrets.token_bytes(KEY_BYTES))])
    with running_server(*room) as server:
        here = server.settings().url
        ways: list[tuple[str, ValkeyUrl, Protection]] = [
            (UNCHECKED, here, Unchecked()),
            ("checksum", here, Checksums()),
            ("AES-GCM", here, Sealed(keys)),
        ]
        found = _measured(server, ways, rounds, sample_bytes, part_mib)
    with running_tls_server(*room) as (server, url):
        here, tls = server.settings().url, parse_url(url)
        ways = [
            (UNCHECKED, here, Unchecked()),
            ("checksum", here, Checksums()),
            ("TLS", tls, Checksums()),
            ("TLS + AES-GCM", tls, Sealed(keys)),
        ]
        return found + _measured(server, ways, rounds, sample_bytes, part_mib)


def _measured(
    server: Server,
    ways: Sequence[tuple[str, ValkeyUrl, Protection]],
    rounds: int,
    sample_bytes: int,
    part_mib: float,
) -> list[Protected]:
    rows: list[Protected] = []
    with contextlib.ExitStack() as stack:
        arms: dict[str, TierArm] = {}
        version = ""
        for name, url, protection in ways:
            tier = ValkeyTier.connect(ValkeySettings(url, protection=protection))
            arms[name] = TierArm(tier)
            stack.callback(arms[name].close)
            version = tier.statistics().detail["server"]
        parts = stack.enter_context(parts_in_memory(int(part_mib * (1 << 20)), sample_bytes))

        def empty() -> None:
            server.ask("FLUSHALL", "SYNC")

        sets = _turns(server, {name: arm.set for name, arm in arms.items()}, parts, rounds, before=empty)
        empty()
        for arm in arms.values():
            arm.prepare(parts)
        gets = _turns(server, {name: arm.get for name, arm in arms.items()}, parts, rounds)
        parts.verify()
        for operation, samples in (("GET", gets), ("SET", sets)):
            plain = samples[UNCHECKED]
            rows += [_row(version, operation, name, plain, of) for name, of in samples.items()]
    return rows


def _turns(
    server: Server,
    works: dict[str, Callable[[Parts], None]],
    parts: Parts,
    rounds: int,
    *,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[_Sample]]:
    """Samples per arm, in turn and back. The first round warms up and is not counted."""
    samples: dict[str, list[_Sample]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            before()
            server_s, client_s, began = _cpu_s(server), time.process_time(), time.perf_counter()
            works[name](parts)
            elapsed_s = time.perf_counter() - began
            client_s, server_s = time.process_time() - client_s, _cpu_s(server) - server_s
            gb = parts.nbytes / 1e9
            if number:
                samples[name].append(_Sample(gb / elapsed_s, client_s / gb, server_s / gb))
    return samples


def _cpu_s(server: Server) -> float:
    """CPU seconds the server has used; in steps of 10 ms, so only sums over rounds mean something."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def _row(
    server: str, operation: str, name: str, plain: Sequence[_Sample], samples: Sequence[_Sample]
) -> Protected:
    ratios = spread([sample.gb_s / base.gb_s for base, sample in zip(plain, samples, strict=True)])
    added = [sample.client_s_gb - base.client_s_gb for base, sample in zip(plain, samples, strict=True)]
    total, of_plain = _total(samples), _total(plain)
    return Protected(
        server=server,
        operation=operation,
        protection=name,
        gb_s=statistics.median(sample.gb_s for sample in samples),
        ratio=ratios.median if ratios else 0.0,
        ratio_quartiles=(ratios.low, ratios.high) if ratios else (0.0, 0.0),
        client_cpu_s_gb=statistics.median(sample.client_s_gb for sample in samples),
        server_cpu_s_gb=statistics.mean(sample.server_s_gb for sample in samples),
        client_cpu_added_s_gb=statistics.median(added),
        cpu_ratio=total / of_plain if of_plain else 0.0,
    )


def _total(samples: Sequence[_Sample]) -> float:
    return statistics.median(s.client_s_gb for s in samples) + statistics.mean(s.server_s_gb for s in samples)


def protection_lines(rows: Sequence[Protected]) -> list[str]:
    """A table."""
    head = ("", "", "GB/s", "ratio", "quartiles", "client CPU", "added", "server CPU", "both, ratio")
    lines: list[str] = []
    for server in dict.fromkeys(row.server for row in rows):
        lines += [f"protection on {server}, parts of {PART_MIB:g} MiB, CPU s/GB", _line(head)]
        for row in (row for row in rows if row.server == server):
            low, high = row.ratio_quartiles
            cells = [row.operation, row.protection, f"{row.gb_s:.2f}", f"{row.ratio:.2f}"]
            cells += [f"{low:.2f}-{high:.2f}", f"{row.client_cpu_s_gb:.3f}"]
            cells += [
                f"{row.client_cpu_added_s_gb:+.3f}",
                f"{row.server_cpu_s_gb:.3f}",
                f"{row.cpu_ratio:.2f}",
            ]
            lines.append(_line(cells))
        lines.append("")
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:4}{cells[1]:14}" + "".join(f"{cell:>12}" for cell in cells[2:])
