"""Prompts sent through an engine, so that what it computes is stored: one token is asked for of each."""

import http.client
import json
import os
import queue
import random
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvferry.errors import ClosedError, KvferryError, MisconfiguredError, RefusedError, RetryError

TRIES = 4
PAUSE_S = 0.5  # before the second try; doubles
MAX_PAUSE_S = 10.0
MAX_LINE_BYTES = 64 << 20
MAX_ANSWER_BYTES = 4 << 20
MAX_SHOWN = 200  # characters of an engine's complaint
MAX_NAMED = 20  # failures that are told with their place
ASK_S = 10.0
KEY_VARIABLE = "OPENAI_API_KEY"
LINES = (".jsonl", ".ndjson")
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_HITS = re.compile(rb"^vllm:(?:external_)?prefix_cache_hits_total(?:\{[^}]*\})?\s+([0-9.eE+]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """place: where it is from, for people. path: of the endpoint. ends: bytes read by then."""

    place: str
    path: str
    body: Mapping[str, Any]
    ends: int


@dataclass(slots=True)
class Sums:
    """So far. reused: None where the engine does not say. failures: place and reason, the first few."""

    prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int | None = 0
    failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    reasons: Counter[str] = field(default_factory=Counter[str])
    read_bytes: int = 0

    def add(self, prompt: Prompt, tokens: int, reused: int | None) -> None:
        """One was answered."""
        self.prompts += 1
        self.prompt_tokens += tokens
        self.read_bytes = max(self.read_bytes, prompt.ends)
        known = self.reused_tokens is not None and reused is not None
        self.reused_tokens = (self.reused_tokens or 0) + (reused or 0) if known else None

    def fail(self, place: str, why: str) -> None:
        """One was not."""
        self.failed += 1
        self.reasons[why] += 1
        if len(self.failures) < MAX_NAMED:
            self.failures.append((place, why))


class Engine:
    """An engine's OpenAI API. Any thread may ask."""

    def __init__(self, url: str, *, timeout_s: float, environ: Mapping[str, str] = os.environ) -> None:
        """url: with or without ``/v1``. Raises MisconfiguredError."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise MisconfiguredError(f"--engine {url!r} is no such address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise MisconfiguredError(f"--engine {url!r} is no such address; write http://host:8000")
        if parts.password is not None:
            raise MisconfiguredError(f"--engine holds a password; put a key into {KEY_VARIABLE}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._encrypted = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = urllib.parse.urlsplit(self.url).path
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if key := environ.get(KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self, wanted: str | None) -> str:
        """The one to ask for. Raises ClosedError without an engine, RefusedError where it has no such."""
        try:
            answer = self._ask("/v1/models", None, ASK_S)
        except RefusedError:
            if wanted is None:
                raise
            return wanted
        names = [
            str(each["id"]) for each in answer.get("data", ()) if isinstance(each, dict) and "id" in each
        ]
        if wanted is not None and (wanted in names or not names):
            return wanted
        if wanted is None and len(names) == 1:
            return names[0]
        has = ", ".join(names[:MAX_NAMED]) or "none"
        what = "name one with --model" if wanted is None else f"{wanted!r} is none of them"
        raise RefusedError(f"the engine at {self.url} serves {has}; {what}")

    def send(self, prompt: Prompt, model: str) -> tuple[int, int | None]:
        """Tokens of the prompt, and how many of them were not computed; None where that is not said.

        Asks again a few times where that may help. Raises KvferryError, one line.
        """
        body = {**prompt.body, "model": model, "max_tokens": 1, "n": 1, "stream": False}
        for name in ("max_completion_tokens", "stream_options", "best_of", "min_tokens"):
            body.pop(name, None)
        usage = self._patiently(prompt.path, json.dumps(body).encode()).get("usage")
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise RefusedError("the engine's answer does not say how many tokens the prompt has")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return usage["prompt_tokens"], cached if isinstance(cached, int) else None

    def hits(self) -> float | None:
        """Prompt tokens that it has not computed since its start, by its own counters; None: no such."""
        with suppress(KvferryError):
            found = _HITS.findall(self._read("/metrics", None, ASK_S))
            return sum(float(value) for value in found) if found else None
        return None

    def _patiently(self, path: str, data: bytes) -> dict[str, Any]:
        pause_s = PAUSE_S
        for _ in range(TRIES - 1):
            with suppress(ClosedError, RetryError):
                return self._ask(path, data, self._timeout_s)
            time.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return self._ask(path, data, self._timeout_s)

    def _ask(self, path: str, data: bytes | None, timeout_s: float) -> dict[str, Any]:
        try:
            answer = json.loads(self._read(path, data, timeout_s))
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the engine answered what is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise RefusedError(f"the engine answered with a {type(answer).__name__}")
        return answer

    def _read(self, path: str, data: bytes | None, timeout_s: float) -> bytes:
        """No other address is asked than the one that was given: the key is for that one."""
        late = RetryError(f"no answer within {timeout_s:.0f} s; give more with --timeout")
        cut = threading.Event()
        try:
            with closing(self._connection(timeout_s)) as connection, _cutting(connection, timeout_s, cut):
                connection.request("GET" if data is None else "POST", self._path + path, data, self._headers)
                with connection.getresponse() as answer:
                    content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            if cut.is_set() or isinstance(error, TimeoutError):
                raise late from error
            raise ClosedError(f"no engine answers at {self.url}: {error}") from error
        if cut.is_set():
            raise late
        if not 200 <= answer.status < 300:
            why = _complaint(answer.status, answer.reason, content)
            raise (RetryError if answer.status in _AGAIN else RefusedError)(why)
        return content

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        connection.connect()
        return connection


@contextmanager
def _cutting(
    connection: http.client.HTTPConnection, timeout_s: float, cut: threading.Event
) -> Iterator[None]:
    """Ends whatever waits for that connection after so long, also for the rest of what comes bit by bit."""
    with socket.socket(fileno=os.dup(connection.sock.fileno())) as own:  # the other may be closed before

        def end() -> None:
            cut.set()
            with suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _complaint(code: int, reason: str, content: bytes) -> str:
    """What the engine says, shortened."""
    if 300 <= code < 400:
        return f"the engine sends on to another address ({code}); name that one with --engine"
    said = ""
    with suppress(ValueError, RecursionError):
        answer = json.loads(content)
        inner = answer.get("error", answer) if isinstance(answer, dict) else None
        said = str(inner.get("message", "")) if isinstance(inner, dict) else str(inner or "")
    hint = f"; its key goes into {KEY_VARIABLE}" if code in (401, 403) else ""
    return f"the engine refused it ({code}): {' '.join(said.split())[:MAX_SHOWN] or reason}{hint}"


def read(paths: Sequence[str]) -> Iterator[Prompt | tuple[str, str]]:
    """The prompts of all files, or where one should be and why it is none. Raises MisconfiguredError.

    A file of JSON lines (``.jsonl``, ``.ndjson``, ``-`` for standard input) holds one prompt per line: a
    text, or an object as for the API, or one with it under ``body``. Any other file is one prompt.
    """
    before = 0
    for path in paths:
        with ExitStack() as stack:
            file = _opened(path, stack)
            by_line = path == "-" or path.endswith(LINES)
            for number, content in enumerate(_pieces(file, path, by_line=by_line), 1):
                before += len(content)
                if not by_line:
                    yield _of_text(content, path, before)
                elif content.strip():
                    yield _of_line(content, f"{path}:{number}", before)


def _pieces(file: BinaryIO, path: str, *, by_line: bool) -> Iterator[bytes]:
    while content := file.readline(MAX_LINE_BYTES + 1) if by_line else file.read(MAX_LINE_BYTES + 1):
        if len(content) > MAX_LINE_BYTES:
            raise MisconfiguredError(f"{path}: a prompt is longer than {MAX_LINE_BYTES >> 20} MiB")
        yield content


def total_bytes(paths: Sequence[str]) -> int:
    """Of all files; 0 where one of them is standard input."""
    with suppress(OSError):
        return 0 if "-" in paths else sum(Path(path).stat().st_size for path in paths)
    return 0


def _opened(path: str, stack: ExitStack) -> BinaryIO:
    if path == "-":
        return stack.enter_context(open(0, "rb", closefd=False))
    try:
        if Path(path).is_dir():
            raise MisconfiguredError(f"{path} is a directory; name the files in it")
        return stack.enter_context(open(path, "rb"))
    except OSError as error:
        raise MisconfiguredError(f"{path}: {error.strerror}") from error


def _of_text(content: bytes, path: str, ends: int) -> Prompt | tuple[str, str]:
    try:
        return Prompt(path, "/v1/completions", {"prompt": content.decode()}, ends)
    except UnicodeDecodeError:
        return path, "it is no text in UTF-8"


def _of_line(line: bytes, place: str, ends: int) -> Prompt | tuple[str, str]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return place, f"it is no JSON: {error}"
    if isinstance(content, str):
        content = {"prompt": content}
    body = content.get("body", content) if isinstance(content, dict) else None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        return place, "it is no text, and no object with either a prompt or messages"
    return Prompt(place, "/v1/chat/completions" if "messages" in body else "/v1/completions", body, ends)


class Crew:
    """Threads that send prompts to one engine, so many at a time. sums: what became of them so far."""

    def __init__(self, engine: Engine, *, model: str, size: int) -> None:
        self.sums = Sums()
        self.gone: ClosedError | None = None  # the engine is: what is left is not sent any more
        self._engine = engine
        self._model = model
        self._lock = threading.Lock()
        self._waiting: queue.Queue[Prompt | None] = queue.Queue(maxsize=size)
        # Daemons: who interrupts the command does not wait for answers that take minutes.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(size)]
        for thread in self._threads:
            thread.start()

    def send(self, prompt: Prompt | tuple[str, str]) -> None:
        """As soon as one of them has time."""
        if isinstance(prompt, tuple):
            with self._lock:
                self.sums.fail(*prompt)
        else:
            self._waiting.put(prompt)

    def end(self, waited: Callable[[], None]) -> None:
        """Once all are answered. waited: called now and then meanwhile."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)
                waited()

    def _work(self) -> None:
        while (prompt := self._waiting.get()) is not None:
            if self.gone is not None:
                continue
            try:
                tokens, reused = self._engine.send(prompt, self._model)
            except KvferryError as error:
                if isinstance(error, ClosedError):
                    self.gone = error
                with self._lock:
                    self.sums.fail(prompt.place, str(error))
            else:
                with self._lock:
                    self.sums.add(prompt, tokens, reused)


def send_all(
    engine: Engine,
    prompts: Iterator[Prompt | tuple[str, str]],
    *,
    model: str,
    concurrency: int,
    progress: Callable[[Sums], None],
) -> Sums:
    """So many at a time, in order. Raises ClosedError when the engine is gone: the rest would fail too."""
    crew = Crew(engine, model=model, size=concurrency)

    def show() -> None:
        progress(crew.sums)

    try:
        for prompt in prompts:
            crew.send(prompt)
            show()
            if crew.gone is not None:
                break
    except KvferryError:
        crew.end(show)
        raise
    crew.end(show)
    if crew.gone is not None:
        raise crew.gone
    return crew.sums
