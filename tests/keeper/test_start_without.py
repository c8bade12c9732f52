"""A keeper starts while Valkey and its bucket are away: it serves what it has, and says what is wrong."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.keeper.fleet import Answers
from tests.servers import free_ports, must, running_server

from kvferry.addresses import Address
from kvferry.cli.main import main
from kvferry.keeper.app import KeeperProcess
from kvferry.keeper.settings import KeeperSettings
from kvferry.observe.exposition import MetricsPage
from kvferry.observe.keeper_metrics import KEEPER_METRICS
from kvferry.testing.expectations import eventually
from kvferry.testing.s3 import start_obstore
from kvferry.testing.servers import start_server
from kvferry.testing.tier_calls import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers import awaited
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.valkey.acl import setuser
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

REFS = [some_ref(100_000, seed) for seed in range(4)]
DATA = [some_bytes(ref.nbytes, seed) for seed, ref in enumerate(REFS)]


@pytest.fixture(scope="module", autouse=True)
def obstore() -> None:
    """What it keeps for the life of the process is no leak of a test."""
    start_obstore()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "MIN_PAUSE_S", 0.02)
    monkeypatch.setattr(awaited, "MAX_PAUSE_S", 0.1)


class Host:
    """A storage host whose Valkey and bucket are at ports where nobody listens yet."""

    def __init__(self, directory: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.stack = directory, stack
        self.valkey_port, s3_port = free_ports(2)
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}"),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        self.keeper = KeeperProcess(self.settings())
        stack.callback(self.keeper.close)
        self.keeper.start()

    def settings(self) -> KeeperSettings:
        return KeeperSettings(
            valkey=parse_url(f"valkey://127.0.0.1:{self.valkey_port}"),
            disk=self.directory / "disk",
            disk_bytes=64 << 20,
            objects="s3://bucket/prefix",
            listen=Address("127.0.0.1", 0),
            name="store",
            metrics_port=0,
        )

    def starts_valkey(self) -> ValkeyTier:
        server = start_server(
            self.directory,
            "--maxmemory",
            "64mb",
            "--maxmemory-policy",
            "allkeys-lru",
            port=self.valkey_port,
        )
        self.stack.callback(server.stop)
        tier = ValkeyTier.connect(server.settings())
        self.stack.callback(tier.close)
        return tier

    def words(self) -> dict[str, str]:
        return {trouble.tier: trouble.word for trouble in self.keeper.statistics().troubles}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(tmp_path, stack, monkeypatch)


def test_it_says_what_is_wrong_in_status_metrics_and_json(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["status", "--keepers", str(host.keeper.address)]
    assert main(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "objects unreachable since 2" in text
    assert "valkey unreachable since 2" in text
    assert "nobody listens at 127.0.0.1:" in text
    assert "disk up" in text
    assert main([*asked, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["keepers"]
    found = {each["tier"]: each for each in document["troubles"]}
    assert set(found) == {"objects", "valkey"}
    assert "Valkey unreachable" in found["valkey"]["reason"]
    (port,) = free_ports(1)
    page = MetricsPage(host.keeper.statistics, metrics=KEEPER_METRICS, port=port, host="127.0.0.1")
    host.stack.callback(page.close)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as answer:
        metrics = answer.read().decode()
    assert 'kvferry_keeper_tier_up{tier="objects"} 0.0' in metrics
    assert 'kvferry_keeper_trouble_episodes_total{tier="objects",trouble="unreachable"} 1.0' in metrics
    assert 'kvferry_keeper_trouble_seconds{tier="valkey",trouble="unreachable"}' in metrics


def test_it_serves_its_disk_as_soon_as_valkey_answers(host: Host) -> None:
    """What is told before that is kept trying; the bucket stays away all the time."""
    keeper = host.keeper._keeper
    said: list[Dropped] = []
    keeper.drop("valkey", namespace=None, older_than_s=None, alone=True, done=said.append)
    eventually(lambda: [each.outcome for each in said] == [Outcome.FAILED], "told that nothing was dropped")
    tier = host.starts_valkey()
    assert store_all(tier, list(zip(REFS, DATA, strict=True))) == [Outcome.OK] * len(REFS)
    keeper.stored(REFS, positions=range(len(REFS)), likely=[True] * len(REFS))

    def copied() -> int:
        line = host.keeper.statistics().keeper.keep
        return 0 if line is None else line.copied_parts

    eventually(lambda: copied() == len(REFS), "on the disk")
    assert host.words() == {"objects": "unreachable"}
    removed = Answers()
    tier.remove(REFS, done=removed)
    removed.wait()
    staged = Answers()
    keeper.stage(REFS, deadline=1e12, done=staged)
    assert {outcome for _, outcome in staged.wait(len(REFS))} == {Outcome.OK}
    assert [(result.outcome, bytes(data)) for result, data in fetch_all(tier, REFS)] == [
        (Outcome.OK, bytes(data)) for data in DATA
    ]


def test_a_user_who_may_not_look_through_the_keys_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user of a node, not of a keeper."""
    with running_server() as server, ExitStack() as stack:
        must(server.ask(*setuser("node", b"", password="p").split()))
        keeper = KeeperProcess(
            KeeperSettings(
                valkey=parse_url(f"valkey://node:p@127.0.0.1:{server.port}"),
                disk=tmp_path / "disk",
                disk_bytes=64 << 20,
                listen=Address("127.0.0.1", 0),
                metrics_port=0,
            )
        )
        stack.callback(keeper.close)
        keeper.start()
        eventually(lambda: keeper.statistics().troubles, "noticed")
        assert main(["status", "--keepers", str(keeper.address)]) == 0
        text = " ".join(capsys.readouterr().out.split())
    assert "valkey denied" in text
    assert "kvferry flags valkey --keeper prints the line" in text
