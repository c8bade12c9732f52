"""Real engines with models of the kinds of KV memory that vLLM serves on a CPU. One engine for each.

An engine's own memory is emptied and overwritten with zeros before it loads: what it then answers with comes
from the node.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess, arguments
from tests.engines.vllm_requests import REUSE_S, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# On a CPU vLLM stops a prefill at the last multiple of its default block, 128, and keeps a state only where
# that ends a block of the model's: not so with any number of tokens.
TOKENS = 1030


@dataclass(frozen=True)
class Style:
    """A model, and what a load of it has to bring.

    page_bytes: one block of one layer. full: layers that need every block. trailing: layers that need their
    last ``window_blocks`` alone. state_bytes: of those that keep a recurrent state instead. group_layers: how
    many layers share a block's number. tokens: of its prompts.
    """

    model: str
    block: int
    page_bytes: int
    full: int
    trailing: int
    window_blocks: int
    state_bytes: int = 0
    group_layers: int = 1
    tokens: int = TOKENS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        """Tokens of a prompt that a hit saves."""
        return (self.tokens - 1) // self.block * self.block

    def nbytes(self, *, first: int = 0) -> int:
        """Of a load of ``reused`` tokens when the engine has ``first`` blocks itself."""
        blocks = self.reused // self.block
        new = blocks - first
        trailing = self.state_bytes or self.page_bytes * min(new, self.window_blocks)
        return self.page_bytes * self.full * new + self.trailing * trailing


STYLES = [
    Style("gptoss", 128, 32 << 10, full=2, trailing=2, window_blocks=1, group_layers=2),
    # The boundary at 896 lies in the middle of a local chunk of 256.
    Style("llama4", 128, 32 << 10, full=1, trailing=3, window_blocks=1, tokens=1000),
    Style("qwen3next", 256, 128 << 10, full=1, trailing=3, window_blocks=1, state_bytes=68_608),
    # vLLM's CPU kernel for Mamba-2 fails where a prefill goes past a block whose state is kept.
    Style(
        "granite",
        384,
        96 << 10,
        full=1,
        trailing=3,
        window_blocks=1,
        state_bytes=68_992,
        options={"max_num_batched_tokens": 384},
    ),
]


class Served:
    """An engine with a model, and its node."""

    def __init__(self, style: Style, node: NodeProcess, engine: Engine) -> None:
        self.style, self.node, self.engine = style, node, engine

    def forget(self) -> None:
        """The engine's own memory is empty and holds zeros."""
        self.engine.reset()
        self.engine.ask("scrub")

    def until_loaded(self, asked: list[int], *, first: int = 0) -> tuple[dict[str, Any], dict[str, int]]:
        """The answer once all that can be reused is, and what was counted meanwhile.

        first: blocks that the engine computes itself before.
        """
        give_up = time.monotonic() + REUSE_S
        while True:
            self.forget()
            if first:
                self.engine.generate(asked[: first * self.style.block + 1])
            answer, counted = self.counted(lambda: self.engine.generate(asked))
            if answer["cached"] == self.style.reused:
                return answer, counted
            assert time.monotonic() < give_up, f"{answer['cached']} of {self.style.reused}: {counted}"

    def counted(self, ask: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, int]]:
        """An answer, and what the connector counted meanwhile."""
        name = "vllm:kvferry_"
        before = self.engine.ask("metrics")
        answer = ask()
        after = self.engine.ask("metrics")
        new = {key: int(after[key] - before.get(key, 0)) for key in after if key.startswith(name)}
        return answer, {key.removeprefix(name): n for key, n in new.items() if n}


@pytest.fixture(scope="module", params=STYLES, ids=lambda style: str(style.model))
def served(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    style: Style = request.param
    directory = tmp_path_factory.mktemp(style.model)
    node = NodeProcess(directory)
    engine: Engine | None = None
    try:
        node.start()
        options = arguments(models / style.model, node.socket, **style.options)
        engine = Engine(style.model, directory=directory, cores="0", arguments=options)
        yield Served(style, node, engine.ready())
    finally:
        if engine is not None:
            engine.close()
        node.close()


def test_a_loaded_prefix_answers_as_the_engines_own(served: Served) -> None:
    asked = prompt(1, served.style.tokens)
    cold = served.engine.generate(asked)
    own = served.engine.generate(asked)
    computed = served.engine.digests()
    loaded, counted = served.until_loaded(asked)
    assert (cold["cached"], own["cached"]) == (0, served.style.reused)
    assert loaded["tokens"] == own["tokens"]
    assert counted["loaded_tokens"] == served.style.reused
    if not served.style.state_bytes:  # a state leaves the rest of its block as it was
        pages = served.style.nbytes() // served.style.page_bytes
        assert len(computed & served.engine.digests()) >= pages // served.style.group_layers


def test_a_load_brings_of_every_layer_what_it_needs(served: Served) -> None:
    _, counted = served.until_loaded(prompt(1, served.style.tokens))
    assert counted["loaded_bytes"] == served.style.nbytes()


def test_a_load_goes_on_from_what_the_engine_has(served: Served) -> None:
    asked = prompt(2, served.style.tokens)
    served.engine.generate(asked)
    own = served.engine.generate(asked)
    loaded, counted = served.until_loaded(asked, first=1)
    assert loaded["tokens"] == own["tokens"]
    assert counted["loaded_bytes"] == served.style.nbytes(first=1)
    assert counted["loaded_tokens"] == served.style.reused - served.style.block


def test_a_load_that_fails_is_recomputed_and_its_bytes_are_not_used(served: Served) -> None:
    asked = prompt(3, served.style.tokens)
    cold = served.engine.generate(asked)
    loaded, _ = served.until_loaded(asked)
    served.forget()
    served.node.spoil()
    recomputed, counted = served.counted(lambda: served.engine.generate(asked))
    assert counted["failures:corrupt"] == 1
    assert recomputed["cached"] == 0
    assert cold["tokens"] == recomputed["tokens"]
    again, _ = served.until_loaded(asked)
    assert again["tokens"] == loaded["tokens"]
