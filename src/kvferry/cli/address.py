"""``--socket`` of the verbs that ask a node: checked before anything is sent."""

import argparse
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.config import default_socket_path
from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.values import parse_socket_path


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """``--socket PATH``, by default where this user's node is."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=str(default_socket_path()),
        help="the node's socket (default: %(default)s)",
    )


def node_socket(text: str) -> Path:
    """The path, unless it cannot be a node's of this user. That nothing is there is another matter.

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
            f"--socket {path}: {error.strerror}; it is another user's, ask as the user of the node"
        ) from error
    except OSError:
        return path  # no node there: connecting says so
    if not stat.S_ISSOCK(state.st_mode):
        raise MisconfiguredError(f"--socket {path} is not a socket; name the one of kvferry node")
    if os.getuid() not in (0, state.st_uid):
        raise MisconfiguredError(
            f"--socket {path} belongs to user {state.st_uid}; ask as the user of the node"
        )
    return path


def rendered(render: Callable[[dict[str, Any]], str], document: dict[str, Any], *, version: str) -> str:
    """The node's answer as text. Raises RefusedError when a node of ``version`` answers otherwise."""
    try:
        return render(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(
            f"the answer of a node of version {version} does not fit kvferry {__version__} "
            f"({type(error).__name__}: {error}); install one version, or use --json"
        ) from error
