"""Logs of requests to an OpenAI-like API: chat messages or a prompt, with what surrounds them in the log.

A line is the request's body, or holds it under ``request``, ``body`` and the like, as an object or as JSON in
a text. Times, sessions and ``usage`` are taken from wherever they usually stand. A prompt of token ids is
exact. Text becomes tokens at a fixed number of bytes each: that of the first lines where they say
``usage.prompt_tokens``, else ``BYTES_PER_TOKEN``; blocks are then that many bytes.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import msgspec
import xxhash

from kvferry.traces import blocks
from kvferry.traces.formats import ANY, DEFAULT_BLOCK_TOKENS, Clock, Opening, decoded
from kvferry.traces.request import MalformedError, Part, Request
from kvferry.traces.times import seconds
from kvferry.traces.tokens import OUTPUT_COUNTS, SESSIONS, TIMES, first, named, whole

BYTES_PER_TOKEN = 4.0
_DATA = b"data by its digest "
_PLAUSIBLE = (1.0, 16.0)  # bytes a token, beyond which usage counts something else (images, a hidden prompt)
_INNER = (
    "request", "body", "request_body", "payload", "data", "kwargs", "params", "json", "raw_request", "log",
    "message", "msg", "jsonPayload", "attributes",
)  # fmt: skip
_DATA_BYTES = 512  # a longer text without a space is an image or the like
_MAX_DEPTH = 4


class OpenAiRequests:
    """JSON lines of requests."""

    format = "openai"
    clock = Clock.TRACE

    def __init__(self, *, bytes_per_token: float, block_tokens: int, measured: bool) -> None:
        self.block_tokens = block_tokens
        self._said = "as usage says in the first lines" if measured else "an estimate"
        self._data = self._continued = False
        self._bytes_per_token = bytes_per_token
        # Never less than the tokens it stands for, so that a prompt has no more blocks than its tokens fill.
        self._block_bytes = math.ceil(block_tokens * bytes_per_token)

    @property
    def note(self) -> str:
        """How tokens are counted, and what was met that cannot be."""
        text = f"tokens are text at {self._bytes_per_token:.2f} bytes each, {self._said}"
        if self._data:
            text += "; images and other data count as a few tokens each"
        if self._continued:
            text += "; of requests with previous_response_id the log lacks what they continue"
        return text

    @classmethod
    def of(cls, opening: Opening) -> "OpenAiRequests | None":
        """A reader, if the first objects have requests."""
        ratios, known = [], False
        for record in opening.objects:
            body = body_of(record)
            if body is None:
                continue
            known = True
            tokens = whole(_usage(record).get("prompt_tokens"))
            try:
                size = sum(len(part.content) for part in parts_of(body))
            except RecursionError:
                continue
            if tokens and size and _PLAUSIBLE[0] <= size / tokens <= _PLAUSIBLE[1]:
                ratios.append((size, tokens))
        if not known:
            return None
        measured = sum(size for size, _ in ratios) / sum(tokens for _, tokens in ratios) if ratios else None
        return cls(
            bytes_per_token=measured or BYTES_PER_TOKEN,
            block_tokens=opening.block_tokens or DEFAULT_BLOCK_TOKENS,
            measured=measured is not None,
        )

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request; several where its prompt is a list of prompts. Raises MalformedError."""
        record = decoded(line, ANY)
        body = body_of(record) if isinstance(record, dict) else None
        if body is None or not isinstance(record, dict):
            raise MalformedError("no messages, prompt or input")
        usage = _usage(record)
        outputs = whole(first(usage, ("completion_tokens", "output_tokens")))
        outputs = whole(first(record, OUTPUT_COUNTS)) if outputs is None else outputs
        time = first(record, TIMES)
        time_s = seconds(first(body, TIMES) if time is None else time)
        session = first(record, SESSIONS)
        session = first(body, SESSIONS) if session is None else session
        name = None if session is None else named(session)
        bodies = _one_by_one(body)
        outputs = outputs if len(bodies) == 1 else None  # what is said of all of them is of none
        try:
            return [self._request(one, time_s=time_s, outputs=outputs, session=name) for one in bodies]
        except RecursionError as error:
            raise MalformedError("nested too deeply") from error

    def _request(
        self, body: Mapping[str, object], *, time_s: float | None, outputs: int | None, session: str | None
    ) -> Request:
        seed = blocks.seed_of(*(named(body.get(name)) for name in ("model", "cache_salt")))
        ids = body.get("prompt")
        if _is_tokens(ids):
            keys = blocks.of_tokens(ids, self.block_tokens, seed=seed)
            return Request(time_s, len(ids), outputs, keys, session)
        parts = tuple(parts_of(body))
        content = b"".join(part.content for part in parts)
        self._data = self._data or _DATA in content
        if not content:
            raise MalformedError("the prompt is empty")
        if body.get("previous_response_id") is not None:
            self._continued = True
            return Request(
                time_s, max(1, round(len(content) / self._bytes_per_token)), outputs, None, session
            )
        return Request(
            time_s=time_s,
            input_tokens=max(1, round(len(content) / self._bytes_per_token)),
            output_tokens=outputs,
            blocks=blocks.of_bytes(content, self._block_bytes, seed=seed),
            session=session,
            parts=parts,
            family=named(body.get("model")),
            prefixes=_prefixes(parts, seed) if len(parts) > 1 else (),
        )


def _prefixes(parts: Sequence[Part], seed: int) -> tuple[int, ...]:
    hasher, found = xxhash.xxh3_64(seed=seed), []
    for part in parts:
        hasher.update(part.content)
        found.append(hasher.intdigest())
    return tuple(found)


def body_of(record: object, depth: int = 0) -> Mapping[str, object] | None:
    """The request's body in a log's record."""
    if isinstance(record, str) and record.lstrip().startswith("{"):
        try:
            record = decoded(record, ANY)
        except MalformedError:
            return None
    if not isinstance(record, dict) or depth > _MAX_DEPTH:
        return None
    if isinstance(listed := record.get("messages"), str) and listed.lstrip().startswith("["):
        with contextlib.suppress(MalformedError):
            record = record | {"messages": decoded(listed, ANY)}
    if isinstance(record.get("messages"), list) or isinstance(record.get("prompt"), str | list):
        return record
    for name in _INNER:
        inner = body_of(record.get(name), depth + 1)
        if inner is not None:
            return inner
    return record if isinstance(record.get("input"), str | list) else None


def _one_by_one(body: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """The API takes a list of prompts, texts or token ids, as that many requests."""
    if isinstance(body.get("messages"), list):
        return [body]
    name = "prompt" if "prompt" in body else "input"
    prompts = body.get(name)
    if not isinstance(prompts, list) or not prompts:
        return [body]
    if not all(isinstance(prompt, str) for prompt in prompts) and not all(map(_is_tokens, prompts)):
        return [body]
    rest = {other: value for other, value in body.items() if other not in ("prompt", "input")}
    return [rest | {"prompt": prompt} for prompt in prompts]


def _is_tokens(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def parts_of(body: Mapping[str, object]) -> Iterator[Part]:
    """The prompt as chat templates order it: tools, system, messages. Our marks stand for a template's."""
    tools = first(body, ("tools", "functions"))
    if tools:
        yield Part("tools", _encoded(_short(tools)))
    for name in ("system", "instructions"):
        if body.get(name):
            yield Part("system", b"\nsystem:" + _text(body[name]))
    messages = body.get("messages", body.get("prompt", body.get("input")))
    for number, message in enumerate(messages if isinstance(messages, list) else [messages]):
        if isinstance(message, dict):
            role = str(message.get("role", message.get("type", "message")))
            rest = {
                name: value
                for name, value in message.items()
                if name not in ("role", "content") and value not in (None, [], {})
            }
            content = _text(message.get("content")) + (_text(rest) if rest else b"")
            yield Part(f"{role} message {number}", f"\n{role}:".encode() + content)
        elif message is not None:
            yield Part("prompt", _text(message))


def _text(value: object) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode(errors="replace")
    if isinstance(value, list):
        return b"".join(map(_piece, value))
    return _encoded(_short(value))


def _piece(piece: object) -> bytes:
    """Of a content in several pieces: text as it is, anything else with what it holds."""
    if isinstance(piece, dict) and isinstance(piece.get("text"), str):
        return bytes(piece["text"].encode(errors="replace"))
    return _encoded(_short(piece))


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a pair of surrogates
        return json.dumps(value).encode()


def _short(value: object) -> object:
    """Images and the like by their digests: their length says nothing of their tokens."""
    if isinstance(value, str):
        long = len(value) > _DATA_BYTES and " " not in value and "\n" not in value
        digest = xxhash.xxh3_64_hexdigest(value.encode(errors="replace")) if long else ""
        return f"{_DATA.decode()}{digest}" if long else value
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def _usage(record: object, depth: int = 0) -> Mapping[str, object]:
    """What the response said it used."""
    if not isinstance(record, dict) or depth > _MAX_DEPTH:
        return {}
    usage = record.get("usage")
    if isinstance(usage, dict):
        return usage
    if isinstance(record.get("prompt_tokens"), int):  # beside the request, as some gateways write it
        return record
    for name in ("response", "body", "output", "result"):
        found = _usage(record.get(name), depth + 1)
        if found:
            return found
    return {}
