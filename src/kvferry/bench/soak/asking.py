"""One request to an engine's server: token ids in, token ids out, given up in the middle if so wanted."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvferry.demo.fleet import SERVED_NAME
from kvferry.errors import RefusedError, RetryError

HOST = "127.0.0.1"
ANSWER_S = 120.0  # an engine that needs longer is stuck
_OK = 200


@dataclass(frozen=True, slots=True)
class Question:
    """stop_after: tokens after which the client goes away; None to hear it out. priority: lower is sooner.

    salt: keeps it apart from all others in the engine's own cache; empty for none.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_after: int | None = None
    priority: int = 0
    salt: str = ""
    logprobs: int | None = None

    def body(self) -> dict[str, object]:
        """The request's JSON: greedy and streamed."""
        body: dict[str, object] = {
            "model": SERVED_NAME,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "priority": self.priority,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.salt:
            body["cache_salt"] = self.salt
        if self.logprobs is not None:
            body |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        return body


@dataclass(slots=True)
class Answer:
    """tokens: so far. cached: prompt tokens that were not computed; known for whole answers alone.

    likely: per token the log probabilities of the likeliest, by token id; if they were asked for.
    """

    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    whole: bool = False
    likely: list[dict[int, float]] = field(default_factory=list[dict[int, float]])


def ask(port: int, question: Question, *, timeout_s: float = ANSWER_S) -> Answer:
    """Ask and read. RetryError when the server goes away or is silent, RefusedError when it says no."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        payload = json.dumps(question.body()).encode()
        connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != _OK:
            text = response.read(2000).decode(errors="replace")
            raise RefusedError(f"the engine answered {response.status}: {text}")
        return _read(question, response)
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise RetryError(f"port {port}: {error!r}") from error
    finally:
        connection.close()


def _read(question: Question, response: http.client.HTTPResponse) -> Answer:
    answer = Answer()
    for event in _events(response):
        if "error" in event:
            raise RefusedError(f"the engine answered {event['error']}")
        for choice in event.get("choices", ()):
            answer.tokens += choice.get("token_ids") or []
            answer.likely += _likely(choice.get("logprobs"))
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = int(details.get("cached_tokens") or answer.cached)
        if question.stop_after is not None and len(answer.tokens) >= question.stop_after:
            return answer
    if len(answer.tokens) < question.max_tokens:
        raise RetryError(f"the stream ended after {len(answer.tokens)} of {question.max_tokens} tokens")
    answer.whole = True
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[len(b"data: ") :])


def _likely(logprobs: dict[str, Any] | None) -> list[dict[int, float]]:
    """Token ids come as ``token_id:7``."""
    found = (logprobs or {}).get("top_logprobs") or []
    return [{int(name.rpartition(":")[2]): float(value) for name, value in one.items()} for one in found]
