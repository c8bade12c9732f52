"""A node inside this process, for a program that has none on its host: a notebook, a script, a test."""

import contextlib
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.config import NodeSettings, load_node_settings
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.node.node import Node

DRAIN_S = 10.0  # what is on its way to Valkey is waited for so long
LOOK_S = 0.01


class LocalNode:
    """A pool of bounded bytes, served on threads of this process at a socket in a private directory.

    It ends with ``close``, with the process, or when nobody holds it any more, and what Valkey does not hold
    with it. A fork's child can neither use nor end it. A process that is killed leaves its directory behind.
    """

    def __init__(self, *, pool: str | int, valkey: str | None = None) -> None:
        """pool: bytes, or a text like "2GiB". valkey: a URL, for what shall outlive this process.

        Environment and configuration files are not read. Raises MisconfiguredError, one line.
        """
        with contextlib.ExitStack() as undo:
            directory = _private_directory()
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            self.socket_path = Path(directory) / "node.sock"
            with _named_as_arguments():
                node = Node(_settings(pool, valkey, self.socket_path))
                undo.callback(node.close)
                node.start()
            if valkey is not None:
                undo.callback(_drain, node)
            self._end = weakref.finalize(self, _end, os.getpid(), undo.pop_all())

    def close(self) -> None:
        """Wait a while for what is on its way to Valkey, then free the memory. Idempotent."""
        self._end()


def _end(pid: int, undo: contextlib.ExitStack) -> None:
    if os.getpid() == pid:
        undo.close()


def _private_directory() -> str:
    try:
        return tempfile.mkdtemp(prefix="kvferry-")
    except OSError as error:
        raise MisconfiguredError(
            f"no directory for the node's socket: {error}; let TMPDIR name one that can be written to"
        ) from error


def _settings(pool: Any, valkey: Any, socket_path: Path) -> NodeSettings:
    if not isinstance(pool, str | int) or isinstance(pool, bool):
        raise MisconfiguredError(f'pool={pool!r} is not a size; write "4GiB", or a whole number of bytes')
    if valkey is not None and not isinstance(valkey, str):
        raise MisconfiguredError("valkey (not shown) is not a URL; write valkey://host:6379")
    flags = {"pool": str(pool), "socket": str(socket_path), "metrics_port": "0"}
    # Not as a flag: those may hold no password, since others see them.
    return load_node_settings(flags, environ={} if valkey is None else {"KVFERRY_VALKEY": valkey})


@contextlib.contextmanager
def _named_as_arguments() -> Iterator[None]:
    """A node names its settings as its command line does; here they are arguments, and the socket's place."""
    try:
        yield
    except MisconfiguredError as error:
        text = re.sub(r"(a )?--socket", "TMPDIR", str(error))
        text = text.replace("KVFERRY_VALKEY:", "valkey:")
        raise MisconfiguredError(re.sub(r"--(\w+)", r"\1", text)) from error


def _drain(node: Node) -> None:
    give_up = time.monotonic() + DRAIN_S
    with contextlib.suppress(KvferryError):  # a node too busy to say is as good as one that is not done
        while node.statistics().writeback_backlog_bytes and time.monotonic() < give_up:
            time.sleep(LOOK_S)
