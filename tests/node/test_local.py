"""A node inside the process: the same pool, with nothing left behind."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.node.fleet import LOOKUP_WAIT_S, NAMESPACE, PART_BYTES, WAIT_S, content, digests
from tests.servers import running_server

from kvferry.client.store import PrefixStore
from kvferry.errors import MisconfiguredError
from kvferry.local import LocalNode


def _store(local: LocalNode, stack: ExitStack) -> PrefixStore:
    store = PrefixStore(
        socket_path=local.socket_path, engine="local", namespace=NAMESPACE, answer_s=LOOKUP_WAIT_S
    )
    stack.callback(store.close)
    assert store.wait_connected(WAIT_S)
    return store


def _save(store: PrefixStore, chunks: list[bytes]) -> int:
    def fill(position: int, part: int, view: memoryview) -> None:
        view[:] = content(chunks[position], part)

    return store.save([], chunks, fill)


def _load(store: PrefixStore, chunks: list[bytes]) -> dict[int, bytes]:
    parts: dict[int, bytes] = {}

    def into(chunk: int, part: int, view: memoryview) -> None:
        parts[chunk] = bytes(view)

    return {chunk: parts[chunk] for chunk in range(store.load(chunks, into))}


def _exact(chunks: list[bytes]) -> dict[int, bytes]:
    return {number: content(chunk, 0) for number, chunk in enumerate(chunks)}


def test_a_pool_in_this_process_serves_and_leaves_nothing(stack: ExitStack) -> None:
    local = LocalNode(pool=64 << 20)
    stack.callback(local.close)
    assert stat.S_IMODE(local.socket_path.parent.stat().st_mode) == 0o700
    store = _store(local, stack)
    chunks = digests(5)
    assert _save(store, chunks) == 5
    assert _load(store, chunks) == _exact(chunks)
    local.close()
    local.close()
    assert not local.socket_path.parent.exists()
    assert _load(store, chunks) == {}


def test_what_was_saved_before_the_end_is_in_valkey(stack: ExitStack) -> None:
    with running_server() as server:
        chunks = digests(20)
        for turn in range(2):
            with ExitStack() as opened:
                local = LocalNode(pool="128MiB", valkey=f"valkey://127.0.0.1:{server.port}")
                opened.callback(local.close)
                store = _store(local, opened)
                if turn == 0:
                    assert _save(store, chunks) == 20
                else:
                    assert _load(store, chunks) == _exact(chunks)
                    assert store.statistics().loaded_bytes == 20 * PART_BYTES


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents(stack: ExitStack) -> None:
    local = LocalNode(pool=64 << 20)
    stack.callback(local.close)
    store = _store(local, stack)
    chunks = digests(2)
    assert _save(store, chunks) == 2
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        local.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert _load(_store(local, stack), chunks) == _exact(chunks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "1MiB"}, "at least 64 MiB"),
        ({"pool": "much"}, "^pool: 'much' is not a size"),
        ({"pool": 1.5}, "^pool=1.5 is not a size"),
        ({"pool": True}, "^pool=True is not a size"),
        ({"pool": "64MiB", "valkey": "http://host"}, "^valkey: "),
        ({"pool": "64MiB", "valkey": 5}, "^valkey "),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_and_leave_nothing(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(MisconfiguredError, match=message) as caught:
        LocalNode(**options)
    assert "--" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing", "long" * 30])
def test_a_place_that_takes_no_socket_is_named_as_what_it_is(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place != "missing":
        (tmp_path / place).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / place))
    with pytest.raises(MisconfiguredError, match="TMPDIR") as caught:
        LocalNode(pool="64MiB")
    assert "--" not in str(caught.value)


def test_a_password_in_the_url_is_taken_and_not_shown() -> None:
    with pytest.raises(MisconfiguredError, match="unreachable at valkey://") as caught:
        LocalNode(pool="64MiB", valkey="valkey://someone:secret@127.0.0.1:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("end", ["", "raise SystemExit", "raise ValueError"])
def test_a_process_that_ends_without_close_leaves_nothing(end: str, tmp_path: Path) -> None:
    lines = ["from kvferry.local import LocalNode", 'node = LocalNode(pool="64MiB")']
    lines += ["assert node.socket_path.exists()", 'print("up")', end]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "up\n"
    assert not list(tmp_path.iterdir())
