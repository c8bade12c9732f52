"""A real vLLM engine at the node of another user: group, token, the domain's key; and what its log shows."""

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.preloaded import start_new
from tests.engines.vllm_engines import Engine, arguments, make_models
from tests.engines.vllm_models import VOCABULARY
from tests.node.users import WAIT_S, User

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="needs root, to be two users: ./test names the missing check, fails in CI"
    ),
]

GROUP = 54100
NODE = User(54001, 54001, (GROUP,))
TOKEN = "opensesame-at-the-node"
SALT = "cinnamon-of-a-user"
KEY = b"vermilion-key-of-the-domain\x00\xff\xfe\xfd\xfc"
REUSE_S = 60.0
REUSED = 384  # whole chunks of the prompt


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the node's user owns and everyone can enter."""
    path = Path(tempfile.mkdtemp(prefix="kvferry-access-"))
    path.chmod(0o755)
    os.chown(path, NODE.uid, NODE.gid)
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def _node(place: Path) -> Iterator[Path]:
    """Run by its own user; yields its socket."""
    socket, token = place / "run" / "node.sock", place / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o640)
    os.chown(token, NODE.uid, GROUP)
    options = ("--group", str(GROUP), "--token-file", str(token), "--metrics-port", "0")
    with NODE.start("kvferry", "node", "--socket", str(socket), "--pool", "256MiB", *options) as process:
        try:
            assert process.stderr is not None
            assert str(socket) in process.stderr.readline()
            yield socket
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def _member() -> Iterator[None]:
    """What is started meanwhile is a member of the group."""
    before = os.getgroups()
    os.setgroups([*before, GROUP])
    try:
        yield
    finally:
        os.setgroups(before)


def _options(place: Path, socket: Path, directory: Path) -> dict[str, Any]:
    models = make_models(directory, "llama")
    key = directory / "domain.key"
    key.touch(mode=0o600)
    key.write_text(f"{KEY.hex()}\n")
    options = arguments(models / "llama", socket)
    options["kv_transfer_config"]["kv_connector_extra_config"] |= {
        "group": GROUP,
        "token_file": str(place / "token"),
        "domain": "payments",
        "domain_key_file": str(key),
    }
    return options


def _reused(engine: Engine, asked: list[int], salt: str) -> int:
    """Tokens that came from the pool, once all are there."""
    give_up = time.monotonic() + REUSE_S
    while True:
        engine.reset()
        cached = int(engine.generate(asked, salt=salt)["cached"])
        if cached == REUSED or time.monotonic() > give_up:
            return cached


def test_an_engine_of_another_user_shares_and_its_log_shows_no_secret(place: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    asked = [rng.randrange(3, VOCABULARY) for _ in range(400)]
    with _node(place) as socket:
        options = _options(place, socket, tmp_path)
        with _member():
            engine = Engine("a", directory=tmp_path, cores="0", arguments=options, start=start_new)
        try:
            engine.ready()
            engine.generate(asked, salt=SALT)
            assert _reused(engine, asked, SALT) == REUSED
            status = ("kvferry", "status", "--json", "--socket", str(socket))
            code, out, err = NODE.run(*status, KVFERRY_TOKEN=TOKEN)
            assert code == 0, err
            engines = json.loads(out)["engines"]
            log = engine.text()
        finally:
            engine.close()
    assert {found["role"] for found in engines} == {"scheduler", "worker"}
    assert {found["domain"] for found in engines} == {"payments"}
    assert "kvferry: chunks of" in log
    prompt = ", ".join(map(str, asked[:6]))
    marks = (TOKEN, TOKEN.encode().hex(), SALT, SALT.encode().hex(), KEY[:9].decode(), KEY.hex(), prompt)
    assert [mark for mark in marks if mark in log] == []
