"""Whose socket file may be replaced: a dead node's, and no other."""

import os
import socket
from pathlib import Path

import pytest

from kvferry import socketfile
from kvferry.errors import MisconfiguredError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "node.sock"


def test_a_dead_nodes_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    held = socketfile.lock(path, group=None)
    try:
        with socketfile.listen(path, group=None), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    finally:
        os.close(held)


@pytest.mark.parametrize("kind", ["stream", "stream-with-a-full-queue", "datagram"])
def test_a_socket_that_somebody_listens_at_is_not_taken(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program's, or that of a node whose lock file was removed."""
    monkeypatch.setattr(socketfile, "DYING_S", 0.1)
    with (
        socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
        ) as living,
        socket.socket(socket.AF_UNIX) as waiting,
    ):
        living.bind(str(path))
        if kind != "datagram":
            living.listen(0)
        if kind == "stream-with-a-full-queue":
            waiting.connect(str(path))
        inode = path.stat().st_ino
        held = socketfile.lock(path, group=None)
        try:
            with pytest.raises(MisconfiguredError, match="somebody listens at"):
                socketfile.listen(path, group=None)
        finally:
            os.close(held)
        assert path.stat().st_ino == inode
