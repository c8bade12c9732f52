"""What a keeper that copies costs those who read Valkey, in ``kvferry bench tiers``.

One reader fetches all parts again and again; in every second turn a keeper, a process of its own, copies the
same parts to its disk and to a directory for objects meanwhile. Server, reader and keeper share this host's
cores, so a turn with a keeper also has less of them.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.addresses import Address
from kvferry.bench.tier_arms import WAIT_S, Parts, TierArm, parts_in_memory
from kvferry.demo.processes import wait_until
from kvferry.errors import BrokenError, KvferryError, RefusedError
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.admin import KeeperAdmin
from kvferry.keeper.client import Keepers
from kvferry.keeper.wire import DropTier
from kvferry.testing.processes import Program
from kvferry.testing.servers import Server, free_ports, running_server
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.tier import ValkeyTier

PART_BYTES = 5 << 19
MIN_TURN_S = 1.0


@dataclass(frozen=True, slots=True)
class FlushRow:
    """Medians of turns alone and with a keeper that copies. server_cpu_s_gb: of all that the server sent.

    copied_share: bytes that the keeper read per byte of the reader's, meanwhile. ratio, of pairs of turns:
    the reader's speed with a keeper to alone; cpu_ratio: the server's CPU seconds per GB likewise.
    """

    alone_gb_s: float
    flushing_gb_s: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    alone_server_cpu_s_gb: float
    flushing_server_cpu_s_gb: float
    cpu_ratio: float
    copied_share: float


@dataclass(frozen=True, slots=True)
class _Turn:
    gb_s: float
    server_cpu_s_gb: float
    copied_share: float


def measure_flush(rounds: int, sample_bytes: int) -> FlushRow:
    """Raises MisconfiguredError where it cannot."""
    alone: list[_Turn] = []
    flushing: list[_Turn] = []
    with (
        running_server("--maxmemory", "8gb") as server,
        parts_in_memory(PART_BYTES, sample_bytes) as parts,
        _keeper(server, 4 * sample_bytes) as address,
    ):
        tier = TierArm(ValkeyTier.connect(server.settings()))
        keepers = Keepers([address], access=KeeperAccess(), node="bench")
        try:
            tier.prepare(parts)
            wait_until(lambda: keepers.statistics().up > 0, what="the keeper's connection", timeout_s=WAIT_S)
            for number in range(rounds + 1):
                for copies in (False, True) if number % 2 else (True, False):
                    if copies:
                        keepers.used(parts.refs)
                    turn = _turn(server, tier, parts)
                    if copies:
                        _settle(address, len(parts.refs))
                    if number:  # the first round warms up
                        (flushing if copies else alone).append(turn)
        finally:
            keepers.close()
            tier.close()  # joins the threads that may still fill the parts' memory
    return _row(alone, flushing)


def flush_lines(row: FlushRow | None) -> list[str]:
    """As text."""
    if row is None:
        return []
    low, high = row.ratio_quartiles
    copied = f"{row.copied_share:.0%}"
    return [
        f"reader beside a keeper that copies: {row.flushing_gb_s:.2f} GB/s, alone {row.alone_gb_s:.2f}, "
        f"ratio {row.ratio:.2f} ({low:.2f}-{high:.2f}); the keeper read {copied} as much meanwhile",
        f"Valkey's CPU s/GB of what it sent: {row.flushing_server_cpu_s_gb:.3f}, alone "
        f"{row.alone_server_cpu_s_gb:.3f}, ratio {row.cpu_ratio:.2f}",
        "",
    ]


@contextlib.contextmanager
def _keeper(server: Server, disk_bytes: int) -> Iterator[Address]:
    """A process of its own, with an empty disk and an empty directory for objects."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir="/var/tmp") as name:
        directory = Path(name)
        address = Address("127.0.0.1", free_ports(1)[0])
        command = [
            *(sys.executable, "-m", "kvferry", "keeper", "--listen", str(address)),
            *("--valkey", server.url, "--metrics-port", "0"),
            *("--disk", str(directory / "disk"), "--disk-size", str(disk_bytes)),
            *("--objects", f"file://{directory}/objects"),
        ]

        def ready() -> bool:
            with contextlib.suppress(KvferryError):
                _status(address)
                return True
            return False

        with Program("keeper", command, directory=directory, ready=ready):
            yield address


def _turn(server: Server, tier: TierArm, parts: Parts) -> _Turn:
    """Reads for at least MIN_TURN_S."""
    sent, cpu_s, read = _sent_bytes(server), _cpu_s(server.pid), 0
    began = time.perf_counter()
    while True:
        tier.get(parts)
        read += parts.nbytes
        elapsed_s = time.perf_counter() - began
        if elapsed_s >= MIN_TURN_S:
            break
    cpu_s, sent = _cpu_s(server.pid) - cpu_s, _sent_bytes(server) - sent
    return _Turn(read / elapsed_s / 1e9, cpu_s / (sent / 1e9), max(0.0, sent / read - 1.0))


def _settle(address: Address, parts: int) -> None:
    """All copies made, and gone again, so that the next turn has as many to make."""

    def copied() -> bool:
        status = _status(address)
        held = [int(tier["detail"]["parts"]) for tier in status["tiers"] if tier["name"] != "valkey"]
        return min(held) >= parts and not status["keep"]["parts"] and not status["flush"]["parts"]

    wait_until(copied, what="the copies of a turn", timeout_s=WAIT_S)
    with KeeperAdmin(address, access=KeeperAccess()) as admin:
        for tier in (DropTier.OBJECTS, DropTier.DISK):
            if (dropped := admin.drop(tier, alone=True)).outcome is not Outcome.OK:
                raise RefusedError(f"the keeper could not drop {tier.value}: {dropped.outcome.value}")


def _status(address: Address) -> dict[str, Any]:
    with KeeperAdmin(address, access=KeeperAccess()) as admin:
        found: dict[str, Any] = admin.status()["keeper"]
        return found


def _sent_bytes(server: Server) -> int:
    answer = server.ask("INFO", "stats")
    if not isinstance(answer, bytes):
        raise BrokenError(f"INFO answered with a {type(answer).__name__}")
    (line,) = [line for line in answer.split(b"\r\n") if line.startswith(b"total_net_output_bytes:")]
    return int(line.partition(b":")[2])


def _cpu_s(pid: int) -> float:
    """User and system time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _row(alone: Sequence[_Turn], flushing: Sequence[_Turn]) -> FlushRow:
    pairs = list(zip(alone, flushing, strict=True))
    ratios = [beside.gb_s / single.gb_s for single, beside in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return FlushRow(
        alone_gb_s=statistics.median(turn.gb_s for turn in alone),
        flushing_gb_s=statistics.median(turn.gb_s for turn in flushing),
        ratio=statistics.median(ratios),
        ratio_quartiles=(quartiles[0], quartiles[2]),
        alone_server_cpu_s_gb=statistics.median(turn.server_cpu_s_gb for turn in alone),
        flushing_server_cpu_s_gb=statistics.median(turn.server_cpu_s_gb for turn in flushing),
        cpu_ratio=statistics.median(b.server_cpu_s_gb / a.server_cpu_s_gb for a, b in pairs),
        copied_share=statistics.median(turn.copied_share for turn in flushing),
    )
