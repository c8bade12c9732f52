"""Processes of other users: ``python -m tests.node.users UID GID GROUPS VERB ARGUMENTS...``.

All modules are loaded before the user changes: the new one may not be able to read this checkout, nor
Python's own library.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
_LOADED = {
    "knock": (),
    "pretend": (),
    "engine": ("encodings.ascii", "encodings.latin_1", "tests.node.fleet"),
    "kvferry": (
        *("encodings.ascii", "encodings.latin_1", "encodings.idna", "kvferry.cli.main"),
        *("kvferry.client.admin", "kvferry.node.node", "kvferry.observe.exposition"),
        *("kvferry.cli.node", "kvferry.cli.status", "kvferry.tiers.valkey.tier"),
    ),
}


@dataclass(frozen=True)
class User:
    """Numbers need no entry in /etc/passwd."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    def command(self, verb: str, *arguments: str) -> list[str]:
        """What to start as root."""
        groups = ",".join(map(str, self.groups))
        return [
            *(sys.executable, "-W", "error", "-m", "tests.node.users"),
            *(str(self.uid), str(self.gid), groups, verb, *arguments),
        ]

    def start(self, verb: str, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
        """As a process; its output is text."""
        return subprocess.Popen(
            self.command(verb, *arguments),
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, verb: str, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """To its end: exit code, standard output, standard error."""
        with self.start(verb, *arguments, **environ) as process:
            out, err = process.communicate(timeout=WAIT_S)
            return process.returncode, out, err


def _engine(path: str, group: str) -> int:
    """Saves two chunks through the pool and loads them again; or says why there is no node."""
    from tests.node.fleet import Engine, digests

    engine = Engine(Path(path), group=int(group) if group else None)
    try:
        give_up = time.monotonic() + WAIT_S
        while not engine.worker.connected and time.monotonic() < give_up:
            if engine.worker.last_error:
                print(engine.worker.last_error)
                return 1
            time.sleep(0.002)
        engine.connected()
        chunks = digests(2)
        if engine.save(chunks) != len(chunks):
            return 2
        ends = engine.load(engine.lookup(chunks), chunks)
        print(*(end.reason.value for end in ends))
        return 0
    finally:
        engine.close()


def _knock(path: str) -> int:
    """Connects as anybody could, and prints what comes back."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        try:
            sock.connect(path)
            print(sock.recv(1 << 16))
        except OSError as error:
            print(type(error).__name__)
            return 1
    return 0


def _pretend(path: str) -> int:
    """Listens where a node should, until it is ended."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        os.chmod(path, 0o777)
        sock.listen()
        print("listening", flush=True)
        signal.pause()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Become that user and do it."""
    uid, gid, groups, verb, *rest = arguments
    for name in _LOADED[verb]:
        importlib.import_module(name)
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    if verb == "kvferry":
        from kvferry.cli.main import main as kvferry

        return kvferry(rest)
    return {"engine": _engine, "knock": _knock, "pretend": _pretend}[verb](*rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
