"""A small server that speaks the OpenAI API over HTTP/1.1 as engines do, and has a prefix cache of its own.

A character is a token. It keeps connections, answers in chunks, wants a key, turns away what is too long
or too much at a time, and counts what it computed.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

BLOCK_TOKENS = 16
MODEL = "tiny"


class Refused(Exception):
    """An error of the API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class OpenAiServer:
    """tells: whether usage says what was reused. most: requests at a time; more are turned away (429)."""

    def __init__(self, *, key: str, max_model_len: int = 2048, most: int = 2, tells: bool = True) -> None:
        self.key, self.max_model_len, self.most, self.tells = key, max_model_len, most, tells
        self.computed_tokens = self.reused_tokens = self.turned_away = 0
        self.connections: set[tuple[str, int]] = set()
        self._blocks: set[str] = set()
        self._running = 0
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                api.connections.add(self.client_address)

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._send(200, api.metrics(), "text/plain")
                elif self.path == "/v1/models":
                    self._answer(lambda: {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                else:
                    self._answer(lambda: api.refuse(404, "Not Found"))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(lambda: api.complete(self.path, json.loads(content)))

            def _answer(self, work: Any) -> None:
                try:
                    if self.headers["Authorization"] != f"Bearer {api.key}":
                        raise Refused(401, "Unauthorized")
                    status, answer = 200, work()
                except Refused as refused:
                    status = refused.status
                    answer = {"error": {"message": str(refused), "type": "BadRequestError", "code": status}}
                self._send(status, json.dumps(answer), "application/json")

            def _send(self, status: int, text: str, kind: str) -> None:
                """In chunks of a few bytes."""
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                content = text.encode()
                for at in range(0, len(content), 50):
                    piece = content[at : at + 50]
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def refuse(self, status: int, message: str) -> dict[str, Any]:
        raise Refused(status, message)

    def metrics(self) -> str:
        with self._lock:
            reused = float(self.reused_tokens)
        name = "vllm:prefix_cache_hits_total"
        return f'# TYPE {name} counter\n{name}{{engine="0",model_name="{MODEL}"}} {reused}\n'

    def complete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, as far as it is allowed. Raises Refused."""
        if path not in ("/v1/completions", "/v1/chat/completions"):
            raise Refused(404, "Not Found")
        if body.get("model") != MODEL:
            raise Refused(404, f"The model `{body.get('model')}` does not exist.")
        with self._lock:
            if self._running >= self.most:
                self.turned_away += 1
                raise Refused(429, "Too Many Requests")
            self._running += 1
        try:
            return self._complete(path, body)
        finally:
            with self._lock:
                self._running -= 1

    def _complete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path.endswith("chat/completions")
        text = _templated(body["messages"]) if chat else body["prompt"]
        salted = body.get("cache_salt", "") + "|"
        if len(text) + body["max_tokens"] > self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        with self._lock:
            reused = 0
            for end in range(BLOCK_TOKENS, len(text), BLOCK_TOKENS):  # the last token is computed always
                if salted + text[:end] not in self._blocks:
                    break
                reused = end
            self._blocks |= {salted + text[:end] for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS)}
            self.reused_tokens += reused
            self.computed_tokens += len(text) - reused
        usage: dict[str, Any] = {
            "prompt_tokens": len(text),
            "completion_tokens": 1,
            "total_tokens": len(text) + 1,
        }
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": reused}
        choice = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": "x"}} if chat else {"text": "x"}
        return {"id": "cmpl-1", "model": MODEL, "choices": [choice], "usage": usage}


def _templated(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
