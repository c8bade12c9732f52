"""``kvferry status``: what the node of this host, a keeper or a router holds and does."""

import argparse
import json
from typing import Any

from kvferry.cli import router_asked
from kvferry.cli.address import add_socket_argument, asked, rendered
from kvferry.cli.keepers import OTHERS, add_keeper_arguments
from kvferry.cli.table import (
    LINE_COLUMNS,
    causes,
    clip,
    compact,
    count,
    duration,
    labelled,
    share,
    short_namespace,
    table,
)
from kvferry.cli.unused import KEEPER_FLAGS, NODE_FLAGS, refuse
from kvferry.config import format_size
from kvferry.keeper.rendezvous import complaint, namesakes

# Details of a tier that get a line of their own under the table; the others share one, these first.
_LINES = ("warning", "breaker_open", "denied", "shards")
_FIRST = ("server", "mode", "url")
_ENGINE_COLUMNS = 30
_DOMAIN_COLUMNS = 12
_MAX_NAMESPACES = 16
_MAX_KEEPERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which node, and for whom the answer is."""
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the whole status, for programs")
    add_keeper_arguments(parser, text="of these keepers, instead of the node")
    router_asked.add_router_argument(parser)
    parser.epilog = OTHERS


def render(status: dict[str, Any]) -> str:
    """The status document as text for people, every number with its unit."""
    counters: dict[str, Any] = status["counters"]
    lines = [
        labelled(
            "node",
            f"{status['pid']} at {status['socket_path']}, kvferry {status['version']}, "
            f"up {duration(status['uptime_s'])}",
        ),
        "",
        _tiers(status, counters),
        "",
        labelled(
            "lookups",
            f"{count(counters['lookups'])} for {count(counters['lookup_chunks'])} chunks: "
            f"{count(sum(counters['hit_chunks'].values()))} hit "
            f"({share(sum(counters['hit_chunks'].values()), counters['lookup_chunks'])}), "
            f"{count(counters['missed_chunks'])} missed, "
            f"{count(counters['recomputed_chunks'])} cheaper to recompute",
        ),
        labelled("failures", causes(counters["failed"])),
        labelled(
            "running",
            f"{count(status['loads'])} loads, {count(status['fetches'])} fetches, "
            f"{format_size(status['writeback_backlog_bytes'])} waiting to be written to "
            f"{'disk' if status['tier'] and status['tier']['name'] == 'disk' else 'Valkey'}",
        ),
    ]
    if (feed := status.get("feed")) is not None:
        routers = f"{count(feed['followers'])} routers follow at {feed['address']}"
        lines.append(labelled("feed", f"{routers}, {count(feed['prefetches'])} prefetches for them"))
    if any((unsaved := _unsaved(counters)).values()):
        lines.append(labelled("unsaved", f"parts: {causes(unsaved)}"))
    if status["defects"]:
        lines.append(
            labelled("defects", f"{count(status['defects'])} (see the node's log, and please report them)")
        )
    return "\n".join([*lines, "", _engines(status["engines"]), *_namespaces(status["namespaces"])])


def _unsaved(counters: dict[str, Any]) -> dict[str, int]:
    """Parts that were not stored, or not behind memory, and why."""
    declined = {f"pool {cause}": number for cause, number in counters["reserve_declined"].items()}
    for usual in ("pool exists", "pool filling"):  # stored already, or by somebody else now
        declined.pop(usual, None)
    return {**declined, "backlog full": counters["store_dropped_parts"], **counters["store_failed"]}


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
            compact(held["evicted_parts"]),
        ]
    ]
    tier: dict[str, Any] | None = status["tier"]
    keepers: dict[str, Any] | None = status.get("keepers")
    if tier is not None:
        rows.append(
            [
                tier["name"],
                tier["state"],
                "-",  # a node does not know what others have put there
                *_hits(counters, tier["name"]),
                format_size(tier["fetched_bytes"]),
                format_size(tier["stored_bytes"]),
                "-",
            ]
        )
    if keepers is not None:
        rows += _deep(keepers, counters)
    text = table(["TIER", "STATE", "HOLDS", "HIT TOKENS", "HIT BYTES", "READ", "WRITTEN", "EVICTED"], rows)
    if tier is None:
        return text
    limits = _limits(status.get("quota"), status.get("write_rate"))
    return "\n".join([text, *_about(tier), *limits, *_keepers(keepers, counters)])


def _deep(keepers: dict[str, Any], counters: dict[str, Any]) -> list[list[str]]:
    """What lies behind Valkey, as far as something came from there."""
    up = [keeper["state"] == "up" for keeper in keepers["keepers"]]
    state = "up" if all(up) else "degraded" if any(up) else "down"
    return [
        [
            name,
            state,
            "-",
            *_hits(counters, name),
            format_size(counters["fetched_bytes"].get(name, 0)),
            "-",
            "-",
        ]
        for name in ("disk", "objects")
        if counters["hit_chunks"].get(name) or counters["fetched_bytes"].get(name)
    ]


def _keepers(keepers: dict[str, Any] | None, counters: dict[str, Any]) -> list[str]:
    """Which keepers there are, and what went wrong between them and this node."""
    if keepers is None:
        return []
    known: list[dict[str, Any]] = keepers["keepers"]
    up = [clip(keeper["address"], _ENGINE_COLUMNS) for keeper in known if keeper["state"] == "up"]
    named = f": {', '.join(up[:_MAX_KEEPERS])}" if up else ""
    lines = ["", labelled("keepers", f"{count(len(up))} of {count(len(known))} up{named}")]
    for keeper in [keeper for keeper in known if keeper["state"] != "up"][:_MAX_KEEPERS]:
        why = f": {keeper['error']}" if keeper["error"] else ""
        lines.append(labelled("", f"{keeper['address']} is {keeper['state']}{why}"))
    lines += [
        labelled("", complaint(name, addresses))
        for name, addresses in namesakes([(keeper["name"], keeper["address"]) for keeper in known]).items()
    ]
    untold = keepers["dropped_parts"] + sum(keeper["dropped_parts"] for keeper in known)
    failed = {
        "not told of": untold,
        **{f"not staged, {why}": n for why, n in counters["stage_failed"].items()},
    }
    if any(failed.values()):
        lines.append(labelled("", f"parts {causes(failed)}"))
    return lines


def _limits(quota: dict[str, Any] | None, write_rate: int | None) -> list[str]:
    """What the node may do in the tier, where that is limited."""
    lines = []
    if quota is not None:
        lines.append(
            f"quota: {format_size(quota['used_bytes'])} of {format_size(quota['quota_bytes'])} stored by "
            f"this node, {format_size(quota['removed_bytes'])} removed to stay within it"
        )
    if write_rate is not None:
        lines.append(f"write rate: at most {format_size(write_rate)}/s")
    return [labelled("", line) for line in lines]


def _about(tier: dict[str, Any]) -> list[str]:
    """Where a tier is and what it complains of, in lines under the table."""
    detail: dict[str, str] = tier["detail"]
    order = [*_FIRST, *sorted(detail.keys() - set(_FIRST) - set(_LINES))]
    words = [detail[name] if name in _FIRST else f"{name} {detail[name]}" for name in order if name in detail]
    lines = ["", labelled(tier["name"], ", ".join(words))] if words else [""]
    for name in _LINES:
        text = detail.get(name, "")
        if text and (name != "shards" or " " in text):  # a single one is the address in the URL
            lines.append(labelled("", f"{name.replace('_', ' ')}: {text}"))
    if any(tier["failed"].values()):
        lines.append(labelled("", f"failures: {causes(tier['failed'])}"))
    return lines


def _hits(counters: dict[str, Any], tier: str) -> list[str]:
    return [compact(counters["hit_tokens"].get(tier, 0)), format_size(counters["hit_bytes"].get(tier, 0))]


def _engines(engines: list[dict[str, Any]]) -> str:
    if not engines:
        return "no engine is connected; `kvferry flags vllm` prints the flag that connects one"
    rows = [
        [
            clip(engine["engine"], _ENGINE_COLUMNS),
            engine["role"],
            str(engine["rank"]),
            str(engine["pid"]),
            short_namespace(engine["namespace"]),
            clip(engine["domain"] or "-", _DOMAIN_COLUMNS),
            count(engine["loads"]),
            count(engine["reservations"]),
        ]
        for engine in engines
    ]
    return table(["ENGINE", "ROLE", "RANK", "PID", "NAMESPACE", "DOMAIN", "LOADS", "RESERVED"], rows)


def _namespaces(spaces: list[dict[str, Any]]) -> list[str]:
    """What each namespace is, the latest ones: for ``drop --namespace``."""
    shown = spaces[-_MAX_NAMESPACES:]
    lines = [
        labelled(
            "namespace",
            f"{(short := short_namespace(space['namespace']))} "
            f"{clip(space['label'] or 'unnamed', LINE_COLUMNS - len(short) - 1)}",
        )
        for space in shown
    ]
    if len(spaces) > len(shown):
        lines.append(labelled("", f"and {count(len(spaces) - len(shown))} earlier ones (--json)"))
    return ["", *lines] if lines else []


def main(args: argparse.Namespace) -> int:
    """Ask the node, the keepers that are named, or a router, and print."""
    if args.router is not None:
        others = (*NODE_FLAGS, *KEEPER_FLAGS)
        refuse(args, others, why="does not go with --router, which asks a router: leave one of them out")
        from kvferry.cli import router_status

        status = router_asked.status(args)
        version = str(status.get("version", "?"))
        text = (
            json.dumps(status, indent=2)
            if args.json
            else rendered(router_status.render, status, version=version)
        )
        print(text)
        return 0
    if args.keepers is not None:
        refuse(args, NODE_FLAGS, why="names a node, and --keepers asks keepers: leave one of them out")
        from kvferry.cli import keeper_status

        return keeper_status.main(args)
    refuse(args, KEEPER_FLAGS, why="is for asking keepers: name them with --keepers, or leave it out")
    with asked(args) as admin:
        status = admin.status()
        version = admin.welcome.version
    print(json.dumps(status, indent=2) if args.json else rendered(render, status, version=version))
    return 0
