"""The streaming client against a real HTTP server that speaks like an engine."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvferry.demo.ask import Asking, Question, Replica
from kvferry.errors import RefusedError, RetryError

QUESTION = Question("q1", (1, 2, 3), 2)
CHUNKS = [
    {"choices": [{"text": "Gr", "logprobs": {"token_logprobs": [-0.5]}}]},
    {"choices": [{"text": "ain", "logprobs": {"token_logprobs": [-0.25]}}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}},
    },
]


@contextmanager
def _engine(
    events: list[dict[str, object]], *, status: int = 200
) -> Iterator[tuple[Replica, list[dict[str, object]]]]:
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"id": self.headers["X-Request-Id"]})
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text in [json.dumps(event) for event in events] + ["[DONE]"]:
                data = f"data: {text}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Replica("A", server.server_address[1]), asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_streamed_answer_is_put_together() -> None:
    with _engine(CHUNKS) as (replica, asked):
        reply = replica.ask(QUESTION)
    assert (reply.text, reply.cached_tokens, reply.output_tokens) == ("Grain", 2, 2)
    assert reply.logprobs == (-0.5, -0.25)
    assert 0 < reply.ttft_s <= reply.latency_s
    assert asked[0]["id"] == "q1"
    assert "cache_salt" not in asked[0]


def test_a_salt_is_sent() -> None:
    with _engine(CHUNKS) as (replica, asked):
        replica.ask(Question("q2", (1,), 1, cache_salt="tenant"))
    assert asked[0]["cache_salt"] == "tenant"


def test_an_error_of_the_replica_is_refused() -> None:
    with _engine([], status=400) as (replica, _), pytest.raises(RefusedError, match="400"):
        replica.ask(QUESTION)


def test_a_stream_without_a_token_is_no_answer() -> None:
    with _engine([]) as (replica, _), pytest.raises(RetryError, match="without a token"):
        replica.ask(QUESTION)


def test_nobody_there_is_an_error_and_not_healthy() -> None:
    with _engine([]) as (replica, _):
        pass
    assert not replica.healthy()
    with pytest.raises(RetryError):
        replica.ask(QUESTION)


def test_a_question_asked_beside_gives_its_answer_or_its_error() -> None:
    with _engine(CHUNKS) as (replica, _):
        assert Asking(replica, QUESTION).reply().text == "Grain"
    with pytest.raises(RetryError):
        Asking(replica, QUESTION).reply()
