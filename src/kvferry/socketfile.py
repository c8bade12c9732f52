"""The place where node and engines meet: a Unix socket in a directory that nobody else can write to.

Without a group the socket is 0600, and a directory made for it 0700. With one they are 0660 and 0750 and
belong to that group, so that its members can connect, and still nobody but the node's user can put another
socket there.
"""

import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from kvferry.errors import MisconfiguredError

MAX_SOCKET_PATH_BYTES = 107
BACKLOG = 64
DYING_S = 2.0  # a killed process may lose its lock a moment before its socket
DYING_PAUSE_S = 0.02


def lock(path: Path, *, group: int | None) -> int:
    """A descriptor whose lock says that a node lives at this path; the kernel drops it at death.

    Makes the directory where there is none. Raises MisconfiguredError.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise MisconfiguredError(
            f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        )
    _own_directory(path.parent, group=group)
    if os.path.lexists(path) and not path.is_socket():
        raise MisconfiguredError(f"{path} exists and is not a socket; choose another --socket")
    lock_path = path.with_name(path.name + ".lock")
    try:
        held = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise MisconfiguredError(
            f"cannot write {lock_path}: {error.strerror}; choose another --socket"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise MisconfiguredError(
            f"a node already runs at {path}; stop it, or choose another --socket"
        ) from error
    return held


def listen(path: Path, *, group: int | None) -> socket.socket:
    """A listening socket. The lock is held, so a socket file that is there is a dead node's.

    Unless it is another program's, or somebody removed a living node's lock file: one that somebody listens
    at is never taken. Raises MisconfiguredError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket():
            _must_be_dead(path)
            path.unlink()
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if group is not None:
            _share(path, group, mode=0o660)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise MisconfiguredError(
            f"cannot listen at {path}: {error.strerror}; choose another --socket"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _must_be_dead(path: Path) -> None:
    give_up = time.monotonic() + DYING_S
    while _somebody_listens(path):
        if time.monotonic() >= give_up:
            raise MisconfiguredError(
                f"somebody listens at {path} already; stop it, or choose another --socket"
            )
        time.sleep(DYING_PAUSE_S)


def _somebody_listens(path: Path) -> bool:
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    ) as asking:
        return asking.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _own_directory(path: Path, *, group: int | None) -> None:
    try:
        if not path.exists():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if group is not None:
                _share(path, group, mode=0o750)
        state = path.stat()
    except OSError as error:
        raise MisconfiguredError(
            f"cannot use the directory {path}: {error.strerror}; choose another --socket"
        ) from error
    if not stat.S_ISDIR(state.st_mode):
        raise MisconfiguredError(f"{path} is not a directory; choose another --socket")
    if state.st_uid != os.geteuid():
        raise MisconfiguredError(
            f"{path} belongs to user {state.st_uid}; choose a --socket in a directory of your own"
        )
    if state.st_mode & 0o022:
        hint = (
            "" if state.st_mode & stat.S_ISVTX else f"chmod {_mode(group)} it or "
        )  # /tmp is meant to be shared
        raise MisconfiguredError(
            f"other users can write to {path}; {hint}choose a --socket in a directory of your own"
        )
    if group is not None and not state.st_mode & (0o010 if state.st_gid == group else 0o001):
        raise MisconfiguredError(
            f"group {group} cannot enter {path}; chgrp {group} and chmod {_mode(group)} it, "
            "or choose a --socket in a directory that is not there yet"
        )


def _mode(group: int | None) -> str:
    return "700" if group is None else "750"


def _share(path: Path, group: int, *, mode: int) -> None:
    """The path is this user's own, and nobody else can replace it. Raises MisconfiguredError, OSError."""
    try:
        os.chown(path, -1, group, follow_symlinks=False)
    except PermissionError as error:
        raise MisconfiguredError(
            f"cannot give {path} to group {group}: user {os.geteuid()} is not a member of it; make it one, "
            "or choose another --group"
        ) from error
    path.chmod(mode)
