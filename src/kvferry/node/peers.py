"""Who is at the other end of a Unix socket, as the kernel says, and whom to accept there."""

import errno
import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
_GROUP = struct.Struct("I")
_SO_PEERGROUPS = 59  # of Linux on every architecture that runs engines; Python has no name for it
_MAX_OPTION_BYTES = 1024  # what Python's getsockopt takes: 256 groups


@dataclass(frozen=True, slots=True)
class Peer:
    """A process's credentials when it connected, or, of a listener, when it began to listen."""

    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Access:
    """Whom to accept: this process's own user, root where ``root`` says so, and the members of ``group``."""

    group: int | None = None
    root: bool = False

    def admits(self, peer: Peer) -> bool:
        """Whether that process may be at the other end."""
        if peer.uid == os.geteuid() or (self.root and peer.uid == 0):
            return True
        return self.group is not None and self.group in peer.gids

    def __str__(self) -> str:
        """``user 1000`` or ``user 1000 and the members of group 2000``."""
        members = "" if self.group is None else f" and the members of group {self.group}"
        return f"user {os.geteuid()}{members}"


def peer_of(sock: socket.socket) -> Peer:
    """The credentials of the process at the other end. Raises OSError.

    Of a process that is in more than 256 groups, its own group alone counts.
    """
    _, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_OPTION_BYTES)
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):
            raise
        raw = b""
    return Peer(uid, frozenset({gid, *(number for (number,) in _GROUP.iter_unpack(raw))}))
