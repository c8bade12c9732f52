"""A web server before an S3 server that answers some requests itself, as a store in trouble does."""

import http.client
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

_HOPS = {"connection", "transfer-encoding", "content-length", "date", "server"}


class Answer(NamedTuple):
    """An error of S3."""

    status: int
    code: str


SLOW_DOWN = Answer(503, "SlowDown")
DENIED = Answer(403, "AccessDenied")
SKEWED = Answer(403, "RequestTimeTooSkewed")
NO_BUCKET = Answer(404, "NoSuchBucket")
NO_ROOM = Answer(507, "QuotaExceeded")


class Front:
    """answers: how a request ("PUT", path) ends; None: as the server says. asked: "PUT path", in order."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.answers: Callable[[str, str], Answer | None] = lambda verb, path: None
        self.asked: list[str] = []
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                """Nothing."""

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                path = self.path.partition("?")[0]
                front.asked.append(f"{self.command} {path}")
                told = front.answers(self.command, path)
                if told is not None:
                    text = f"<?xml version='1.0'?><Error><Code>{told.code}</Code></Error>".encode()
                    self._send(told.status, {}, text)
                    return
                real = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    real.request(self.command, self.path, body, dict(self.headers))
                    reply = real.getresponse()
                    self._send(reply.status, dict(reply.getheaders()), reply.read())
                finally:
                    real.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _HOPS:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def puts(self) -> int:
        """How many packs were sent, or tried."""
        return sum(line.startswith("PUT") and "/packs/" in line for line in self.asked)
