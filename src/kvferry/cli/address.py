"""``--socket`` and ``--group`` of the verbs that ask a node: checked before anything is sent."""

import argparse
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry import __version__
from kvferry.config import client_group, client_token, default_socket_path
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.values import parse_socket_path

if TYPE_CHECKING:
    from kvferry.client.admin import AdminClient


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """``--socket PATH``, by default where this user's node is."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=str(default_socket_path()),
        help="the node's socket (default: %(default)s)",
    )
    parser.add_argument(
        "--group", metavar="GROUP", help="name or number of the group that another user's node serves"
    )


def asked(args: argparse.Namespace) -> "AdminClient":
    """A connection to the node that the arguments name."""
    from kvferry.client.admin import AdminClient

    group = client_group(args.group)
    return AdminClient(node_socket(args.socket, group=group), token=client_token(), group=group)


def node_socket(text: str, *, group: int | None = None) -> Path:
    """The path, unless it cannot be a node's for this user. That nothing is there is another matter.

    Raises MisconfiguredError.
    """
    try:
        path = parse_socket_path(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"--socket: {error}") from error
    try:
        state = path.stat()
    except PermissionError as error:
        raise MisconfiguredError(
            f"--socket {path}: {error.strerror}; it is another user's, ask as the user of the node or as a "
            "member of its --group"
        ) from error
    except OSError:
        return path  # no node there: connecting says so
    if not stat.S_ISSOCK(state.st_mode):
        raise MisconfiguredError(f"--socket {path} is not a socket; name the one of kvferry node")
    if os.getuid() not in (0, state.st_uid) and group != state.st_gid:
        raise MisconfiguredError(
            f"--socket {path} belongs to user {state.st_uid}; ask as the user of the node, or name the "
            "--group that it serves"
        )
    return path


def rendered(render: Callable[[dict[str, Any]], str], document: dict[str, Any], *, version: str) -> str:
    """The node's answer as text. Raises RefusedError when a node of ``version`` answers otherwise.

    Names and request ids come from engines and from clients of the API: what a terminal would take for a
    command, or for a line of its own, is shown as its code.
    """
    try:
        return render(_printable(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(
            f"the answer of a node of version {version} does not fit kvferry {__version__} "
            f"({type(error).__name__}: {error}); install one version, or use --json"
        ) from error


def _printable(value: Any) -> Any:
    """The same document with harmless texts."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value
