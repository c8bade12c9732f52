"""Opening a connection to a node: who is at the other end, hello, and the namespace."""

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvferry import __version__
from kvferry.client.messages import NamespaceInfo
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.node.framing import decode_from_node, encode
from kvferry.node.peers import Access, peer_of
from kvferry.node.wire import (
    MAX_HELLO_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    FromNode,
    Hello,
    Message,
    Role,
    Welcome,
)

READ_BYTES = 1 << 14  # larger ones leave the allocator's heap in pieces that add up
QUEUE_FULL_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects, and to whom: group is one whose members may own the node."""

    role: Role
    engine: str = ""
    rank: int = 0
    token: str = field(default="", repr=False)
    namespace: NamespaceInfo | None = None
    group: int | None = None


def open_socket(path: Path, timeout_s: float, *, group: int | None = None) -> socket.socket:
    """A connected socket whose other end is this user, root, or a member of ``group``.

    Raises ClosedError when nobody is there, RefusedError when it is somebody else.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ClosedError(f"no socket to reach a node with: {error.strerror}") from error
    try:
        sock.settimeout(timeout_s)
        _connect(sock, path, timeout_s)
        peer = peer_of(sock)
    except PermissionError as error:
        sock.close()
        raise RefusedError(
            f"not allowed to connect to {path}: run as the node's user, or give node and engines one --group "
            "that this user is a member of"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: no path at all
        sock.close()
        why = getattr(error, "strerror", None) or error
        raise ClosedError(
            f"no node answers at {path} ({why}): start one with kvferry node, or "
            "name its socket with --socket or KVFERRY_SOCKET"
        ) from error
    access = Access(group, root=True)
    if not access.admits(peer):
        sock.close()
        hint = "; if a group shares it, name that with --group or KVFERRY_GROUP" if group is None else ""
        raise RefusedError(
            f"the node at {path} belongs to user {peer.uid}, not to {access}; not trusted{hint}"
        )
    return sock


def _connect(sock: socket.socket, path: Path, timeout_s: float) -> None:
    """Raises OSError. With a time-out, Linux does not wait for room in a listener's queue: so ask again."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(QUEUE_FULL_PAUSE_S)
        else:
            return


class Handshake:
    """Says hello and attaches the namespace on a fresh socket; blocking, bounded by ``timeout_s``."""

    def __init__(self, sock: socket.socket, identity: Identity, *, timeout_s: float) -> None:
        self._sock = sock
        self._identity = identity
        self._give_up = time.monotonic() + timeout_s
        self._frames = FrameBuffer(limit=MAX_HELLO_BYTES)
        self._payloads: list[bytes] = []
        self.descriptor: int | None = None

    def run(self) -> Welcome:
        """Raises RefusedError with the node's reason, RetryError when it is silent, ClosedError."""
        identity = self._identity
        hello = Hello(
            protocol=PROTOCOL,
            version=__version__,
            role=identity.role,
            engine=identity.engine,
            rank=identity.rank,
            pid=os.getpid(),
            token=identity.token,
        )
        self._send(hello)
        welcome = self._receive()
        if not isinstance(welcome, Welcome):
            raise RefusedError(f"the node answered hello with {type(welcome).__name__}")
        space = identity.namespace
        if space is not None:
            self._send(
                Attach(
                    namespace=space.namespace,
                    part_bytes=space.part_bytes,
                    chunk_tokens=space.chunk_tokens,
                    domain=space.domain,
                    label=space.label,
                    trailing=space.trailing,
                    cache_tokens=space.cache_tokens,
                )
            )
            attached = self._receive()
            if not isinstance(attached, Attached) or attached.error:
                error = attached.error if isinstance(attached, Attached) else type(attached).__name__
                raise RefusedError(f"the node refuses this engine's namespace: {error}")
        return welcome

    def close_descriptor(self) -> None:
        """Close the pool's descriptor, if one came. Idempotent."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _send(self, message: Message) -> None:
        try:
            self._sock.settimeout(self._left())
            self._sock.sendall(encode(message))
        except TimeoutError as error:
            raise self._lost(error) from error
        except OSError:
            return  # closed by the node, which may have said why: `_receive` tells

    def _receive(self) -> FromNode:
        while not self._payloads:
            try:
                self._sock.settimeout(self._left())
                data, descriptors, _, _ = socket.recv_fds(self._sock, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise self._lost(error) from error
            for descriptor in descriptors:
                self.close_descriptor()
                self.descriptor = descriptor
            if not data:
                raise ClosedError("the node closed the connection during the handshake")
            self._payloads = self._frames.feed(data)
        payload = self._payloads.pop(0)
        refusal = refusal_text(payload)
        if refusal is not None:
            raise RefusedError(refusal)
        return decode_from_node(payload)

    def _left(self) -> float:
        """Seconds; bytes that trickle in do not add to them. Raises TimeoutError."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _lost(self, error: OSError) -> KvferryError:
        if isinstance(error, TimeoutError):
            return RetryError("the node accepts connections but does not answer")
        return ClosedError(f"the node closed the connection: {error}")
