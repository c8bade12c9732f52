"""An address that is open to all is warned of."""

from dataclasses import replace
from pathlib import Path

from kvferry.router.settings import RouterSettings, parse_listen
from kvferry.router.strangers import complaints, trust_of


def _said(text: str, **more: object) -> list[str]:
    settings = replace(RouterSettings(), listen=parse_listen(text), **more)
    return complaints(settings, trust_of(settings))


def test_beyond_loopback_it_wants_tls_and_a_rule_that_refuses_strangers(tmp_path: Path) -> None:
    assert _said("127.0.0.1") == []
    assert [("--tls-cert" in line, "--trust" in line) for line in _said("0.0.0.0")] == [
        (True, False),
        (False, True),
    ]
    tls = {"tls_cert": tmp_path / "c", "tls_key": tmp_path / "k"}
    file = tmp_path / "trust.toml"
    file.write_text('unlisted = "refuse"\n')  # who has no key gets in
    assert len(_said("0.0.0.0", **tls, trust=file)) == 1
    file.write_text('unlisted = "refuse"\nkeyless = "refuse"\n')
    assert _said("0.0.0.0", **tls, trust=file) == []
    assert _said("0.0.0.0", **tls, tls_ca=tmp_path / "ca") == []
