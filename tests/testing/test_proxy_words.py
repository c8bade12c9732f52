"""The fault proxy's arguments and commands: what makes no sense is refused, in one line."""

import socket
from collections.abc import Iterator

import pytest

from kvferry.errors import RefusedError
from kvferry.testing.proxy import Proxy, main, obey

DATA = bytes(range(256))


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """With nobody behind it: nothing passes here."""
    with Proxy(("127.0.0.1", 1)) as made:
        yield made


@pytest.mark.parametrize(
    "line",
    [
        *(f"both latency_s {text}" for text in ("-1", "nan", "inf", "1e400", "x", "3601")),
        *(f"replies rate_bytes_s {text}" for text in ("-1", "nan", "inf", "1e400", "1e-300", "0.5", "")),
        *(f"requests close_delay_s {text}" for text in ("-0.1", "nan", "1e400")),
        *(f"requests corrupt 0 {text}" for text in ("99999999999999999999", "0", "-1", "1.5", "1 1")),
        *(
            f"requests insert {text}"
            for text in ("0 99999999999999999999", "0 0", "-1", "99999999999999999999")
        ),
        *(f"requests cut {text}" for text in ("-1", "99999999999999999999", "1 melt")),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_and_changes_nothing(proxy: Proxy, line: str) -> None:
    with pytest.raises(RefusedError, match="--help"):
        obey(proxy, line)
    for way in (proxy.requests, proxy.replies):
        assert (way.latency_s, way.rate_bytes_s, way.close_delay_s) == (0.0, None, 0.0)
        assert list(way.pieces(DATA, None)) == [DATA]


def test_a_rate_of_0_is_no_limit(proxy: Proxy) -> None:
    obey(proxy, "both rate_bytes_s 1e6")
    obey(proxy, "both rate_bytes_s 0")
    assert (proxy.requests.rate_bytes_s, proxy.replies.rate_bytes_s) == (None, None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--target"),
        (("--target", "foo"), "--target: 'foo' is not HOST:PORT"),
        (("--target", ""), "--target: '' is not HOST:PORT"),
        (("--target", ":6379"), "--target: ':6379' is not HOST:PORT"),
        (("--target", "127.0.0.1:abc"), "--target: 'abc' is not a whole number"),
        (("--target", "127.0.0.1:"), "--target: '' is not a whole number"),
        (("--target", "127.0.0.1:0"), "--target: 0 is outside 1 to 65535"),
        (("--target", "127.0.0.1:99999"), "--target: 99999 is outside 1 to 65535"),
        (("--target", "256.256.256.256.:1"), "--target: the host '256.256.256.256.' is not found"),
        (("--target", "a..b:1"), "--target: the host 'a..b' is not found"),
        (("--target", "127.0.0.1:1", "--port", "70000"), "--port: 70000 is outside 0 to 65535"),
        (("--target", "127.0.0.1:1", "--port", "x"), "--port: 'x' is not a whole number"),
        (("--target", "127.0.0.1:1", "--rate-bytes-s", "nan"), "--rate-bytes-s: 'nan' is outside"),
        (("--target", "127.0.0.1:1", "--rate-bytes-s", "-1"), "--rate-bytes-s"),
        (("--target", "127.0.0.1:1", "--nonsense"), "--nonsense"),
    ],
)
def test_arguments_that_make_no_sense_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_a_port_that_is_taken_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--target", "127.0.0.1:1", "--port", str(port)]) == 2
    assert f"--port: cannot listen on {port}" in capsys.readouterr().err
