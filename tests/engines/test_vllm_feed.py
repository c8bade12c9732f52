"""A real vLLM with a node: what the node tells of its requests, and what vLLM's own KV events tell."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import PATIENT_NODE, START_S, STOP_S, arguments, environment
from tests.engines.vllm_models import VOCABULARY
from tests.feed.following import Following
from tests.feed.view import View
from tests.router.feed.test_kvevents import Loop

from kvferry.feed.wire import Level
from kvferry.node.explain import visible_id
from kvferry.router.feed.kvevents import KvEventsFollower
from kvferry.testing.expectations import eventually
from kvferry.testing.processes import NodeProgram
from kvferry.testing.servers import free_ports
from kvferry.tiers.valkey.url import Address

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Served:
    """``vllm serve`` of one model, with its KV events at two ports."""

    def __init__(self, model: Path, *, directory: Path, socket: Path) -> None:
        self.port, self.events, self.replay = free_ports(3)
        config = arguments(model, socket)["kv_transfer_config"]
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--skip-tokenizer-init", "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--max-model-len", "2048", "--kv-transfer-config", json.dumps(config)]
        command += ["--kv-events-config", json.dumps(events)]
        self.log = directory / "server.log"
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env=environment(VLLM_CPU_OMP_THREADS_BIND="0")
            )

    def ready(self) -> "Served":
        give_up = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < give_up, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return self

    def complete(self, prompt: list[int], request_id: str) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        body["detokenize"] = False
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": request_id},
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            assert answer.status == 200

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(STOP_S)


@pytest.fixture
def loop(stack: ExitStack) -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_each_request_is_told_with_the_id_that_the_client_gave(
    models: Path, tmp_path: Path, stack: ExitStack, loop: Loop
) -> None:
    (port,) = free_ports(1)
    node = NodeProgram(
        PATIENT_NODE,
        socket=tmp_path / "node.sock",
        directory=tmp_path,
        pool="256MiB",
        options=("--feed-listen", f"127.0.0.1:{port}"),
        env=environment(),
    )
    stack.callback(node.close)
    node.start()
    served = Served(models / "llama", directory=tmp_path, socket=node.socket)
    stack.callback(served.close)
    following = Following(Address("127.0.0.1", port))
    stack.callback(following.close)
    view = following.followed().view
    own = View()
    follower: Any = loop.call(lambda: _begin(served, own))
    served.ready()
    rng = random.Random(os.getpid())
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(400)]

    served.complete(prompt, "first")
    eventually(lambda: [visible_id(told.request_id) for told in view.prompts] == ["first"], "a prompt")
    told = view.prompts[0]
    space = view.spaces[told.space]
    chunks = (len(prompt) - 1) // space.chunk_tokens
    assert len(told.digests) == 32 * chunks
    assert (told.prompt_tokens, told.engine_tokens) == (400, 0)
    assert view.engines[told.engine].cache_tokens >= 2048
    eventually(lambda: [visible_id(end.request_id) for end in view.results] == ["first"], "a result")
    wanted = {told.digests[at : at + 32] for at in range(0, len(told.digests), 32)}
    eventually(lambda: wanted <= view.at(Level.MEMORY), "its chunks in memory")

    served.complete(prompt, "second")  # what the engine has all itself
    eventually(lambda: len(view.prompts) == 2, "a prompt")
    again = view.prompts[1]
    assert visible_id(again.request_id) == "second"
    assert again.engine_tokens > 0
    assert again.digests.startswith(told.digests)
    served.complete([5] * 20, "short")
    eventually(lambda: len(view.prompts) == 3 and len(view.results) == 3, "told too")
    assert (visible_id(view.prompts[2].request_id), view.prompts[2].digests) == ("short", b"")

    eventually(lambda: own.at(Level.ENGINE), "vLLM's own events")
    asyncio.run_coroutine_threadsafe(follower.prompt("first", prompt, salt=""), loop.loop)
    eventually(lambda: own.prompts, "found by its tokens")
    blocks = own.prompts[0].digests
    assert len(blocks) >= 32
    assert {blocks[at : at + 32] for at in range(0, len(blocks), 32)} <= own.at(Level.ENGINE)
    assert follower.statistics().orphans == 0
    loop.call(follower.close)


async def _begin(served: Served, view: View) -> KvEventsFollower:
    made = KvEventsFollower("w", f"tcp://127.0.0.1:{served.events}", f"tcp://127.0.0.1:{served.replay}", view)
    made.start()
    return made
