"""Asks an OpenAI-compatible replica and times the answer. Standard library only."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import KvferryError, RefusedError, RetryError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
_OK = 200


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ttft_s: from sending the request to the first token's arrival. latency_s: to the last.

    cached_tokens: prompt tokens the engine did not compute, from its own cache or from ours.
    logprobs: of each generated token.
    """

    request_id: str
    text: str
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids, and how to answer it. cache_salt keeps users apart; empty for none."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    cache_salt: str = ""

    def body(self, model: str) -> dict[str, object]:
        """The request's JSON: greedy, streamed, with token counts and log probabilities."""
        body: dict[str, object] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body


class Replica:
    """One engine process's HTTP address. Every call opens its own connection and has a deadline."""

    def __init__(self, name: str, port: int, *, host: str = "127.0.0.1", model: str = "demo") -> None:
        self.name = name
        self.port = port
        self._host = host
        self._model = model

    def healthy(self) -> bool:
        """Whether it answers /health now."""
        try:
            status, _ = self._call("GET", "/health", None, timeout_s=CONNECT_TIMEOUT_S)
        except RetryError:
            return False
        return status == _OK

    def tokenize_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat, as the engine's own template makes them."""
        body = {"model": self._model, "messages": list(messages), "add_generation_prompt": True}
        return tuple(self._json("POST", "/tokenize", body)["tokens"])

    def reset_prefix_cache(self, *, timeout_s: float = 20.0) -> None:
        """Forget the engine's own prefix cache. Raises RetryError when blocks stay in use for too long."""
        deadline = time.monotonic() + timeout_s
        while not self._json("POST", "/reset_prefix_cache", None).get("success"):
            if time.monotonic() > deadline:
                raise RetryError(
                    f"replica {self.name}: its prefix cache could not be reset in {timeout_s:.0f} s"
                )
            time.sleep(0.05)

    def worker_call(self, method: str) -> list[dict[str, Any]]:
        """Run a method of the engine's worker; one result per rank."""
        results = self._json("POST", "/collective_rpc", {"method": method})["results"]
        return list(results)

    def metrics(self) -> str:
        """Its Prometheus page."""
        status, data = self._call("GET", "/metrics", None, timeout_s=CONNECT_TIMEOUT_S)
        if status != _OK:
            raise RefusedError(f"replica {self.name}: /metrics answered {status}")
        return data.decode()

    def ask(self, question: Question, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Reply:
        """Send and read the whole streamed answer.

        Raises RetryError when there is no answer within ``timeout_s`` or the connection breaks,
        RefusedError when the replica answers with an error.
        """
        payload = json.dumps(question.body(self._model)).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": question.request_id}
        connection = http.client.HTTPConnection(self._host, self.port, timeout=timeout_s)
        try:
            connection.connect()
            begun = time.perf_counter()
            connection.request("POST", "/v1/completions", payload, headers)
            response = connection.getresponse()
            if response.status != _OK:
                text = response.read(2000).decode(errors="replace")
                raise RefusedError(f"replica {self.name} answered {response.status}: {text}")
            return _read_stream(question, response, begun=begun)
        except (OSError, http.client.HTTPException) as error:
            raise RetryError(f"replica {self.name}, request {question.request_id}: {error!r}") from error
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        status, data = self._call(method, path, body, timeout_s=ANSWER_TIMEOUT_S)
        if status != _OK:
            raise RefusedError(f"replica {self.name}: {path} answered {status}: {data[:500]!r}")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RetryError(f"replica {self.name}: {path}: {error!r}") from error
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[dict[str, Any], float]]:
    """Server-sent events with their arrival time (perf_counter seconds)."""
    while line := response.readline():
        arrived = time.perf_counter()
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        yield json.loads(line[len(b"data: ") :]), arrived


def _read_stream(question: Question, response: http.client.HTTPResponse, *, begun: float) -> Reply:
    text: list[str] = []
    logprobs: list[float] = []
    first = last = 0.0
    usage: dict[str, Any] = {}
    for event, arrived in _events(response):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            first = first or arrived
            last = arrived
            text.append(choice.get("text", ""))
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    if not first:
        raise RetryError(f"request {question.request_id}: the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        request_id=question.request_id,
        text="".join(text),
        ttft_s=first - begun,
        latency_s=last - begun,
        prompt_tokens=int(usage.get("prompt_tokens", len(question.prompt))),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens", 0)),
        logprobs=tuple(logprobs),
    )


class Asking:
    """A question asked on a thread of its own, while the main thread breaks things."""

    def __init__(self, replica: Replica, question: Question) -> None:
        self._answer: Reply | KvferryError | None = None
        self._thread = threading.Thread(
            target=self._ask, args=(replica, question), name="demo-ask", daemon=True
        )
        self._thread.start()

    def _ask(self, replica: Replica, question: Question) -> None:
        try:
            self._answer = replica.ask(question)
        except KvferryError as error:
            self._answer = error

    @property
    def done(self) -> bool:
        """Whether it was answered, or failed."""
        return not self._thread.is_alive()

    def reply(self) -> Reply:
        """Wait for the answer. Raises what asking raised."""
        self._thread.join()
        if isinstance(self._answer, Reply):
            return self._answer
        raise self._answer or KvferryError("the question was not asked")
