"""Why a bucket cannot be used: the usual mistakes are told apart, each with what to do."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.authority import Authority, Issued

from kvferry.errors import MisconfiguredError
from kvferry.testing.servers import free_ports
from kvferry.tiers.awaited import UnansweredError
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier


@pytest.fixture(autouse=True)
def begun(obstore: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextmanager
def web(status: int, text: str = "<html>hello</html>", issued: Issued | None = None) -> Iterator[str]:
    """The address of a server that answers everything so, over TLS if it has a certificate."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            """Who speaks no TLS to it is expected here."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if issued is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(issued.cert, issued.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refusal(endpoint: str, **values: Any) -> str:
    """One line about an endpoint at which no bucket can be used."""
    keys = {"access_key": "mark-of-a-key", "secret_key": "mark-of-a-secret", "region": "us-east-1"}
    settings = ObjectSettings("s3://bucket/p", endpoint=endpoint, stall_s=60.0, **(keys | values))
    with pytest.raises(UnansweredError) as found:
        ObjectTier.open(settings).close()
    line = str(found.value)
    assert "\n" not in line
    assert "mark-of" not in line
    assert line.startswith("objects at s3://bucket/p: ")
    return line.removeprefix("objects at s3://bucket/p: ")


def test_where_nobody_listens() -> None:
    host = f"127.0.0.1:{free_ports(1)[0]}"
    assert refusal(f"http://{host}") == f"nobody listens at {host}: check the endpoint (AWS_ENDPOINT_URL)"


def test_a_name_that_is_none() -> None:
    assert refusal("http://bucket.invalid:9000").startswith("there is no host bucket.invalid:9000: check the")


@pytest.mark.parametrize("status", [200, 301, 405])
def test_what_is_no_s3(status: int) -> None:
    with web(status) as host:
        line = refusal(f"http://{host}")
    assert "no S3: check the endpoint" in line
    assert line.startswith("what answers at ")


def test_what_knows_no_such_path() -> None:
    with web(404) as host:
        assert "check the endpoint (AWS_ENDPOINT_URL), or create the bucket" in refusal(f"http://{host}")


def test_another_region() -> None:
    with web(301, "<Error><Code>PermanentRedirect</Code></Error>") as host:
        assert "AWS_REGION" in refusal(f"http://{host}")
    with web(400, "<Error><Code>AuthorizationHeaderMalformed</Code></Error>") as host:
        assert "AWS_REGION" in refusal(f"http://{host}")


def test_credentials_that_are_refused_with_the_stores_own_word() -> None:
    for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
        with web(403, f"<Error><Code>{code}</Code></Error>") as host:
            line = refusal(f"http://{host}")
        assert "AWS_ACCESS_KEY_ID" in line
        assert line.endswith(f"({code})")


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with web(404) as host:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{host}")
        line = refusal(f"http://{host}", access_key=None, secret_key=None)
    assert line.startswith("no credentials: set AWS_ACCESS_KEY_ID")


def test_an_authority_that_is_unknown_until_it_is_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web(200, issued=authority.issue("s3")) as host:
        assert "unknown authority" in refusal(f"https://{host}")
        assert "SSL_CERT_FILE" in refusal(f"https://{host}")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert "is no S3" in refusal(f"https://{host}"), "and so it was let in"


@pytest.mark.parametrize(
    ("issued", "words"),
    [
        ({"host": "elsewhere.example"}, "is for another host"),
        ({"first_day": -9, "last_day": -1}, "is not valid today"),
    ],
)
def test_a_certificate_that_does_not_fit(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, issued: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    with web(200, issued=authority.issue("unfit", **issued)) as host:
        assert words in refusal(f"https://{host}")


def test_one_end_speaks_tls_and_the_other_does_not(authority: Authority) -> None:
    with web(200) as host:
        assert f"{host} speaks no TLS there: write http://" in refusal(f"https://{host}")
    with web(200, issued=authority.issue("s3")) as host:
        assert "TLS" in refusal(f"http://{host}")
    with web(400, "Client sent an HTTP request to an HTTPS server.\n") as host:
        assert f"{host} wants TLS: write https://" in refusal(f"http://{host}")


def test_a_directory_that_is_not_ours_never_will_be(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    (directory / "v1").write_text("no directory")
    with pytest.raises(MisconfiguredError) as found:
        ObjectTier.open(ObjectSettings(f"file://{directory}")).close()
    assert "AWS_" not in str(found.value)


def test_a_directory_that_is_made_for_objects_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    ObjectTier.open(ObjectSettings(f"file://{directory}")).close()
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(MisconfiguredError, match=r"open to others or theirs.*chmod 700"):
        ObjectTier.open(ObjectSettings(f"file://{directory}")).close()
    assert not list(directory.iterdir())
