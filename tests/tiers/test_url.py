"""URLs: what they mean, and one clear line for what they cannot mean."""

import pytest

from kvferry.addresses import Address
from kvferry.errors import MisconfiguredError
from kvferry.tiers.valkey.url import parse_url
from kvferry.values import TlsFiles


def test_the_parts_of_a_url_are_found() -> None:
    url = parse_url("valkey://user:p%40ss@one:7000,two,[::1]:7002/0")
    assert url.seeds == (Address("one", 7000), Address("two", 6379), Address("::1", 7002))
    assert (url.user, url.password, url.tls, url.cluster) == ("user", "p@ss", None, None)


@pytest.mark.parametrize("scheme", ["redis", "valkey", "VALKEY"])
def test_plain_schemes_mean_the_same(scheme: str) -> None:
    assert parse_url(f"{scheme}://h").tls is None


@pytest.mark.parametrize("scheme", ["rediss", "valkeys", "valkeys+cluster"])
def test_tls_schemes_take_files(scheme: str) -> None:
    url = parse_url(f"{scheme}://h:1/0?ca=/a&cert=/c&key=/k")
    assert url.tls == TlsFiles("/a", "/c", "/k")
    assert url.cluster is (True if scheme.endswith("cluster") else None)


def test_a_unix_socket_is_an_address() -> None:
    assert parse_url("unix:///run/v.sock").seeds == (Address("/run/v.sock", 0),)


def test_a_password_from_elsewhere_wins_and_none_is_ever_shown() -> None:
    url = parse_url("valkey://u:secret1@h", password="secret2")
    assert url.password == "secret2"
    assert "secret" not in f"{url} {url!r}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("localhost:6379", "://"),
        ("http://h", "valkey://"),
        ("valky://h", "did you mean valkey://"),
        ("valkey://h:70000", "70000"),
        ("valkey://h:x", "'x'"),
        ("valkey://:6379", "no host"),
        ("valkey://h/3", "'3'"),
        ("valkey://h?ca=/a", "valkeys://"),
        ("valkeys://h?cert=/c", "key="),
        ("valkeys://h?caa=/c", "'caa'"),
        ("valkeys://h?ca=/a&ca=/b", "twice"),
        ("unix://run/v", "'run/v'"),
        ("valkey://u:secret@h:x", "'x'"),
        ("valkey://u:a?secret@h", "%3F"),
        ("u:secret@h:1", "'...@h:1'"),
        ("valkey://[::1", "the ] is missing: write [::1]"),
        ("valkey://::1:6379", "needs brackets: [::1]"),
        ("valkey://[::zz]:1", "'::zz'"),
        ("valkey://a b:1", "'a b'"),
        ("valkey://h#1", "'h#1'"),
        ("valkey://a..b", "'a..b'"),
        ("valkey://" + "a" * 64, "a" * 64),
        ("unix:///" + "a" * 107, "107 bytes"),
    ],
)
def test_a_wrong_url_is_one_line_that_names_the_fault_and_no_secret(text: str, named: str) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        parse_url(text)
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert "secret" not in message
