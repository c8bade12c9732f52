"""``kvferry warm``: prefixes brought up before they are asked for, through an engine or from below."""

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvferry.cli.address import add_socket_argument, asked
from kvferry.cli.keepers import OTHERS, add_keeper_arguments, are_named, fleet, keeper_addresses
from kvferry.cli.progress import Progress
from kvferry.cli.table import causes, count, duration, share, table
from kvferry.cli.unused import KEEPER_FLAGS, NODE_FLAGS, refuse
from kvferry.config import format_size, parse_size
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.values import parse_age, parse_count

if TYPE_CHECKING:
    from kvferry.cli.warm_parts import Step
    from kvferry.cli.warm_prompts import Sums
    from kvferry.identity.names import PartRef

MAX_CONCURRENCY = 256
MAX_TIMEOUT_S = 86_400
VALKEY, MEMORY = "valkey", "memory"
NOTHING_USED = (
    "nothing to bring up: keepers count uses from their own start, and know of none in that time, or not one "
    "part fits --max"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which prefixes, and by whom."""
    engine = parser.add_argument_group("through an engine, which computes what nobody has")
    engine.add_argument("file", nargs="*", help="prompts: a text file, .jsonl (one a line), or - for lines")
    engine.add_argument("--engine", metavar="URL", help="its OpenAI API, like http://host:8000")
    engine.add_argument("--model", metavar="NAME", help="as the engine calls it (default: its only one)")
    engine.add_argument("--concurrency", metavar="N", help="prompts at a time (default 4)")
    engine.add_argument("--timeout", metavar="S", help="for one answer (default 600)")
    below = parser.add_argument_group("from disk and objects, by keepers")
    below.add_argument("--request", metavar="ID", help="the prompt of this request, as explain takes it")
    below.add_argument("--most-reused", metavar="AGE", help="what was used most, of the last, say, 24h")
    below.add_argument("--max", metavar="SIZE", help="of the most reused at most so much, like 50GiB")
    below.add_argument("--into", choices=[VALKEY, MEMORY], help="how far up (default valkey)")
    add_keeper_arguments(parser)
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the outcome for programs")
    parser.epilog = OTHERS


def main(args: argparse.Namespace) -> int:
    """One of the three; they are told apart by what is given."""
    ways = [
        args.engine is not None or bool(args.file),
        args.request is not None,
        args.most_reused is not None,
    ]
    if sum(ways) != 1:
        raise MisconfiguredError(
            "give one of these: --engine URL and files of prompts, --request ID, --most-reused AGE --max SIZE"
        )
    if (args.max is not None) != (args.most_reused is not None):
        raise MisconfiguredError(
            "--most-reused and --max belong together, like --most-reused 24h --max 50GiB"
        )
    if ways[0]:
        return _through_engine(args)
    return _from_below(args)


# -- through an engine -------------------------------------------------------------------------------


def _through_engine(args: argparse.Namespace) -> int:
    if args.engine is None or not args.file:
        lacks = "--engine URL" if args.engine is None else "a file of prompts"
        raise MisconfiguredError(f"{lacks} is missing: kvferry warm --engine http://host:8000 prompts.jsonl")
    refuse(
        args,
        ["--into", *KEEPER_FLAGS, *NODE_FLAGS],
        why="is for what nodes and keepers have; an engine stores by its own node: leave it out",
    )
    concurrency = _number("--concurrency", args.concurrency or "4", MAX_CONCURRENCY)
    timeout_s = _number("--timeout", args.timeout or "600", MAX_TIMEOUT_S)
    from kvferry.cli import warm_prompts

    engine = warm_prompts.Engine(args.engine, timeout_s=timeout_s)
    model = engine.model(args.model)
    hits, began, whole = engine.hits(), time.monotonic(), warm_prompts.total_bytes(args.file)
    with Progress() as progress:

        def show(sums: "Sums") -> None:
            if progress.due:
                read = f", {share(sums.read_bytes, whole)} of the files" if whole else ""
                progress.show(f"{count(sums.prompts)} prompts, {count(sums.prompt_tokens)} tokens{read}")

        prompts = warm_prompts.read(args.file)
        sums = warm_prompts.send_all(engine, prompts, model=model, concurrency=concurrency, progress=show)
    seconds = time.monotonic() - began
    by_counters = sums.reused_tokens is None
    if by_counters and hits is not None and (later := engine.hits()) is not None:
        sums.reused_tokens = min(sums.prompt_tokens, max(0, int(later - hits)))
    print(_prompts_document(sums, seconds) if args.json else _prompts_text(sums, seconds, by_counters))
    for place, why in sums.failures:
        print(f"kvferry: {place}: {why}", file=sys.stderr)
    return 1 if sums.failed else 0


def _prompts_document(sums: "Sums", seconds: float) -> str:
    reused = sums.reused_tokens
    return json.dumps(
        {
            "prompts": sums.prompts,
            "prompt_tokens": sums.prompt_tokens,
            "reused_tokens": reused,
            "computed_tokens": None if reused is None else sums.prompt_tokens - reused,
            "seconds": seconds,
            "failed": sums.failed,
            "failures": [{"place": place, "why": why} for place, why in sums.failures],
        }
    )


def _prompts_text(sums: "Sums", seconds: float, by_counters: bool) -> str:
    reused = sums.reused_tokens
    computed = None if reused is None else sums.prompt_tokens - reused
    lines = [
        table(
            ["prompts", "tokens", "reused", "computed", "time", "failed"],
            [
                [
                    count(sums.prompts),
                    count(sums.prompt_tokens),
                    "-" if reused is None else count(reused),
                    "-" if computed is None else count(computed),
                    duration(seconds),
                    count(sums.failed),
                ]
            ],
        )
    ]
    if reused is None:
        lines.append("how much was reused the engine says with --enable-prompt-tokens-details")
    elif by_counters and sums.prompts:
        lines.append("reused: by the engine's counters, of all that was asked of it meanwhile")
    return "\n".join(lines)


# -- from below --------------------------------------------------------------------------------------


def _from_below(args: argparse.Namespace) -> int:
    refuse(
        args,
        ["--model", "--concurrency", "--timeout"],
        why="is for prompts that go through an --engine: leave it out",
    )
    into = args.into or VALKEY
    within_s = _age(args.most_reused) if args.most_reused is not None else 0.0
    max_bytes = _size(args.max) if args.max is not None else 0
    from kvferry.cli.prompt import prompt_of
    from kvferry.cli.warm_parts import Sources, bring

    with ExitStack() as stack:
        node, of_node, behind = None, "", ""
        if into == MEMORY or args.request is not None or not are_named(args):
            node = stack.enter_context(asked(args))
            status = node.status()
            of_node = keeper_addresses(status)
            behind = str((status.get("tier") or {}).get("name", ""))
        keepers = fleet(args, of_node=of_node)
        if keepers is not None:
            stack.callback(keepers.close)
        elif args.most_reused is not None or into == VALKEY:
            raise RefusedError("there are no keepers to bring anything up; name them with --keepers")
        elif not behind:
            raise RefusedError("the node has nothing behind its memory to fetch from")
        refs: list[PartRef] = []
        if args.request is not None and node is not None:
            refs = prompt_of(node, args.request).needed_refs()
        elif keepers is not None:
            refs = keepers.most_reused(within_s, max_bytes)
        began = time.monotonic()
        with Progress() as progress:

            def show(done: int, steps: "list[Step] | Any") -> None:
                if progress.due:
                    nbytes = format_size(steps[-1].nbytes)
                    progress.show(
                        f"{count(done)} of {count(len(refs))} parts, {nbytes} into {steps[-1].tier}"
                    )

            sources = Sources(keepers, node if into == MEMORY else None)
            steps = bring(refs, sources, progress=show)
        errors = list(keepers.errors) if keepers is not None else []
    errors += [error for step in steps for error in step.errors]
    _tell(args, refs, steps, time.monotonic() - began)
    for error in errors:
        print(f"kvferry: {error}", file=sys.stderr)
    return 1 if errors or not refs or steps[-1].failed else 0


def _tell(args: argparse.Namespace, refs: "list[PartRef]", steps: "list[Step]", seconds: float) -> None:
    total = sum(ref.nbytes for ref in refs)
    if args.json:
        document = {
            "of": "request" if args.request is not None else "most-reused",
            "parts": len(refs),
            "bytes": total,
            "seconds": seconds,
            "into": [step.document() for step in steps],
        }
        print(json.dumps(document))
        return
    print(f"{count(len(refs))} parts, {format_size(total)}")
    if not refs:
        print(NOTHING_USED if args.most_reused else "")
        return
    rows = [
        [
            step.tier,
            count(step.parts),
            format_size(step.nbytes),
            count(step.there),
            duration(step.seconds),
            causes(Counter(step.failed)),
        ]
        for step in steps
    ]
    print(table(["into", "parts", "bytes", "there", "time", "failed"], rows))


def _number(flag: str, text: str, highest: int) -> int:
    try:
        return parse_count(text, lowest=1, highest=highest)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


def _age(text: str) -> float:
    try:
        return parse_age(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"--most-reused: {error}") from error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"--max: {error}") from error
