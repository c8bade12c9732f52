"""``kvferry drop memory``: forget what host memory holds and nobody uses now."""

import argparse
import json

from kvferry.cli.address import add_socket_argument, node_socket
from kvferry.config import client_token, format_size
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.identity.names import NAMESPACE_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which tier of which node, and how much of it."""
    parser.add_argument("tier", choices=["memory"], help="the tier to empty")
    parser.add_argument("--namespace", metavar="HEX", help="only this namespace (default: all)")
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="the answer for programs")


def main(args: argparse.Namespace) -> int:
    """Ask the node and say how much went."""
    from kvferry.client.admin import AdminClient

    namespace = _namespace(args.namespace)
    with AdminClient(node_socket(args.socket), token=client_token()) as admin:
        answer = admin.drop(args.tier, namespace=namespace)
    dropped = answer.get("dropped_bytes")
    if not isinstance(dropped, int):
        raise RefusedError("the node did not say how much it dropped; kvferry status shows what it holds")
    if args.json:
        print(json.dumps({"tier": args.tier, **answer}))
    else:
        print(f"dropped {format_size(dropped)} from {args.tier}")
    return 0


def _namespace(text: str | None) -> bytes:
    if text is None:
        return b""
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != NAMESPACE_BYTES:
        raise MisconfiguredError(
            f"--namespace {text!r} is not {2 * NAMESPACE_BYTES} hexadecimal digits; the engine's log line "
            "`kvferry: chunks of ...` names it"
        )
    return namespace
