"""``kvferry drop TIER``: forget what a tier holds: all, of a namespace or a request, or what is old."""

import argparse
import json
import re
import sys
from contextlib import ExitStack
from typing import Any

from kvferry.cli.address import add_socket_argument
from kvferry.cli.keepers import OTHERS, add_keeper_arguments
from kvferry.cli.unused import KEEPER_FLAGS, refuse
from kvferry.config import format_size
from kvferry.errors import MisconfiguredError
from kvferry.identity.names import NAMESPACE_BYTES
from kvferry.values import parse_age

ALL, MEMORY, VALKEY = "all", "memory", "valkey"
# What lies deepest goes first: it could be brought back up from there. Twice, for what was on its way.
ORDER = ("objects", "disk", VALKEY, MEMORY)
_DIGITS = 2 * NAMESPACE_BYTES
_MIN_DIGITS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which tier, and how much of it."""
    parser.add_argument("tier", choices=[*reversed(ORDER), ALL], help="the tier to empty, or all of them")
    parser.add_argument(
        "--namespace",
        metavar="HEX",
        help="only this namespace; the digits that kvferry status shows will do (default: all)",
    )
    parser.add_argument(
        "--request", metavar="ID", help="only the prompt of this request, as kvferry explain takes it"
    )
    parser.add_argument(
        "--older-than", metavar="AGE", help="only what nobody stored or used for so long, like 12h or 30d"
    )
    add_keeper_arguments(parser)
    parser.add_argument("--valkey", metavar="URL", help="the Valkey itself, where there is no keeper")
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the answer for programs")
    parser.epilog = OTHERS


def main(args: argparse.Namespace) -> int:
    """Ask whoever holds it, and say how much went."""
    digits = _checked(args.namespace)
    if args.request is not None and (digits or args.older_than is not None):
        raise MisconfiguredError("--request names its own chunks; leave --namespace and --older-than out")
    older_than_s = _age(args.older_than)
    _check_together(args)
    from kvferry.cli.drop_tiers import Droppers

    with ExitStack() as stack:
        droppers = Droppers(args, stack, namespace=digits, request=args.request, older_than_s=older_than_s)
        gone = droppers.drop(ORDER) if args.tier == ALL else droppers.drop([args.tier], named=True)
    total = sum(each.nbytes for each in gone)
    if args.json:
        print(
            json.dumps(
                {
                    "tier": args.tier,
                    "dropped_parts": sum(each.parts for each in gone),
                    "dropped_bytes": total,
                    "from": [each.document() for each in gone],
                }
            )
        )
    else:
        print(f"dropped {format_size(total)} from {_named(gone, args.tier)}")
    failed = [each for each in gone if each.error]
    for each in failed:
        print(f"kvferry: {each.tier} of {each.where}: {each.error}", file=sys.stderr)
    return 1 if failed else 0


def _check_together(args: argparse.Namespace) -> None:
    """Raises MisconfiguredError for what would not be looked at."""
    if args.request is not None:
        refuse(args, ["--valkey"], why="is not asked for the prompt of a --request: leave one of them out")
    if args.tier == MEMORY:
        refuse(args, ["--valkey", *KEEPER_FLAGS], why="has no part in a node's memory: leave it out")
    elif args.tier == VALKEY and args.valkey is not None:
        refuse(args, KEEPER_FLAGS, why="and --valkey are two ways to the same: leave one of them out")
    elif args.tier != ALL:
        refuse(args, ["--valkey"], why=f"has no part in {args.tier}: keepers drop from there, leave it out")


def _named(gone: Any, tier: str) -> str:
    """Which tiers it was, with what of each where there is more than one."""
    sums: dict[str, int] = {}
    for each in (each for each in gone if each.tier != ALL):
        sums[each.tier] = sums.get(each.tier, 0) + each.nbytes
    if tier != ALL:
        return tier
    return ", ".join(f"{name} ({format_size(nbytes)})" for name, nbytes in sums.items())


def _age(text: str | None) -> float:
    """Seconds; 0 for any age. Raises MisconfiguredError."""
    try:
        return 0.0 if text is None else parse_age(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"--older-than: {error}") from error


def _checked(text: str | None) -> str:
    """Hexadecimal digits of a namespace, or some of them; empty for all. Raises MisconfiguredError."""
    if text is None:
        return ""
    if not re.fullmatch(r"[0-9a-fA-F]+", text) or not _MIN_DIGITS <= len(text) <= _DIGITS:
        raise MisconfiguredError(
            f"--namespace {text!r} is not {_DIGITS} hexadecimal digits, nor {_MIN_DIGITS} or more of those "
            "that kvferry status shows"
        )
    return text.lower()
