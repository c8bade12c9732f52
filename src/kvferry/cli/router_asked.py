"""A router of this user, for the verbs that ask one: found by its socket, asked over HTTP."""

import argparse
import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvferry.errors import ClosedError, MisconfiguredError, RefusedError, RetryError
from kvferry.values import parse_socket_path

ASK_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
ANY = "any"
FLAG = "--router"


def add_router_argument(parser: argparse.ArgumentParser) -> None:
    """``--router [SOCKET]``."""
    parser.add_argument(
        FLAG, metavar="SOCKET", nargs="?", const=ANY, help="of this user's router, instead of the node"
    )


def request_and_router(request: str | None, router: str | None) -> tuple[str, str | None]:
    """As they were meant: in ``--router REQUEST``, what follows the flag is no socket unless it is a path.

    Raises MisconfiguredError.
    """
    if request is None and router not in (None, ANY) and "/" not in router:
        return router, ANY
    if request is None:
        raise MisconfiguredError(
            "name a request, by the id of its API response, like cmpl-...; see kvferry explain --help"
        )
    return request, router


def status(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    found: dict[str, Any] = _ask(router_socket(args.router), "/status")
    return found


def explain(args: argparse.Namespace, request: str) -> dict[str, Any] | None:
    """Of one request; None where the router does not know it."""
    try:
        found: dict[str, Any] = _ask(router_socket(args.router), f"/explain?request={quote(request)}")
    except RefusedError:
        return None
    return found


def router_socket(text: str) -> Path:
    """As it was named, or that of the only router there is. Raises MisconfiguredError."""
    if text != ANY:
        return parse_socket_path(text)
    from kvferry.router.settings import admin_sockets

    directory = admin_sockets()
    found = sorted(path for path in directory.glob("router-*.sock") if _listens(path))
    if len(found) == 1:
        return found[0]
    if not found:
        raise MisconfiguredError(f"no router's socket in {directory}; name it: {FLAG} PATH")
    raise MisconfiguredError(f"several routers: {', '.join(map(str, found[:4]))}; name one: {FLAG} PATH")


def _listens(path: Path) -> bool:
    """One that was killed leaves its socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ASK_S)
        try:
            asking.connect(str(path))
        except PermissionError:
            return True  # a router, though not for us: asking says so
        except OSError:
            return False
    return True


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("router", timeout=ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ASK_S)
        self.sock.connect(str(self._path))


def _ask(path: Path, target: str) -> Any:
    """Raises ClosedError where nobody listens, RetryError for no answer, RefusedError for an error."""
    connection = _Connection(path)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        content = answer.read(MAX_ANSWER_BYTES)
    except PermissionError as error:
        raise MisconfiguredError(f"{path}: {error.strerror}; ask as the user of the router") from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise ClosedError(f"no router at {path}; start kvferry router, or name its --admin-socket") from error
    except (OSError, http.client.HTTPException) as error:
        raise RetryError(f"the router at {path} does not answer: {error}") from error
    finally:
        connection.close()
    try:
        document = json.loads(content)
        if answer.status != 200:
            raise RefusedError(str(document["error"]["message"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RetryError(f"what answers at {path} is no router") from error
    return document
