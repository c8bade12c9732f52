"""What the demo and the benchmarks ask a node: its status, a request's story, to drop a tier."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvferry
from kvferry.demo.processes import wait_until
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.node import wire

ADMIN_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16


class NodeView:
    """Admin questions over the node's socket, one connection each."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def answers(self) -> bool:
        """Whether a node answers a status query now."""
        try:
            self.status()
        except KvferryError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """The status document. Raises ClosedError without a node, RefusedError when it declines."""
        return self._ask(wire.StatusQuery())

    def explain(self, request_id: str) -> dict[str, Any]:
        """The story of one request."""
        return self._ask(wire.ExplainQuery(request_id=request_id))

    def drop(self, tier: str) -> dict[str, Any]:
        """Forget what a tier ("memory" or "valkey") holds."""
        return self._ask(wire.DropQuery(tier=tier))

    def wait(self, ready: Callable[[dict[str, Any]], bool], *, what: str, timeout_s: float) -> float:
        """Poll the status until ``ready(status)``; returns the seconds it took. Raises RetryError."""
        return wait_until(lambda: ready(self.status()), what=what, timeout_s=timeout_s)

    def _ask(self, query: wire.StatusQuery | wire.ExplainQuery | wire.DropQuery) -> dict[str, Any]:
        hello = wire.Hello(
            protocol=wire.PROTOCOL, version=kvferry.__version__, role=wire.Role.ADMIN, engine="kvferry-demo"
        )
        buffer = wire.FrameBuffer()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ADMIN_TIMEOUT_S)
                connection.connect(str(self.socket_path))
                connection.sendall(wire.encode(hello) + wire.encode(query))
                while True:
                    data = connection.recv(_READ_BYTES)
                    if not data:
                        raise ClosedError(f"the node at {self.socket_path} closed the connection")
                    for payload in buffer.feed(data):
                        match wire.decode_from_node(payload):
                            case wire.Document(error=error) if error:
                                raise RefusedError(error)
                            case wire.Document(json=document):
                                answer: dict[str, Any] = json.loads(document)
                                return answer
                            case wire.Refusal(message=message):
                                raise RefusedError(message)
                            case _:
                                pass
        except TimeoutError as error:
            raise RetryError(f"the node at {self.socket_path} did not answer in {ADMIN_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise ClosedError(f"no node at {self.socket_path}: {error}") from error
