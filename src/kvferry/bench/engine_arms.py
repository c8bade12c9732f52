"""The arms of ``kvferry bench engines``: what is asked of whom, in which order, and what is kept."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.bench.load import run_load
from kvferry.bench.prompts import Prompts
from kvferry.demo.ask import Question, Replica, Reply
from kvferry.demo.fleet import Fleet
from kvferry.demo.steps import NO_STORY, Source, Story, source_of, story_of
from kvferry.errors import KvferryError
from kvferry.keeper.wire import DropTier

MAX_TOKENS = 2
OUTPUT_TOKENS = 16
MEMORY = "host memory"
VALKEY = "Valkey"
DISK = "NVMe"
OBJECTS = "bucket"
_SOURCES = {
    MEMORY: Source.MEMORY,
    VALKEY: Source.VALKEY,
    DISK: Source.DISK,
    OBJECTS: Source.OBJECTS,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A load and the own hit it is compared with: same replica, same prefix, other questions.

    load_s, nbytes: the connector's own timer and count, from the answer of the node to the last block's
    copy. fault: why the pair does not count; empty when it does.
    """

    section: str
    tier: str
    prompt_tokens: int
    reused_tokens: int
    load_ttft_s: float
    own_ttft_s: float
    load_s: float
    nbytes: int
    fault: str = ""

    @property
    def ratio(self) -> float:
        """TTFT of the load over the own hit's."""
        return self.load_ttft_s / self.own_ttft_s

    @property
    def added_s(self) -> float:
        """TTFT of the load beyond the own hit's."""
        return self.load_ttft_s - self.own_ttft_s

    @property
    def gb_s(self) -> float:
        """Bandwidth end to end, into the engine's blocks."""
        return self.nbytes / self.load_s / 1e9 if self.load_s else 0.0


@dataclass(frozen=True, slots=True)
class Versus:
    """The same work on a replica with the connector and on one without, on the same core."""

    section: str
    with_s: float
    without_s: float
    hooks_s: float = 0.0  # inside the connector's methods, both sides, and waiting for the node's answer

    @property
    def ratio(self) -> float:
        """Time with the connector over time without."""
        return self.with_s / self.without_s


@dataclass(slots=True)
class Results:
    """Everything measured, raw."""

    pairs: list[Pair] = field(default_factory=list[Pair])
    versus: list[Versus] = field(default_factory=list[Versus])
    idle: dict[str, float] = field(default_factory=dict[str, float])

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pairs": [asdict(pair) for pair in self.pairs],
            "versus": [asdict(versus) for versus in self.versus],
            "idle_node": self.idle,
        }


@dataclass(frozen=True, slots=True)
class Arms:
    """A started fleet of A and B (connected) and P (plain), and how to measure on it.

    gap_s: idle time before every timed request, so that no arm profits from memory just touched.
    tiers: from which a prefix is loaded, each as often as the others.
    """

    fleet: Fleet
    prompts: Prompts
    block_tokens: int
    gap_s: float
    say: Callable[[str], None]
    hooks_s: Callable[[], float]
    tiers: tuple[str, ...] = (MEMORY, VALKEY)

    def warm_up(self) -> None:
        """Touch all KV pages, and run every kernel once, as in an engine that has been up for a while."""
        for replica in self.fleet.replicas.values():
            replica.worker_call("kvferry_scrub")
            self._ask(replica, self.prompts.tokens(300), gap=False)

    def pairs(self, section: str, *, prefix_tokens: int, repeats: int) -> list[Pair]:
        """A computes a new prefix; B takes it from each tier in turn, each load against its own hit."""
        node = self.fleet.node_view
        prefix = self.prompts.tokens(prefix_tokens)
        boundary = prefix_tokens // self.block_tokens * self.block_tokens
        before = node.committed_parts()
        self._ask(self.fleet.replicas["A"], prefix + self.prompts.question(), gap=False)
        parts = boundary // self.block_tokens
        node.wait_saved(parts=before + parts)
        if DISK in self.tiers:  # what was used once is kept, in the background: before anything is timed
            self.fleet.replicas["B"].reset_prefix_cache()
            self._ask(self.fleet.replicas["B"], prefix + self.prompts.question(), gap=False)
        found: list[Pair] = []
        for _ in range(repeats):
            for tier in self.tiers:
                node.wait_written_back()
                self.fleet.replicas["B"].reset_prefix_cache()
                self._only_in(tier, parts=parts)
                pair = self._pair(section, tier, prefix, boundary=boundary)
                found.append(pair)
                self.say(
                    f"{section}: {tier}, {pair.reused_tokens:,} of {pair.prompt_tokens:,} tokens: "
                    f"{pair.load_ttft_s:.3f} s, own hit {pair.own_ttft_s:.3f} s, {pair.ratio:.3f}x, "
                    f"{pair.gb_s:.2f} GB/s {pair.fault}"
                )
        return found

    def _only_in(self, tier: str, *, parts: int) -> None:
        """Forget a prefix of so many parts in all tiers before that one."""
        if DISK in self.tiers:
            self.fleet.storage.wait_kept(parts=parts)
        if tier in (DISK, OBJECTS):
            self.fleet.storage.drop(DropTier.VALKEY)
        if tier == OBJECTS:
            self.fleet.storage.drop(DropTier.DISK)
        if tier != MEMORY:
            self.fleet.node_view.drop_memory()

    def cold(self, *, tokens: int, first_with: bool) -> Versus:
        """One new prompt, cold, on A with the connector and on P without."""
        prompt = self.prompts.tokens(tokens)
        seconds: dict[str, float] = {}
        hooks = 0.0
        for name in ("A", "P") if first_with else ("P", "A"):
            before = self.hooks_s()
            reply = self._ask(self.fleet.replicas[name], prompt)
            seconds[name] = reply.ttft_s
            if name == "A":
                self.fleet.node_view.wait_written_back()
                hooks = self.hooks_s() - before + self._story(reply).engine_lookup_s
        return self._versus("cold", seconds, hooks)

    def throughput(self, *, requests: int, tokens: int, concurrency: int, first_with: bool) -> Versus:
        """A batch of new prompts at once, on A and on P."""
        seconds: dict[str, float] = {}
        for name in ("A", "P") if first_with else ("P", "A"):
            batch = [self._question(self.prompts.tokens(tokens), OUTPUT_TOKENS) for _ in range(requests)]
            time.sleep(self.gap_s)
            seconds[name] = run_load(self.fleet.replicas[name], batch, concurrency=concurrency).seconds
            self.fleet.node_view.wait_written_back()
        return self._versus("throughput", seconds, 0.0)

    def _versus(self, section: str, seconds: dict[str, float], hooks: float) -> Versus:
        versus = Versus(section, with_s=seconds["A"], without_s=seconds["P"], hooks_s=hooks)
        self.say(
            f"{section}: with {versus.with_s:.3f} s, without {versus.without_s:.3f} s, {versus.ratio:.3f}x"
            + (f", by timestamps {hooks * 1e3:.1f} ms of it" if hooks else "")
        )
        return versus

    def _pair(self, section: str, tier: str, prefix: tuple[int, ...], *, boundary: int) -> Pair:
        replica = self.fleet.replicas["B"]
        load = self._ask(replica, prefix + self.prompts.question())
        story = self._story(load)
        # Of a window or a state vLLM keeps what the end of a prompt needs, and what a second prompt that left
        # the first one earlier shows to be needed: only the question after that is a hit of its own.
        self._ask(replica, prefix + self.prompts.question(), gap=False)
        own = self._ask(replica, prefix + self.prompts.question())
        faults = (
            fault_of("the load", load, story, wanted=_SOURCES[tier], boundary=boundary),
            fault_of("the own hit", own, self._story(own), wanted=Source.OWN, boundary=boundary),
        )
        return Pair(
            section=section,
            tier=tier,
            prompt_tokens=load.prompt_tokens,
            reused_tokens=load.cached_tokens,
            load_ttft_s=load.ttft_s,
            own_ttft_s=own.ttft_s,
            load_s=story.engine_load_s,
            nbytes=story.engine_bytes,
            fault="; ".join(fault for fault in faults if fault),
        )

    def _story(self, reply: Reply) -> Story:
        try:
            return story_of(self.fleet.node_view.settled_records(reply.request_id))
        except KvferryError:
            return NO_STORY

    def _ask(self, replica: Replica, prompt: tuple[int, ...], *, gap: bool = True) -> Reply:
        if gap:
            time.sleep(self.gap_s)
        return replica.ask(self._question(prompt, MAX_TOKENS))

    def _question(self, prompt: tuple[int, ...], max_tokens: int) -> Question:
        return Question(f"bench{time.monotonic_ns()}", prompt, max_tokens)


def fault_of(name: str, reply: Reply, story: Story, *, wanted: Source, boundary: int) -> str:
    """Why a reply is not what its arm is to measure; empty when it is.

    Every request of a connected engine has a record at the node. Without it nobody knows where the tokens
    came from.
    """
    if story is NO_STORY:
        return f"{name} has no record at the node"
    source = source_of(reply, story)
    if source is not wanted:
        why = f" ({story.reason})" if story.reason else ""
        return f"{name} came from {source.value}, not {wanted.value}{why}"
    if reply.cached_tokens != boundary:
        return f"{name} reused {reply.cached_tokens} tokens, not {boundary}"
    return ""


def idle_node(pid: int, *, seconds: float) -> dict[str, float]:
    """CPU share and resident memory of a process besides shared memory, from /proc, while it idles."""
    before, begun = _cpu_ticks(pid), time.monotonic()
    time.sleep(seconds)
    ticks = _cpu_ticks(pid) - before
    wall = time.monotonic() - begun
    return {
        "cpu_percent": 100.0 * ticks / os.sysconf("SC_CLK_TCK") / wall,
        "rss_besides_pool_mb": _private_rss_bytes(pid) / 1e6,
    }


def _cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def _private_rss_bytes(pid: int) -> int:
    wanted = ("RssAnon:", "RssFile:")
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(wanted))
