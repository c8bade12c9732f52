"""``kvferry status``: what the node of this host holds and does."""

import argparse
import json
from typing import Any

from kvferry.cli.address import add_socket_argument, node_socket, rendered
from kvferry.cli.table import causes, count, duration, share, table
from kvferry.config import client_token, format_size

# Details of a tier that are sentences: each gets a line of its own under the table.
_LINES = ("warning", "breaker_open")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which node, and for whom the answer is."""
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the whole status, for programs")


def render(status: dict[str, Any]) -> str:
    """The status document as text for people, every number with its unit."""
    counters: dict[str, Any] = status["counters"]
    lines = [
        f"node {status['pid']} at {status['socket_path']}, kvferry {status['version']}, "
        f"up {duration(status['uptime_s'])}",
        "",
        _tiers(status, counters),
        "",
        f"lookups   {count(counters['lookups'])} for {count(counters['lookup_chunks'])} chunks: "
        f"{count(sum(counters['hit_chunks'].values()))} hit "
        f"({share(sum(counters['hit_chunks'].values()), counters['lookup_chunks'])}), "
        f"{count(counters['missed_chunks'])} missed, "
        f"{count(counters['recomputed_chunks'])} cheaper to recompute",
        f"failures  {causes(counters['failed'])}",
        f"running   {count(status['loads'])} loads, {count(status['fetches'])} fetches, "
        f"{format_size(status['writeback_backlog_bytes'])} waiting to be written to Valkey",
    ]
    if status["defects"]:
        lines.append(f"defects   {count(status['defects'])} (see the node's log, and please report them)")
    return "\n".join([*lines, "", _engines(status["engines"])])


def _tiers(status: dict[str, Any], counters: dict[str, Any]) -> str:
    held: dict[str, Any] = status["catalogue"]
    rows = [
        [
            "memory",
            "up",
            f"{format_size(held['used_bytes'])} of {format_size(held['pool_bytes'])}",
            *_hits(counters, "memory"),
            "-",
            format_size(counters["committed_bytes"]),
            count(held["evicted_parts"]),
        ]
    ]
    tier: dict[str, Any] | None = status["tier"]
    if tier is not None:
        rows.append(
            [
                tier["name"],
                tier["state"],
                ", ".join(
                    f"{name} {tier['detail'][name]}" for name in sorted(tier["detail"]) if name not in _LINES
                )
                or "-",
                *_hits(counters, tier["name"]),
                format_size(tier["fetched_bytes"]),
                format_size(tier["stored_bytes"]),
                "-",
            ]
        )
    text = table(
        ["TIER", "STATE", "HOLDS", "HIT TOKENS", "HIT BYTES", "READ", "WRITTEN", "EVICTED PARTS"], rows
    )
    if tier is not None:
        for name in _LINES:
            if name in tier["detail"]:
                text += f"\n{tier['name']} {name.replace('_', ' ')}: {tier['detail'][name]}"
        if any(tier["failed"].values()):
            text += f"\n{tier['name']} failures: {causes(tier['failed'])}"
    return text


def _hits(counters: dict[str, Any], tier: str) -> list[str]:
    return [count(counters["hit_tokens"].get(tier, 0)), format_size(counters["hit_bytes"].get(tier, 0))]


def _engines(engines: list[dict[str, Any]]) -> str:
    if not engines:
        return "no engine is connected; `kvferry flags vllm` prints the flag that connects one"
    rows = [
        [
            engine["engine"],
            engine["role"],
            str(engine["rank"]),
            str(engine["pid"]),
            engine["label"] or "-",
            engine["domain"] or "-",
            count(engine["loads"]),
            count(engine["reservations"]),
        ]
        for engine in engines
    ]
    return table(["ENGINE", "ROLE", "RANK", "PID", "MODEL", "DOMAIN", "LOADS", "RESERVED"], rows)


def main(args: argparse.Namespace) -> int:
    """Ask the node and print."""
    from kvferry.client.admin import AdminClient

    with AdminClient(node_socket(args.socket), token=client_token()) as admin:
        status = admin.status()
        version = admin.welcome.version
    print(json.dumps(status, indent=2) if args.json else rendered(render, status, version=version))
    return 0
