"""``kvferry drop memory``: forget what host memory holds and nobody uses now."""

import argparse
import json
import re
from typing import Any

from kvferry.cli.address import add_socket_argument, asked
from kvferry.config import format_size
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.identity.names import DOMAIN_TAG_BYTES, NAMESPACE_BYTES

_DIGITS = 2 * NAMESPACE_BYTES
_MIN_DIGITS = 4
_TAG = 2 * DOMAIN_TAG_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which tier of which node, and how much of it."""
    parser.add_argument("tier", choices=["memory"], help="the tier to empty")
    parser.add_argument(
        "--namespace",
        metavar="HEX",
        help="only this namespace; the digits that kvferry status shows will do (default: all)",
    )
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the answer for programs")


def main(args: argparse.Namespace) -> int:
    """Ask the node and say how much went."""
    wanted = _checked(args.namespace)
    with asked(args) as admin:
        namespace = wanted if len(wanted) in (0, _DIGITS) else _known(admin.status(), wanted)
        answer = admin.drop(args.tier, namespace=bytes.fromhex(namespace))
    dropped = answer.get("dropped_bytes")
    if not isinstance(dropped, int):
        raise RefusedError("the node did not say how much it dropped; kvferry status shows what it holds")
    if args.json:
        print(json.dumps({"tier": args.tier, **answer}))
    else:
        print(f"dropped {format_size(dropped)} from {args.tier}")
    return 0


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


def _known(status: dict[str, Any], beginning: str) -> str:
    """The node's only namespace that begins so, with its domain's tag or behind it. Raises RefusedError."""
    spaces = status.get("namespaces")
    names = [str(space["namespace"]) for space in spaces] if isinstance(spaces, list) else []
    found = [name for name in names if beginning in (name[: len(beginning)], name[_TAG:][: len(beginning)])]
    if len(found) != 1:
        what = f"{len(found)} namespaces begin" if found else "no namespace begins"
        raise RefusedError(f"{what} with {beginning}; kvferry status --json lists the node's")
    return found[0]
