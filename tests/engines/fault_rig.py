"""Two real engines, a node and a Valkey behind a proxy, to break one of them before or during a load."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.vllm_engines import PATIENT_NODE, Engine, arguments, environment
from tests.engines.vllm_models import VOCABULARY

from kvferry.demo.nodeview import NodeView
from kvferry.errors import ClosedError
from kvferry.testing.faults import Cut, Ending
from kvferry.testing.holdings import NOTHING, wait_for_baseline
from kvferry.testing.processes import NodeProgram
from kvferry.testing.proxy import Proxy
from kvferry.testing.servers import start_server

BLOCK = 128
CHUNKS = 11
PROMPT_TOKENS = CHUNKS * BLOCK + 12
CHUNK_BYTES = 128 << 10
WAIT_S = 120.0  # for what must happen by itself; generous, since the machine may be busy
TRIES = 5
GAVE_UP = frozenset({"timeout", "deadline", "stalled", "breaker", "tier-down"})


class Found(NamedTuple):
    """An answer, and what the engine's connector counted meanwhile."""

    tokens: list[int]
    loads: int
    loaded_chunks: int
    failures: dict[str, int]
    misses: int
    loaded_bytes: int = 0


@dataclass(frozen=True)
class Fault:
    """How to break a part, and to mend it whether it broke or not.

    before, during: what the engine may call it; empty: nothing.
    """

    breaks: Callable[["Rig"], None]
    mends: Callable[["Rig"], None]
    before: frozenset[str] = frozenset()
    during: frozenset[str] = frozenset()


class Rig:
    """A computes and stores; B finds it in Valkey. ``close`` is the stack's. groups: the model's."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack, *, groups: int = 1) -> None:
        self._groups = groups
        self._directory, self._model, self._stack = directory, model, stack
        self._random = random.Random(3)
        self._references = 0
        self.valkey = start_server(directory)
        self.proxy = Proxy(("127.0.0.1", self.valkey.port))
        stack.callback(self._end_valkey)
        self.node = NodeProgram(
            PATIENT_NODE,
            socket=directory / "node.sock",
            directory=directory,
            pool="256MiB",
            options=["--valkey", f"valkey://127.0.0.1:{self.proxy.port}"],
            env=environment(),
        )
        stack.callback(self.node.close)
        self.view = NodeView(self.node.socket)
        self.node.start()
        self.a, self.b = self.engine("a", "0"), self.engine("b", "1")
        self.a.ready()
        self.b.ready()

    def engine(self, name: str, cores: str) -> Engine:
        """One that is starting."""
        options = arguments(self._model, self.node.socket)
        started = Engine(name, directory=self._directory, cores=cores, arguments=options)
        self._stack.callback(started.close)
        return started

    def _end_valkey(self) -> None:
        self.proxy.close()
        self.valkey.stop()

    # -- before the fault --------------------------------------------------------------------------

    def stored(self) -> list[int]:
        """A new prompt that A has computed, that lies in Valkey alone, and that B knows nothing of."""
        asked = [self._random.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        before = self.view.committed_parts()
        self.a.generate(asked)
        self.view.wait_saved(parts=before + CHUNKS * self._groups, timeout_s=WAIT_S)
        self.only_in_valkey()
        self.forget()
        return asked

    def only_in_valkey(self) -> None:
        """Once all is written back, forget what host memory holds."""
        self.at_rest()
        self.view.drop_memory()

    def at_rest(self) -> None:
        """The node holds nothing for anybody: no pin, load, reservation or write under way."""
        wait_for_baseline(self.node.holdings, NOTHING, timeout_s=WAIT_S)

    def forget(self) -> None:
        """B's own cache is empty, and its KV memory holds zeros."""
        self.b.reset()
        self.b.ask("scrub")

    # -- the request -------------------------------------------------------------------------------

    def ask(self, asked: list[int]) -> Found:
        """B answers."""
        return self._watched(lambda: self.b.generate(asked))

    def ask_before(self, fault: Fault) -> tuple[list[int], Found]:
        """A prompt, and B's answer to it after something broke. Mend it afterwards."""
        for _ in range(TRIES):
            asked = self.stored()
            fault.breaks(self)
            found = self.ask(asked)
            if not _merely_late(found, fault.before):
                return asked, found
            fault.mends(self)
        raise AssertionError(f"the machine was too busy {TRIES} times")

    def ask_during(self, fault: Fault) -> tuple[list[int], Found]:
        """The same, but it breaks while the load is under way: bytes have come, others are to come."""
        seen = []
        for _ in range(TRIES):
            asked = self.stored()

            def broken(asked: list[int] = asked) -> dict[str, Any]:
                seen.append(self.breaks_during(asked, fault))
                found: dict[str, Any] = self.b.end()[0]
                return found

            found = self._watched(broken)
            if seen[-1] and found.loads and not _merely_late(found, fault.during):
                return asked, found
            seen[-1:] = [(seen[-1], found.loads, found.failures)]
            fault.mends(self)
            self.node.restart()  # it may have thought Valkey too slow; it knows nothing of that now
        raise AssertionError(f"no load could be caught in {TRIES} tries; caught, loads, failures: {seen}")

    def killed_during(self) -> list[int]:
        """A prompt, in the midst of whose load B was killed."""
        kill = Fault(lambda rig: rig.b.kill(), lambda rig: None)
        for _ in range(TRIES):
            asked = self.stored()
            if self.breaks_during(asked, kill):
                return asked
            self.b.end()
            self.node.restart()
        raise AssertionError(f"no load could be caught in {TRIES} tries")

    def breaks_during(self, asked: list[int], fault: Fault) -> bool:
        """Whether it broke during B's load; the answer is still to be waited for.

        The load is held at a byte until it broke, so that neither may be too quick for the other.
        """
        held = self.proxy.replies.once(Cut(CHUNK_BYTES, Ending.STALL))
        self.b.begin("generate", prompt=asked)
        while not held.fired:
            if self.b.answered():
                self.proxy.heal()
                return False
            time.sleep(0.001)
        fault.breaks(self)
        with suppress(ClosedError):  # it may have been the proxy that broke
            self.proxy.release()
        return True

    def _watched(self, ask: Callable[[], dict[str, Any]]) -> Found:
        before = self.b.ask("metrics")
        answer = ask()
        after = self.b.ask("metrics")
        new = {name: int(after[name] - before.get(name, 0)) for name in after}
        name = "vllm:kvferry_failures:"
        return Found(
            tokens=answer["tokens"],
            loads=new.get("vllm:kvferry_loads", 0),
            loaded_chunks=new.get("vllm:kvferry_loaded_tokens", 0) // BLOCK,
            failures={key.removeprefix(name): n for key, n in new.items() if key.startswith(name) and n},
            misses=new.get("vllm:kvferry_misses", 0),
            loaded_bytes=new.get("vllm:kvferry_loaded_bytes", 0),
        )

    # -- what must hold ----------------------------------------------------------------------------

    def reference(self, asked: list[int], chunks: int) -> list[int]:
        """What A answers when it has so many chunks itself and computes the rest, as B had to."""
        self._references += 1
        salt = f"reference {self._references}"  # finds and leaves nothing under the prompt's own name
        if chunks:
            self.a.generate(asked[: chunks * BLOCK + 1], salt=salt)
        found = self.a.generate(asked, salt=salt)
        assert found["cached"] == chunks * BLOCK
        tokens: list[int] = found["tokens"]
        return tokens

    def right(self, asked: list[int], found: Found) -> bool:
        """Whether it is the answer at the boundary that B had, or A's own, cold or from its own cache.

        What A computes anew for the reference is split otherwise than at first, which may round differently.
        """
        if found.tokens == self.a.generate(asked)["tokens"]:
            return True
        return any(found.tokens == self.reference(asked, n) for n in (found.loaded_chunks, 0, CHUNKS))

    def shared_blocks(self) -> int:
        """Blocks that B holds bit for bit as A does."""
        return len(self.a.digests() & self.b.digests())

    def until_reused(self, asked: list[int]) -> None:
        """B asks again, with A's help, until all is reused, and the answer is right."""
        give_up = time.monotonic() + WAIT_S
        while True:
            self.forget()
            found = self.ask(asked)
            if found.loaded_chunks == CHUNKS:
                assert self.right(asked, found)
                return
            assert time.monotonic() < give_up, f"reuse did not come back: {self.view.status()['counters']}"
            self.a.generate(asked)

    def tier_state(self) -> str:
        """As the node sees Valkey."""
        return str(self.view.status()["tier"]["state"])


def _merely_late(found: Found, expected: frozenset[str]) -> bool:
    """The machine was so busy that even the patient gave up, on something that was not broken."""
    return bool(found.failures.keys() & (GAVE_UP - expected))
