"""``kvferry bench engines --restart``: every part of a fleet is restarted in turn while traffic runs."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from kvferry.bench.prompts import Prompts
from kvferry.demo import page
from kvferry.demo.ask import Question, Reply
from kvferry.demo.fleet import Fleet
from kvferry.demo.page import Column
from kvferry.demo.steps import NO_STORY, source_of, story_of
from kvferry.errors import KvferryError

PREFIXES = 4
PREFIX_TOKENS = 1024
MAX_TOKENS = 2
REJOIN_S = 60.0
PAUSE_S = 0.2
SPIN_S = 1.0
"""For so long vLLM's worker spins for its next message (``sched_yield``) when one has come."""
START_PAUSE_S = SPIN_S + 0.5
"""Asked more often, the engine that serves never sleeps, and on two cores the one that starts may not get to
run at all: ``docs/decisions/standing-starts.md``."""
_COLUMNS = (
    Column("restarted"),
    Column("took", numeric=True),
    Column("reusable before", numeric=True),
    Column("after", numeric=True),
    Column("from"),
    Column("requests meanwhile", numeric=True),
    Column("failed", numeric=True),
    Column("slowest TTFT", numeric=True),
)


@dataclass(frozen=True, slots=True)
class Restart:
    """One part's. before, after: tokens of the prefixes that a replica without any of its own reused, of
    ``wanted``. sources: requests after it by where their prefix came from. slowest_s: TTFT meanwhile."""

    part: str
    seconds: float
    wanted: int
    before: int
    after: int
    sources: dict[str, int]
    requests: int
    failed: int
    slowest_s: float

    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        return (
            self.part,
            f"{self.seconds:.1f} s",
            f"{self.before:,}",
            f"{self.after:,}",
            ", ".join(self.sources),
            str(self.requests),
            str(self.failed),
            f"{self.slowest_s:.2f} s",
        )


class Traffic:
    """Asks replicas that are up about known prefixes, one request at a time, until it is told to stop.

    away: a replica that is being restarted: a router would not ask it.
    """

    def __init__(
        self, fleet: Fleet, prefixes: Sequence[tuple[int, ...]], prompts: Prompts, *, away: str | None
    ) -> None:
        self._fleet = fleet
        self._prefixes = prefixes
        self._prompts = prompts
        self._choice = random.Random(7)
        self._end = threading.Event()
        self._away = away
        self._pause_s = PAUSE_S if away is None else START_PAUSE_S
        self.replies: list[Reply] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="bench-traffic", daemon=True)

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        """Until the context ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            up = [name for name in ("A", "B") if name != self._away and name in self._fleet.replicas]
            if not up:
                continue
            replica = self._fleet.replicas[self._choice.choice(up)]
            prompt = self._choice.choice(self._prefixes) + self._prompts.question()
            try:
                self.replies.append(replica.ask(Question(f"bench{time.monotonic_ns()}", prompt, MAX_TOKENS)))
            except KvferryError as error:
                self.failures.append(str(error))


@dataclass(slots=True)
class Rolling:
    """A started fleet with a keeper, and what is restarted of it."""

    fleet: Fleet
    prompts: Prompts
    block_tokens: int
    say: Callable[[str], None]
    prefixes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def run(self) -> list[Restart]:
        """Engines, node, keeper, Valkey."""
        self.prepare()
        before = self.reusable("B")[0]
        done: list[Restart] = []
        parts: tuple[tuple[str, str | None, Callable[[], None]], ...] = (
            ("engine A", "A", partial(self._engine, "A")),
            ("engine B", "B", partial(self._engine, "B")),
            ("node", None, self._node),
            ("keeper", None, self._keeper),
            ("Valkey", None, self._valkey),
        )
        for part, away, restart in parts:
            with Traffic(self.fleet, self.prefixes, self.prompts, away=away).running() as traffic:
                begun = time.monotonic()
                restart()
                took = time.monotonic() - begun
            after, sources = self.reusable(away or "B")
            done.append(
                Restart(
                    part=part,
                    seconds=took,
                    wanted=self.wanted,
                    before=before,
                    after=after,
                    sources=dict(sources),
                    requests=len(traffic.replies) + len(traffic.failures),
                    failed=len(traffic.failures),
                    slowest_s=max((reply.ttft_s for reply in traffic.replies), default=0.0),
                )
            )
            self.say("  ".join(done[-1].row()))
            before = after
        return done

    def prepare(self) -> None:
        """A computes the prefixes, B reuses each: they are in Valkey, on disk and in the bucket then."""
        node = self.fleet.node_view
        self.prefixes = [self.prompts.tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        before = node.committed_parts()
        for prefix in self.prefixes:
            self._ask("A", prefix)
        parts = self.wanted // self.block_tokens
        node.wait_saved(parts=before + parts)
        for prefix in self.prefixes:
            self._ask("B", prefix)
        self.fleet.storage.wait_kept(parts=parts)

    @property
    def wanted(self) -> int:
        """Tokens of the prefixes in whole blocks."""
        return PREFIXES * (PREFIX_TOKENS // self.block_tokens * self.block_tokens)

    def reusable(self, name: str) -> tuple[int, Counter[str]]:
        """Tokens that a replica reuses of the prefixes when neither it nor host memory holds any."""
        self.fleet.node_view.wait_written_back()
        self.fleet.node_view.drop_memory()
        self.fleet.replicas[name].reset_prefix_cache()
        reused, sources = 0, Counter[str]()
        for prefix in self.prefixes:
            reply = self._ask(name, prefix)
            reused += reply.cached_tokens
            sources[self._source(reply)] += 1
        return reused, sources

    def _source(self, reply: Reply) -> str:
        try:
            story = story_of(self.fleet.node_view.settled_records(reply.request_id))
        except KvferryError:
            story = NO_STORY
        return source_of(reply, story).value

    def _ask(self, name: str, prefix: tuple[int, ...]) -> Reply:
        question = Question(f"bench{time.monotonic_ns()}", prefix + self.prompts.question(), MAX_TOKENS)
        return self.fleet.replicas[name].ask(question)

    # -- restarts ----------------------------------------------------------------------------------

    def _engine(self, name: str) -> None:
        self.fleet.stop_replica(name)
        self.fleet.start_replicas([name])
        self.fleet.replicas[name].worker_call("kvferry_scrub")

    def _node(self) -> None:
        self.fleet.stop_node()
        self.fleet.start_node()
        engines = 2 * len(self.fleet.replicas)
        self.fleet.node_view.wait(
            lambda status: len(status["engines"]) >= engines, what="engines joining", timeout_s=REJOIN_S
        )
        self._keepers_up()

    def _keeper(self) -> None:
        self.fleet.storage.stop_keeper()
        self.fleet.start_keeper()
        self._keepers_up()

    def _valkey(self) -> None:
        self.fleet.stop_valkey()
        self.fleet.start_valkey()
        self.fleet.node_view.wait(
            lambda status: status["tier"]["state"] == "up", what="Valkey being used again", timeout_s=REJOIN_S
        )
        self._keepers_up()

    def _keepers_up(self) -> None:
        """The node talks to the keeper, and the keeper to its tiers."""
        self.fleet.node_view.wait(
            lambda status: all(keeper["state"] == "up" for keeper in status["keepers"]["keepers"]),
            what="the node finding the keeper",
            timeout_s=REJOIN_S,
        )
        self.fleet.storage.wait_up(timeout_s=REJOIN_S)


def faults(restarts: Sequence[Restart]) -> list[str]:
    """What was reusable before and is not after."""
    return [
        f"{each.part}: {each.after} tokens reusable after, {each.before} before, of {each.wanted}"
        for each in restarts
        if each.after < each.before or each.before < each.wanted
    ]


def terminal(restarts: Sequence[Restart]) -> str:
    """The table."""
    return page.text_table(_COLUMNS, [each.row() for each in restarts])


def document(restarts: Sequence[Restart]) -> dict[str, Any]:
    """For ``--json``."""
    return {"restarts": [asdict(each) for each in restarts], "faults": faults(restarts)}
