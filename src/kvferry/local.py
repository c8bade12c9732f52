"""A node inside this process, for a program that has none on its host: a notebook, a script, a test."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from kvferry.config import load_node_settings
from kvferry.errors import KvferryError
from kvferry.node.node import Node

DRAIN_S = 10.0  # what is on its way to Valkey is waited for so long
LOOK_S = 0.01


class LocalNode:
    """A pool of bounded bytes, served on threads of this process at a socket in a private directory.

    It ends with ``close``, or with the process, and what Valkey does not hold with it. A fork's child can
    neither use nor end it.
    """

    def __init__(self, *, pool: str | int, valkey: str | None = None) -> None:
        """pool: bytes, or a text like "2GiB". valkey: a URL, for what shall outlive this process.

        Environment and configuration files are not read. Raises MisconfiguredError, one line.
        """
        self._pid = os.getpid()
        with contextlib.ExitStack() as undo:
            directory = tempfile.mkdtemp(prefix="kvferry-")
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            self.socket_path = Path(directory) / "node.sock"
            flags = {
                "pool": str(pool),
                "socket": str(self.socket_path),
                "metrics_port": "0",
                "valkey": valkey,
            }
            node = Node(load_node_settings(flags, environ={}))
            undo.callback(node.close)
            node.start()
            if valkey is not None:
                undo.callback(_drain, node)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Wait a while for what is on its way to Valkey, then free the memory. Idempotent."""
        if os.getpid() == self._pid:
            self._undo.close()


def _drain(node: Node) -> None:
    give_up = time.monotonic() + DRAIN_S
    with contextlib.suppress(KvferryError):  # a node too busy to say is as good as one that is not done
        while node.statistics().writeback_backlog_bytes and time.monotonic() < give_up:
            time.sleep(LOOK_S)
