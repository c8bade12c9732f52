"""``kvferry explain REQUEST``: why a request hit or missed."""

import argparse
import json
import sys
from typing import Any

from kvferry.cli import router_asked
from kvferry.cli.address import add_socket_argument, asked, rendered
from kvferry.cli.table import LINE_COLUMNS, clip, count, duration, labelled, short_namespace
from kvferry.cli.unused import NODE_FLAGS, refuse
from kvferry.config import format_size
from kvferry.errors import MisconfiguredError

# What a reason means, for people; the words are those of the node's answers.
MEANING = {
    "complete": "everything that was asked for",
    "absent": "no tier has the next chunk",
    "evicted": "the next chunk was in host memory, was evicted, and no other tier has it",
    "cheaper-to-recompute": "loading would have taken longer than recomputing",
    "pool-full": "all of host memory was in use",
    "tier-down": "a tier, or a keeper, did not answer lately",
    "deadline": "it took longer than its deadline",
    "stalled": "nothing arrived for the stall timeout",
    "corrupt": "bytes did not match their checksum; they were removed",
    "failed": "the tier reported an error",
    "gone": "present when asked for, gone when fetched",
    "limit": "too many loads at once",
    "expired": "the engine never ended the load",
    "node-down": "the engine has no connection to its node",
    "breaker-open": "the node had not answered the engine lately",
    "timeout": "the node did not answer within the bounded wait",
    "node-restarted": "the node restarted in between",
    "refused": "the node declined",
    "ended": "the engine had ended the load already",
    "closed": "the engine was shutting down",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which request of which node."""
    parser.add_argument("request", nargs="?", help="id of the API response, or the beginning of one")
    add_socket_argument(parser)
    router_asked.add_router_argument(parser)
    parser.add_argument("--json", action="store_true", help="the whole record, for programs")


def render(record: dict[str, Any]) -> str:
    """One request's record as text for people."""
    tokens = record["chunk_tokens"]
    asked = record["chunks"] - record["engine_chunks"]
    reused: dict[str, int] = record["reused_chunks"]
    lines = [
        f"request   {record['request_id']} on {record['engine'] or 'an engine'}",
        f"prompt    {count(record['prompt_tokens'])} tokens = {count(record['chunks'])} chunks of {tokens}",
        f"engine    {count(record['engine_chunks'])} chunks were in the engine's own cache",
    ]
    if record["namespace"]:
        model = clip(record["model"] or "unnamed", LINE_COLUMNS - 9)
        lines.append(labelled("namespace", f"{short_namespace(record['namespace'])} {model}"))
    lines += [
        f"{tier:<9} {count(number)} chunks = {count(number * tokens)} tokens, "
        f"{format_size(record['reused_bytes'].get(tier, 0))}"
        for tier, number in reused.items()
    ]
    missing = record["first_missing_chunk"]
    why = _reason(record["reason"])
    if missing is None:
        lines.append(f"result    all {count(asked)} chunks asked for were found")
    else:
        lines.append(f"result    chunk {count(missing)} is the first one not reused: {why}")
        lines += _missing_part(record)
    if record["load_reason"] not in ("", "complete"):
        at = "" if record["failed_chunk"] is None else f" at chunk {count(record['failed_chunk'])}"
        lines.append(f"load      ended{at}: {_reason(record['load_reason'])}; the rest was recomputed")
    lines.append(
        f"times     lookup {duration(record['lookup_s'])}, load {duration(record['load_s'])} "
        f"(estimate {duration(record['load_estimate_s'] or None)}, "
        f"recompute {duration(record['recompute_estimate_s'] or None)}, "
        f"deadline {duration(record['deadline_s'])})"
    )
    return "\n".join(lines + _seen_by_engine(record["report"]))


def _missing_part(record: dict[str, Any]) -> list[str]:
    """Which part it was, where parts differ in what needs them."""
    part, trailing = record["missing_part"], record["missing_trailing"]
    if part is None or (part == 0 and not trailing):
        return []
    last = "the last chunk" if trailing == 1 else f"the last {count(trailing)} chunks"
    needed = f"{last} before the end of a prefix" if trailing else "every chunk"
    return [f"          of the prompt, part {part} is missing, which is needed of {needed}"]


def _reason(word: str) -> str:
    meaning = MEANING.get(word)
    return f"{word} ({meaning})" if meaning else word or "unknown"


def _seen_by_engine(report: dict[str, Any]) -> list[str]:
    if not report:
        return []
    lines = [
        f"engine    loaded {count(report['loaded_tokens'])} tokens, {format_size(report['loaded_bytes'])} "
        f"in {duration(report['load_s'])}; {count(report['failed_tokens'])} tokens failed; "
        f"stored {count(report['stored_chunks'])} chunks"
    ]
    said = ", ".join(
        text for text in (_reason(report["reason"]) if report["reason"] else "", report["note"]) if text
    )
    return [*lines, f"          it says: {said}"] if said else lines


def main(args: argparse.Namespace) -> int:
    """Ask the node and print every request that matches, the newest first."""
    from kvferry.node.wire import MAX_REQUEST_ID

    args.request, args.router = router_asked.request_and_router(args.request, args.router)
    request = args.request.strip()
    if not request.isprintable() or not 1 <= len(request) <= MAX_REQUEST_ID:
        raise MisconfiguredError(
            f"request {request!r} is no id of 1 to {MAX_REQUEST_ID} printable characters; "
            "give the id of an API response, like cmpl-..."
        )
    if args.router is not None:
        refuse(args, NODE_FLAGS, why="names a node, and --router asks a router: leave one of them out")
        return _of_router(args, request)
    with asked(args) as admin:
        records = admin.explain(request)
        version = admin.welcome.version
    if args.json:
        print(json.dumps(records, indent=2))
    elif records:
        print("\n\n".join(rendered(render, record, version=version) for record in records))
    if not records:
        print(
            f"kvferry: the node knows no request {args.request!r}; it keeps the newest few thousand: "
            "ask the node on the host of the engine that answered",
            file=sys.stderr,
        )
    return 0 if records else 1


def _of_router(args: argparse.Namespace, request: str) -> int:
    from kvferry.cli import explain_router

    record = router_asked.explain(args, request)
    if record is None:
        print(
            f"kvferry: the router knows no request {args.request!r}; it keeps the newest 4,096 for which it "
            "compared costs, which no other --policy does",
            file=sys.stderr,
        )
        return 1
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        print(rendered(explain_router.render, record, version="?"))
    return 0
