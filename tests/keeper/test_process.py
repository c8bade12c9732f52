"""``kvferry keeper`` as it runs: killed, stopped and told to end; what it kept is there afterwards."""

import json
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.keeper.fleet import Answers
from tests.servers import Server, free_ports, running_server

from kvferry.addresses import Address
from kvferry.cli.main import main
from kvferry.keeper import peer
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.admin import KeeperAdmin
from kvferry.keeper.client import Keepers
from kvferry.keeper.wire import DropTier, Where
from kvferry.observe.keeper_metrics import KEEPER_METRICS
from kvferry.testing.expectations import eventually
from kvferry.testing.processes import Program
from kvferry.testing.s3 import start_obstore
from kvferry.testing.tier_calls import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.tier import ValkeyTier

KVFERRY = [sys.executable, "-m", "kvferry"]
TOKEN = "mark-of-a-token"
REFS = [some_ref(200_000, seed) for seed in range(8)]
DATA = [some_bytes(ref.nbytes, seed) for seed, ref in enumerate(REFS)]


@pytest.fixture(scope="module", autouse=True)
def obstore() -> None:
    """What it keeps for the life of the process is no leak of a test."""
    start_obstore()


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with running_server("--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield server


class Host:
    """A storage host: its keeper's process, and a node's side of it."""

    def __init__(self, directory: Path, valkey: Server, stack: ExitStack) -> None:
        port, self.metrics_port = free_ports(2)
        self.address = Address("127.0.0.1", port)
        self.access = KeeperAccess(TOKEN)
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        options = [
            *("--valkey", valkey.url, "--disk", str(directory / "disk"), "--disk-size", "128MiB"),
            *("--objects", f"file://{directory / 'bucket'}", "--listen", str(self.address)),
            *("--token-file", str(token), "--metrics-port", str(self.metrics_port), "--name", "store"),
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        self.keepers = Keepers([self.address], access=self.access, node="node")
        stack.callback(self.keepers.close)
        self.keeper = Program(
            "keeper", [*KVFERRY, "keeper", *options], directory=directory, ready=self.is_up, env=env
        )
        stack.callback(self.keeper.close)
        self.tier = ValkeyTier.connect(valkey.settings())
        stack.callback(self.tier.close)
        self.keeper.start()

    def is_up(self) -> bool:
        return self.keepers.statistics().up == 1

    def where(self) -> Counter[Where]:
        answers = Answers()
        self.keepers.locate(REFS, deadline=time.monotonic() + 60.0, done=answers)
        ((found,),) = answers.wait()
        return Counter(found)

    def staged(self, *, wait_s: float = 60.0) -> Counter[Outcome]:
        answers = Answers()
        self.keepers.stage(REFS, deadline=time.monotonic() + wait_s, done=answers)
        calls = answers.wait(len(REFS))
        assert sorted(index for index, _ in calls) == list(range(len(REFS)))
        return Counter(outcome for _, outcome in calls)

    def intact(self) -> None:
        """All parts are in Valkey, as they were."""
        found = fetch_all(self.tier, REFS)
        assert [(result.outcome, bytes(data)) for result, data in found] == [
            (Outcome.OK, bytes(data)) for data in DATA
        ]

    def evicted(self) -> None:
        answers = Answers()
        self.tier.remove(REFS, done=answers)
        answers.wait()

    def admin(self) -> KeeperAdmin:
        return KeeperAdmin(self.address, access=self.access)


@pytest.fixture
def host(tmp_path: Path, valkey: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(peer, "PATIENCE_S", 0.5)
    monkeypatch.setattr(peer, "GIVE_UP_S", 600.0)
    with ExitStack() as stack:
        yield Host(tmp_path, valkey, stack)


def _status_is_shown(host: Host, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["status", "--keepers", f"{host.address},127.0.0.1:1", "--keeper-token-file", str(token)]
    assert main([*asked, "--json"]) == 1  # nobody is at the second address
    found = json.loads(capsys.readouterr().out)
    assert [keeper["name"] for keeper in found["keepers"]] == ["store"]
    assert len(found["errors"]) == 1
    assert main(asked) == 1
    text = capsys.readouterr().out
    for words in (f"store at {host.address}", "8 parts copied", "none wait", "disk", "objects", "node"):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_kept_survives_eviction_kills_stops_and_an_empty_disk(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store_all(host.tier, list(zip(REFS, DATA, strict=True))) == [Outcome.OK] * len(REFS)
    host.keepers.stored(REFS, positions=range(len(REFS)), likely=[True] * len(REFS))
    eventually(lambda: host.where() == {Where.DISK: len(REFS)}, "on the disk")

    def flushed() -> bool:
        with host.admin() as admin:
            return admin.status()["keeper"]["flush"]["copied_parts"] == len(REFS)

    eventually(flushed, "in the bucket")
    _status_is_shown(host, tmp_path / "token", capsys)

    host.evicted()
    assert host.staged() == {Outcome.OK: len(REFS)}
    host.intact()

    host.evicted()
    host.keeper.pause()  # it stands still: a request pays its own deadline, and gets an answer for each part
    assert host.staged(wait_s=0.5) == {Outcome.LATE: len(REFS)}
    eventually(lambda: not host.is_up(), "left alone")
    assert host.staged() == {Outcome.REFUSED: len(REFS)}
    host.keeper.resume()
    eventually(host.is_up, "answers again")
    eventually(lambda: host.staged() == {Outcome.OK: len(REFS)}, "staged")
    host.intact()

    host.evicted()
    assert host.keeper.kill() == -signal.SIGKILL
    eventually(lambda: not host.is_up(), "gone")
    host.keeper.start()
    assert host.where() == {Where.DISK: len(REFS)}
    with host.admin() as admin:
        assert admin.drop(DropTier.DISK, alone=True).parts == len(REFS)
    eventually(lambda: host.where() == {Where.OBJECTS: len(REFS)}, "found in the bucket")
    assert host.staged() == {Outcome.OK: len(REFS)}
    host.intact()

    with urllib.request.urlopen(f"http://127.0.0.1:{host.metrics_port}/metrics", timeout=60.0) as page:
        text = page.read().decode()
    named = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert named >= {metric.exposed_name for metric in KEEPER_METRICS}
    assert 'kvferry_keeper_staged_parts_total{tier="objects"} 8.0' in text
    assert 'kvferry_keeper_peers{role="node"} 1.0' in text

    assert host.keeper.terminate() == 0
    log = host.keeper.log.read_text()
    assert "stopping on SIGTERM" in log
    assert "Traceback" not in log
    assert TOKEN not in log


def test_a_keeper_that_cannot_start_says_why_in_one_line(
    valkey: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["keeper", "--valkey", valkey.url, "--metrics-port", "0"]
    bucket = ["--objects", f"file://{tmp_path / 'bucket'}"]
    (taken,) = free_ports(1)
    occupied = tmp_path / "file"
    occupied.write_text("no directory")
    with ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", taken)))
        for arguments, words in (
            ([*usual, *bucket, "--listen", f"127.0.0.1:{taken}"], "is in use; choose another --listen"),
            ([*usual, *bucket, "--listen", "0.0.0.0"], "set --token-file"),
            ([*usual, "--disk", str(occupied), "--disk-size", "128MiB"], str(occupied)),
            (
                [*usual, *bucket, "--tls-cert", "/nowhere", "--tls-key", "/nowhere"],
                "there is no file tls_cert /nowhere",
            ),
            (["keeper", "--valkey", "http://127.0.0.1:1", *bucket], "unknown scheme 'http'"),
            (["keeper", "--valkey", f"valkey://nobody:wrong@127.0.0.1:{valkey.port}", *bucket], "--valkey"),
            ([*usual, "--objects", "s3://Bucket"], "give s3://BUCKET/PREFIX or file:///DIRECTORY"),
            ([*usual, "--objects", "gs://bucket/prefix"], "give s3://BUCKET/PREFIX or file:///DIRECTORY"),
        ):
            assert main(arguments) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert len([line for line in err.splitlines() if line.startswith("kvferry: ")]) == 1
            assert words in err
