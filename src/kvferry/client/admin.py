"""Questions to a node by people and programs: status, explain, drop, fetch. Blocking, bounded."""

import json
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry.client.handshake import Handshake, Identity, open_socket
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.node.framing import decode_from_node, encode
from kvferry.node.wire import (
    Document,
    DropQuery,
    ExplainQuery,
    FetchQuery,
    Message,
    PromptQuery,
    Role,
    StatusQuery,
)

TIMEOUT_S = 5.0
DROP_S = 120.0  # a disk or a Valkey may have much to forget
READ_BYTES = 1 << 18


class AdminClient:
    """One connection. Raises ClosedError without a node, RetryError when it is silent, RefusedError."""

    def __init__(
        self,
        socket_path: Path | str,
        *,
        token: str = "",
        group: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """group: one whose members may own the node."""
        self._path = Path(socket_path)
        self._timeout_s = timeout_s
        self._frames = FrameBuffer()
        self._sock: socket.socket = open_socket(self._path, timeout_s, group=group)
        identity = Identity(role=Role.ADMIN, engine="admin", token=token)
        handshake = Handshake(self._sock, identity, timeout_s=timeout_s)
        try:
            self.welcome = handshake.run()
        except KvferryError as error:
            self._sock.close()
            hint = (
                "" if isinstance(error, RefusedError) else "; is that the socket of a running kvferry node?"
            )
            raise type(error)(f"at {self._path}: {error}{hint}") from error
        except BaseException:
            self._sock.close()
            raise
        finally:
            handshake.close_descriptor()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """``NodeStatistics`` as a document."""
        return self._ask(StatusQuery())

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Records (``node.explain.Record``) that match, newest first; empty when none does."""
        found = self._ask(ExplainQuery(request_id=request_id)).get("requests")
        if not isinstance(found, list):
            raise RefusedError(f"the node at {self._path} answered without a list of requests")
        return found

    def prompt(self, request_id: str) -> dict[str, Any]:
        """The chunks that one request asked for. Raises RefusedError where there is no, or no one, such."""
        return self._ask(PromptQuery(request_id=request_id))

    def drop(
        self, tier: str, *, namespace: bytes = b"", older_than_s: float = 0.0, chunks: bytes = b""
    ) -> dict[str, Any]:
        """Forget what memory or the tier behind it holds: ``{"dropped_parts", "dropped_bytes", "outcome"}``.

        See ``DropQuery``.
        """
        query = DropQuery(tier=tier, namespace=namespace, older_than_s=older_than_s, chunks=chunks)
        return self._ask(query, DROP_S)

    def fetch(
        self, namespace: bytes, chunks: bytes, parts: tuple[int, ...], *, within_s: float, mark: int = 0
    ) -> dict[str, Any]:
        """Bring parts into memory: ``node.prefetch.Fetched`` as a document. See ``FetchQuery``."""
        query = FetchQuery(namespace=namespace, chunks=chunks, parts=parts, within_s=within_s, mark=mark)
        return self._ask(query, within_s + self._timeout_s)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _ask(self, query: Message, timeout_s: float | None = None) -> dict[str, Any]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + timeout_s
        try:
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(encode(query))
            while True:
                left = give_up - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._sock.settimeout(left)
                data = self._sock.recv(READ_BYTES)
                if not data:
                    raise ClosedError(f"the node at {self._path} closed the connection")
                for payload in self._frames.feed(data):
                    refusal = refusal_text(payload)
                    if refusal is not None:
                        raise RefusedError(refusal)
                    message = decode_from_node(payload)
                    if isinstance(message, Document):
                        if message.error:
                            raise RefusedError(message.error)
                        return self._document(message.json)
        except TimeoutError as error:
            raise RetryError(
                f"the node at {self._path} did not answer within {timeout_s:.0f} s; is it stopped?"
            ) from error
        except OSError as error:
            raise ClosedError(f"the connection to the node at {self._path} is lost: {error}") from error

    def _document(self, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the node at {self._path} answered what is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise RefusedError(f"the node at {self._path} answered with a {type(answer).__name__}")
        return answer
