"""`kvferry router` before two real vLLM servers, asked by the official openai client and by curl."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvferry.demo.model import demo_model
from kvferry.demo.ports import free_ports, listens
from kvferry.testing.processes import Program

pytestmark = pytest.mark.engine

START_S = 400.0
ANSWER_S = 120.0
MODEL = "smollm2"
WORD = " ferry"


class Fleet:
    """Two engines on a core each, and the router."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        model = demo_model(chosen=None, say=lambda text: None)
        *self.ports, self.port, metrics = free_ports(4)
        self.engines = [
            Program(
                f"engine-{number}",
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
                    *("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "16"),
                    *("--max-model-len", "4096", "--enable-prompt-tokens-details"),
                ],
                directory=directory,
                env=os.environ
                | {
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": str(number),
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
            for number, port in enumerate(self.ports)
        ]
        for engine in self.engines:
            stack.enter_context(engine)  # side by side
        for engine, url in zip(self.engines, self.urls, strict=True):
            engine.wait_for(lambda url=url: healthy(url), what=url, timeout_s=START_S)
        self.socket = directory / "sockets" / "router.sock"
        self.socket.parent.mkdir(mode=0o700)
        router = [sys.executable, "-m", "kvferry", "router", "--worker", *self.urls]
        router += ["--listen", f"127.0.0.1:{self.port}", "--metrics-port", str(metrics), "--feed", "none"]
        router += ["--admin-socket", str(self.socket), "--probe", "1s"]
        self.router = stack.enter_context(
            Program("router", router, directory=directory, ready=lambda: listens(self.port))
        )
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def client(self, url: str = "") -> openai.OpenAI:
        """The official one, which tries nothing twice itself."""
        return openai.OpenAI(
            base_url=f"{url or self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
        )

    def busy(self) -> int:
        """Requests that the engines compute now."""
        return sum(
            int(
                float(
                    re.findall(r"^vllm:num_requests_running\{.*\} ([0-9.e+]+)$", page(url), re.MULTILINE)[0]
                )
            )
            for url in self.urls
            if healthy(url)
        )

    def workers(self) -> list[dict[str, Any]]:
        """As the router tells them on its socket."""
        command = ["curl", "-sS", "--unix-socket", str(self.socket), "http://router/workers"]
        told = subprocess.run(command, capture_output=True, check=True).stdout
        found: list[dict[str, Any]] = json.loads(told)
        return found

    def count(self, name: str, labels: str = "") -> float:
        """Of the router's metrics page."""
        found = re.search(
            rf"^kvferry_router_{name}\{{{labels}\}} ([0-9.e+]+)$", page(self.metrics_url), re.MULTILINE
        )
        return float(found[1]) if found else 0.0


def page(url: str) -> str:
    url = url if url.endswith("metrics") else f"{url}/metrics"
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return str(answer.read().decode())


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def wait(reached: Callable[[], object]) -> None:
    give_up = time.monotonic() + ANSWER_S
    while not reached():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def said(text: str, **more: Any) -> dict[str, Any]:
    """Of a chat completion."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, "seed": 1, **more}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


def test_the_openai_client_gets_what_an_engine_itself_says(fleet: Fleet) -> None:
    through, direct = fleet.client(), fleet.client(fleet.urls[0])
    assert [model.id for model in through.models.list()] == [MODEL]
    asked = said("Name a colour.")
    expected = direct.chat.completions.create(**asked).choices[0].message.content
    assert through.chat.completions.create(**asked).choices[0].message.content == expected
    stream = through.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 16
    completed = through.completions.create(model=MODEL, prompt="One two three", max_tokens=4, temperature=0)
    assert completed.choices[0].text


def test_errors_are_those_of_the_engine_or_say_what_is_wrong(fleet: Fleet) -> None:
    client = fleet.client()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**said(WORD * 5000))
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**said("hello"), "model": "another"})
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body=None, cast_to=object, options={"headers": {}})


def test_curl_gets_the_same_bytes_as_from_the_engine(fleet: Fleet) -> None:
    """But for what an engine does differently each time: names, times, and how many tokens an event has."""
    body = json.dumps(said("Count to five.", stream=True, stream_options={"include_usage": True}))

    def curl(url: str) -> bytes:
        command = ["curl", "-sS", "--no-buffer", "--raw", "-H", "Content-Type: application/json", "-d", body]
        raw = subprocess.run([*command, f"{url}/v1/chat/completions"], capture_output=True, check=True).stdout
        raw = re.sub(rb"chatcmpl-[\w.-]+", b"ID", raw)  # and with it the sizes of chunks
        return re.sub(rb'(?m)^[0-9a-f]+\r$|"created":\d+', b"", raw)

    def text_and_frames(raw: bytes) -> tuple[bytes, list[bytes]]:
        """All that is said, and what it is said in, events that differ in nothing else taken for one."""
        frames = re.sub(rb'"content":"(?:[^"\\]|\\.)+"', b'"content":SAID', raw).split(b"data: ")
        return b"".join(re.findall(rb'"content":"((?:[^"\\]|\\.)*)"', raw)), [
            frame for frame, _ in itertools.groupby(frames)
        ]

    direct = curl(fleet.urls[0])
    assert direct.count(b"data: ") > 4 and b"[DONE]" in direct
    assert text_and_frames(curl(fleet.url)) == text_and_frames(direct)


def test_a_conversation_stays_where_its_prefix_is(fleet: Fleet) -> None:
    client = fleet.client()
    for topic in ("rivers", "bridges", "harbours", "islands"):
        messages = [{"role": "system", "content": f"You know {topic}." + WORD * 400}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=4
            )
            details = answer.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            assert cached >= 256 if turn else cached is not None
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_a_conversation_by_anthropics_api_stays_where_its_prefix_is(fleet: Fleet) -> None:
    client = fleet.client()
    for topic in ("lakes", "ferries", "canals"):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": [{"type": "text", "text": f"Question {turn}?"}]})
            body = {
                "model": MODEL,
                "system": [{"type": "text", "text": f"You know {topic}." + WORD * 400}],
                "messages": messages,
                "max_tokens": 4,
            }
            answer: Any = client.post("/messages", body=body, cast_to=object)
            assert (answer["usage"].get("cache_read_input_tokens") or 0) >= (256 if turn else 0)
            messages.append({"role": "assistant", "content": answer["content"]})


def test_callers_share_no_prefix_whatever_they_send(fleet: Fleet) -> None:
    def cached(key: str, **body: object) -> int:
        client = fleet.client().with_options(api_key=key)
        answer = client.chat.completions.create(
            **said("Secrets." + WORD * 600, max_tokens=1), extra_body=body
        )
        details = answer.usage.prompt_tokens_details if answer.usage is not None else None
        return details.cached_tokens or 0 if details is not None else 0

    assert cached("one") == 0
    assert cached("one") >= 512
    assert cached("two") == 0
    assert cached("two", cache_salt="own") == 0
    assert cached("one", cache_salt="own") == 0
    assert cached("two", cache_salt="own") >= 512
    for salt in ("", 5, "a/b", "x" * 129):
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached("one", cache_salt=salt)
    assert cached("one") >= 512  # the engines live on


def test_engines_tell_when_their_process_began(fleet: Fleet) -> None:
    assert all(
        re.search(r"^process_start_time_seconds [0-9.e+]+$", page(url), re.MULTILINE) for url in fleet.urls
    )


def test_a_client_that_leaves_frees_the_engine(fleet: Fleet) -> None:
    stream = fleet.client().chat.completions.create(
        **{**said("Tell me a long story."), "max_tokens": 3000}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert fleet.busy() == 1
    stream.close()
    wait(lambda: fleet.busy() == 0)
    wait(lambda: fleet.count("inflight_requests") == 0)


def test_an_engine_killed_in_a_stream_is_told_and_the_other_one_goes_on(fleet: Fleet) -> None:
    client = fleet.client()
    streams = [
        client.chat.completions.create(
            **{**said(f"Story number {number}."), "max_tokens": 150},
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number in range(6)
    ]
    for stream in streams:
        next(iter(stream))
    at = {worker["url"]: worker["in_flight"] for worker in fleet.workers()}
    victim = max(at, key=lambda url: at[url])
    fleet.engines[fleet.urls.index(victim)].kill()
    broken = 0
    for stream in streams:
        try:
            for _ in stream:
                pass
        except openai.APIError as error:
            assert "broke off" in str(error)
            broken += 1
    assert broken == at[victim] > 0
    assert fleet.count("events_total", 'event="broken_streams"') == broken
    for number in range(4):
        assert client.chat.completions.create(**said(f"And now {number}?")).choices
    assert {worker["url"]: worker["state"] for worker in fleet.workers()}[victim] == "down"
