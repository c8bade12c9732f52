"""Where a node publishes: off unless told, and not open to all beyond loopback."""

from pathlib import Path

import pytest

from kvferry.addresses import Address
from kvferry.config import load_node_settings
from kvferry.errors import MisconfiguredError

CERT = {"feed_tls_cert": "/c", "feed_tls_key": "/k"}


def test_nothing_is_published_unless_told() -> None:
    assert load_node_settings({}, environ={}).feed is None


def test_on_loopback_no_secret_is_wanted_and_the_port_is_known() -> None:
    feed = load_node_settings({"feed_listen": "127.0.0.1"}, environ={}).feed
    assert feed is not None
    assert (feed.listen, feed.token, feed.tls) == (Address("127.0.0.1", 9474), None, None)


def test_beyond_loopback_a_token_or_certificates_of_routers_are(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word\n")
    token.chmod(0o600)
    by_token = load_node_settings({"feed_listen": "10.0.0.5", "feed_token_file": str(token)}, environ={}).feed
    assert by_token is not None
    assert by_token.token is not None
    assert by_token.token.reveal() == "word"
    assert "word" not in repr(by_token)
    by_tls = load_node_settings({"feed_listen": "10.0.0.5:1", **CERT, "feed_tls_ca": "/a"}, environ={}).feed
    assert by_tls is not None
    assert by_tls.tls is not None
    assert by_tls.tls.ca == "/a"
    environment = load_node_settings({"feed_listen": "10.0.0.5"}, environ={"KVFERRY_FEED_TOKEN": "t"}).feed
    assert environment is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"feed_listen": "10.0.0.5"}, "everyone who reaches 10.0.0.5:9474 could follow"),
        ({"feed_listen": "10.0.0.5", **CERT}, "everyone who reaches"),
        ({"feed_listen": "0.0.0.0:9"}, "everyone who reaches"),
        ({"feed_listen": "node.internal"}, "is no IP address"),
        ({"feed_listen": "127.0.0.1", "feed_tls_cert": "/c"}, "belong together"),
        ({"feed_listen": "127.0.0.1", "feed_tls_ca": "/c"}, "no feed_tls_cert"),
        ({"feed_tls_ca": "/c"}, "no feed_listen"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(MisconfiguredError, match=words):
        load_node_settings(flags, environ={})
