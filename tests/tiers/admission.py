"""Starting a node at a Valkey that turns it away, or not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.testing.tier_contract import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.awaited import UnansweredError
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

PASSWORD = "mark-of-a-password"
OPTIONS = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")

Refused = Callable[..., str]


class Refusing:
    """Runs ``kvferry node`` with a URL and a password; the one line that it ends with."""

    def __init__(
        self, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._path = directory / "s"
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, url: str, password: str = "") -> str:
        if password:
            self._monkeypatch.setenv("KVFERRY_VALKEY_PASSWORD", password)
        node = ["node", "--valkey", url, "--socket", str(self._path), "--pool", "64MiB"]
        code = main([*node, "--metrics-port", "0"])
        out, err = self._capsys.readouterr()
        assert code == 2, err
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert PASSWORD not in err
        assert not self._path.exists()
        return err


def unanswered(url: str, password: str) -> str:
    """Why a server at this URL gives no good answer now; there may be one later."""
    with pytest.raises(UnansweredError) as found:
        ValkeyTier.connect(ValkeySettings(parse_url(url, password=password)))
    assert password not in str(found.value)
    return str(found.value)


def works(url: str, password: str | None = None) -> None:
    """Connects, stores and loads."""
    tier = ValkeyTier.connect(ValkeySettings(parse_url(url, password=password)))
    try:
        round_trip(tier)
    finally:
        tier.close()


def round_trip(tier: ValkeyTier, *, seed: int = 1) -> None:
    """Stores a part and loads it."""
    ref, data = some_ref(1000, seed), some_bytes(1000, seed)
    assert store_all(tier, [(ref, data)]) == [Outcome.OK]
    ((result, memory),) = fetch_all(tier, [ref])
    assert (result.outcome, memory) == (Outcome.OK, data)
