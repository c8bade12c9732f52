"""`kvferry router` before two real vLLM servers with kvferry's connector, a node and its feed."""

import contextlib
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from kvferry.demo.fleet import SERVED_NAME, Fleet, FleetSettings, plan_replicas
from kvferry.demo.model import demo_model
from kvferry.demo.ports import free_port, free_ports, listens
from kvferry.testing.expectations import eventually
from kvferry.testing.processes import Program

pytestmark = pytest.mark.engine


class Site(NamedTuple):
    """feed: of the node."""

    fleet: Fleet
    feed: str


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    feed = f"127.0.0.1:{free_port()}"
    settings = FleetSettings(
        model=demo_model(chosen=None, say=lambda text: None),
        replicas=plan_replicas(2),
        pool_bytes=512 << 20,
        node_arguments=("--feed-listen", feed),
    )
    with Fleet(settings, say=lambda text: None) as running:
        running.start_valkey()
        running.start_node()
        running.start_replicas(["A", "B"])
        yield Site(running, feed)


class Router:
    """With the fleet's workers in these pools."""

    def __init__(self, site: Site, directory: Path, stack: contextlib.ExitStack, *pools: str) -> None:
        self.port, self.metrics = free_ports(2)
        self.urls = [f"http://127.0.0.1:{replica.port}" for replica in site.fleet.replicas.values()]
        workers = [f"{pool}={url}" if pool else url for pool, url in zip(pools, self.urls, strict=True)]
        command = [sys.executable, "-m", "kvferry", "router", "--worker", *workers]
        command += ["--listen", f"127.0.0.1:{self.port}", "--metrics-port", str(self.metrics)]
        command += ["--feed", ",".join(f"{url}={site.feed}" for url in self.urls)]
        command += ["--admin-socket", str(directory / "router.sock")]
        directory.chmod(0o700)
        stack.enter_context(Program("router", command, directory=directory, ready=self._is_ready))
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120.0
        )
        eventually(lambda: self.count("feeds", 'state="followed"') == 1, "the feed")

    def _is_ready(self) -> bool:
        return listens(self.port) and listens(self.metrics)

    def count(self, name: str, labels: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=60) as answer:
            found = re.search(
                rf"^kvferry_router_{name}\{{{labels}\}} ([0-9.e+]+)$", answer.read().decode(), re.MULTILINE
            )
        return float(found[1]) if found else 0.0

    def ask(self, text: str) -> tuple[int, int]:
        """Tokens of a streamed prompt, and how many of them were not computed where it was answered."""
        pieces: list[Any] = list(
            self.client.completions.create(
                model=SERVED_NAME,
                prompt=text,
                max_tokens=4,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        usage = pieces[-1].usage
        assert usage is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def served(fleet: Fleet) -> list[float]:
    """Requests that each replica has finished."""
    return [
        sum(
            float(count)
            for count in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)
        )
        for page in (replica.metrics() for replica in fleet.replicas.values())
    ]


def test_what_one_pool_prefilled_the_other_answers_without_computing_it(site: Site, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        router = Router(site, tmp_path, stack, "prefill", "")
        before = served(site.fleet)
        for topic in ("rivers", "bridges"):
            tokens, cached = router.ask(f"A text of {topic}." + " ferry" * 1200)
            assert cached >= tokens * 0.9
        assert [now - was for now, was in zip(served(site.fleet), before, strict=True)] == [2, 2]
        assert router.count("events_total", 'event="prefilled"') == 2
        short = router.ask("A short one.")
        assert short[1] == 0 and router.count("events_total", 'event="prefilled"') == 2


def test_a_prefix_that_one_engine_computed_is_had_at_the_other(site: Site, tmp_path: Path) -> None:
    """Also where the engine that has it itself is gone from the list."""
    text = "A text of harbours." + " ferry" * 1200
    with contextlib.ExitStack() as stack:
        router = Router(site, tmp_path, stack, "", "other")
        tokens, cached = router.ask(text)
        assert cached == 0
    directory = tmp_path / "again"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        router = Router(site, directory, stack, "other", "")
        assert router.ask(text)[1] >= tokens * 0.9
