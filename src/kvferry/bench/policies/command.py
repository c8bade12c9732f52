"""Hit rates of eviction policies on traces and made-up traffic: why the pool's own is what it is.

Nothing is measured in time, so the figures are the same on every machine.
"""

import argparse
import json
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvferry.bench.policies import candidates, mixes
from kvferry.cli.table import table
from kvferry.errors import MisconfiguredError
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy, hits, last_half
from kvferry.traces.request import KEY_BYTES, Request
from kvferry.traces.reuse import UNKNOWN, ReuseLog
from kvferry.traces.source import Malformed, TraceFile

SHARES = (0.01, 0.03, 0.1, 0.25, 0.5, 1.0)  # of the distinct blocks
MAX_BLOCKS_LOOKED_AT = 2_000_000  # beyond, neighbouring blocks count as one
SESSIONS_A_DAY = 350  # at which sessions without dates are begun
CANDIDATES: dict[str, Callable[[int], candidates.Candidate]] = {
    "two queues, 10% new": lambda capacity: candidates.TwoQueues(capacity, 0.1),
    "two queues, 30% new": lambda capacity: candidates.TwoQueues(capacity, 0.3),
    "two queues, 60% new": lambda capacity: candidates.TwoQueues(capacity, 0.6),
    "ARC": candidates.Arc,
    "S3-FIFO": candidates.S3Fifo,
    "SIEVE": candidates.Sieve,
    "W-TinyLFU": candidates.TinyLfu,
    "GDSF": candidates.Gdsf,
    "uses and age": candidates.UsesAndAge,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which traces, and at which capacities."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="traces, as kvferry analyze reads them")
    parser.add_argument("--blocks", metavar="N,N", help="capacities (default: shares of the distinct blocks)")
    parser.add_argument("--no-mixes", action="store_true", help="leave the made-up traffic out")
    parser.add_argument("--json", action="store_true", help="all figures, for programs")


def main(args: argparse.Namespace) -> int:
    """Simulate all, print a table per trace and what follows from all of them."""
    found = []
    for name, log in _logs(args):
        print(f"kvferry: {name}", file=sys.stderr)
        result = weigh(log, _capacities(args.blocks, log))
        found.append({"trace": name, **result})
        if not args.json:
            print(render(name, result))
    summary = summarize(found)
    if args.json:
        print(json.dumps({"traces": found, "summary": summary}, indent=2))
    else:
        print(_summary(summary))
    return 0


def weigh(log: ReuseLog, capacities: Sequence[int]) -> dict[str, Any]:
    """Hit rates per policy and capacity, over the last half of the requests and over all."""
    half = last_half(log)
    wanted, wanted_late = sum(log.input_tokens), sum(log.input_tokens[half:])
    rates = {
        policy.value: [
            {"last_half": at.last_half_tokens / wanted_late, "whole_trace": at.tokens / wanted}
            for at in hits(log, policy, capacities)
        ]
        for policy in Policy
    }
    paths = _paths(log)
    for name, make in CANDIDATES.items():
        rates[name] = []
        for capacity in capacities:
            tokens = [0, 0]
            cache = make(capacity)
            for number, path in enumerate(paths):
                tokens[number >= half] += log.tokens(number, cache.request(path))
            rates[name].append({"last_half": tokens[1] / wanted_late, "whole_trace": sum(tokens) / wanted})
    return {
        "requests": len(log),
        "block_tokens": log.block_tokens,
        "distinct_blocks": log.distinct_blocks,
        "capacities": list(capacities),
        "rates": rates,
    }


def summarize(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per policy: points gained on LRU in the last half, on average and at worst."""
    rows = []
    for policy in found[0]["rates"] if found else []:
        gains = [
            (100 * (at["last_half"] - lru["last_half"]), trace["trace"], capacity)
            for trace in found
            for at, lru, capacity in zip(
                trace["rates"][policy], trace["rates"][Policy.LRU.value], trace["capacities"], strict=True
            )
        ]
        points, trace, capacity = min(gains)
        rows.append(
            {
                "policy": policy,
                "mean_points": sum(gain[0] for gain in gains) / len(gains),
                "worst_points": points,
                "worst_trace": trace,
                "worst_blocks": capacity,
            }
        )
    return rows


def render(name: str, result: dict[str, Any]) -> str:
    """The table of one trace."""
    head = [f"{capacity:,}" for capacity in result["capacities"]]
    rows = [
        [policy, *(f"{100 * at['last_half']:.1f}" for at in rates)]
        for policy, rates in result["rates"].items()
    ]
    return (
        f"{name}: {result['requests']:,} requests, {result['distinct_blocks']:,} distinct blocks of "
        f"{result['block_tokens']} tokens\nHit rate in %, last half, by capacity in blocks\n\n"
        + table(["policy", *head], rows)
        + "\n"
    )


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        there = f"{row['worst_trace']}, {row['worst_blocks']:,} blocks" if row["worst_points"] < 0 else ""
        lines.append([row["policy"], f"{row['mean_points']:+.1f}", f"{row['worst_points']:+.1f}", there])
    return table(["POINTS ON LRU", "mean", "worst", "where"], lines)


def _capacities(asked: str | None, log: ReuseLog) -> list[int]:
    if asked is None:
        return [max(8, int(share * log.distinct_blocks)) for share in SHARES]
    try:
        capacities = [int(number) for number in asked.split(",")]
    except ValueError as error:
        raise MisconfiguredError(f"--blocks {asked}: give whole numbers, as 6553,13107") from error
    if min(capacities) < 1:
        raise MisconfiguredError(f"--blocks {asked}: a cache holds at least 1 block")
    return capacities


def _logs(args: argparse.Namespace) -> Iterator[tuple[str, ReuseLog]]:
    for file in args.files:
        source, malformed = TraceFile(Path(file)), Malformed()
        requests = [request for request in source.requests(malformed) if request.blocks is not None]
        if not requests:
            raise MisconfiguredError(f"{file}: no line says what its prompt shares with others")
        if source.reader.clock is Clock.SESSION:
            requests = _interleaved(requests)
        yield source.path.name, _log(requests, source.reader.block_tokens)
    if not args.no_mixes:
        for mix in mixes.MIXES:
            yield mix, _log(mixes.requests_of(mix), mixes.BLOCK_TOKENS)


def _log(requests: Sequence[Request], block_tokens: int) -> ReuseLog:
    blocks = sum(len(request.blocks or b"") // KEY_BYTES for request in requests)
    joined = -(-blocks // MAX_BLOCKS_LOOKED_AT)
    log = ReuseLog(block_tokens * joined)
    for request in requests:
        keys = array("q", request.blocks or b"")[joined - 1 :: joined].tobytes()
        log.add(Request(request.time_s, request.input_tokens, request.output_tokens, keys))
    return log


def _interleaved(requests: Sequence[Request]) -> list[Request]:
    """Sessions that are timed each from its own start, as if they had begun at random times."""
    rng = random.Random(7)
    span_s = 86400 * len({request.session for request in requests}) / SESSIONS_A_DAY
    begun: dict[str | None, float] = {}
    timed = []
    for number, request in enumerate(requests):
        start_s = begun.get(request.session)
        if start_s is None:
            start_s = begun[request.session] = rng.random() * span_s
        timed.append((start_s + (request.time_s or 0.0), number))
    return [requests[number] for _, number in sorted(timed)]


def _paths(log: ReuseLog) -> list["array[int]"]:
    """Per request, the numbers of its blocks. Equal numbers: the same content after the same."""
    paths: list[array[int]] = []
    numbered = 0
    for request in range(len(log)):
        path = array("i")
        for previous, blocks in log.runs(request):
            path += paths[previous][len(path) : len(path) + blocks]
        if log.blocks[request] != UNKNOWN:
            missing = log.blocks[request] - len(path)
            path.extend(range(numbered, numbered + missing))
            numbered += missing
        paths.append(path)
    return paths
