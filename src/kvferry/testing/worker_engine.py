"""The engine of a mock worker: a prefix cache, a prefill queue and decode steps, in real or no time.

A step prefills up to ``chunk_tokens`` of the queue's head and gives every running request a token, as vLLM
does: who prefills slows who decodes. Nothing is computed: a token is a piece of made-up text.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from kvferry.identity.names import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """port 0: any. cache_blocks 0: no prefix cache. prefill_token_s 0: the first token comes at once.

    step_s: of a decode step; 0: all tokens come at once. block_characters: of the canonical text, the unit of
    the cache. output_tokens: where a request names no ``max_tokens``. details: cached_tokens in ``usage``.
    """

    name: str = "worker"
    model: str = "mock"
    port: int = 0
    cache_blocks: int = 4096
    block_characters: int = 256
    characters_per_token: int = 4
    prefill_token_s: float = 0.0
    step_s: float = 0.0
    chunk_tokens: int = 2048
    output_tokens: int = 8
    details: bool = True
    feed_port: int = 0
    """Where it publishes what a node would; 0: nowhere."""


class SharedTier:
    """A store of prefixes that the workers of one process share: a link that moves one thing at a time."""

    def __init__(self, *, token_s: float, latency_s: float = 0.001, blocks: int = 1 << 20) -> None:
        """token_s: seconds per token loaded. blocks: more push out the oldest."""
        self.token_s = token_s
        self.latency_s = latency_s
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self._blocks = blocks
        self._free_at = 0.0

    def reach(self, blocks: Sequence[bytes], start: int) -> int:
        """How many blocks after the first ``start`` are here without a gap."""
        end = start
        while end < len(blocks) and blocks[end] in self.held:
            self.held.move_to_end(blocks[end])
            end += 1
        return end - start

    def load_s(self, tokens: int, now: float) -> float:
        """How long it takes from now to load so many, behind what is being loaded."""
        return max(0.0, self._free_at - now) + self.latency_s + tokens * self.token_s

    def begin(self, tokens: int, now: float) -> float:
        """The same, and the link is taken for it."""
        seconds = self.load_s(tokens, now)
        self._free_at = now + seconds
        return seconds

    def put(self, blocks: Sequence[bytes]) -> None:
        """They are here now."""
        for block in blocks:
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self._blocks:
            self.held.popitem(last=False)


@dataclass(slots=True, eq=False)
class Work:
    """A request in the engine. on_token: called with each piece of text, and None at the end."""

    request_id: str
    blocks: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    on_token: Callable[["Work", str | None], None]
    engine_tokens: int = 0
    loaded_tokens: int = 0
    left: int = 0
    produced: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.engine_tokens + self.loaded_tokens


class Watcher(Protocol):
    """Told what a node would publish."""

    def up(self) -> None:
        """The engine runs."""
        ...

    def down(self) -> None:
        """It is gone, with its cache."""
        ...

    def asked(self, work: Work) -> None:
        """Its prefix was looked up."""
        ...

    def prefilled(self, work: Work) -> None:
        """Its prompt is computed and in the cache, and in the shared tier if there is one."""
        ...

    def slowed(self, factor: float) -> None:
        """The engine takes so much longer than its settings say."""
        ...


@dataclass(slots=True)
class Totals:
    """Since the engine was made."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    engine_tokens: int = 0
    loaded_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class MockEngine:
    """Lives in a running loop. slow: factor on all its times."""

    settings: WorkerSettings
    tier: SharedTier | None = None
    watcher: Watcher | None = None
    slow: float = 1.0
    totals: Totals = field(default_factory=Totals)
    waiting: deque[Work] = field(default_factory=deque[Work])
    running: dict[Work, None] = field(default_factory=dict[Work, None])
    loading: set[Work] = field(default_factory=set[Work])
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])
    _step: asyncio.TimerHandle | None = None

    def work(
        self, request_id: str, text: str, *, output_tokens: int, on_token: Callable[[Work, str | None], None]
    ) -> Work:
        """For ``submit``."""
        blocks = self.blocks_of(text) if self.settings.cache_blocks or self.tier is not None else ()
        tokens = max(1, -(-len(text) // self.settings.characters_per_token))
        return Work(request_id, blocks, tokens, output_tokens or self.settings.output_tokens, on_token)

    def blocks_of(self, text: str) -> tuple[bytes, ...]:
        """Names of the whole blocks, each of all text up to its end."""
        size, name, names = self.settings.block_characters, b"", []
        for at in range(0, len(text) - size + 1, size):
            name = blake2b(name + text[at : at + size].encode(), digest_size=DIGEST_BYTES).digest()
            names.append(name)
        return tuple(names)

    def submit(self, work: Work) -> None:
        """Queue it; its prefix is looked up now, and again when its turn comes."""
        self.totals.requests += 1
        self.totals.prompt_tokens += work.prompt_tokens
        own = self._own(work)
        work.engine_tokens = self._tokens(own, work)
        if self.watcher is not None:
            self.watcher.asked(work)
        load_s = self._load_s(work, own)
        if load_s is None:
            self._enqueue(work)
        else:
            self.loading.add(work)
            work.timer = asyncio.get_running_loop().call_later(load_s, self._loaded, work)

    def abort(self, work: Work) -> None:
        """Its client left."""
        if work.timer is not None:
            work.timer.cancel()
        held = work in self.loading or work in self.running or work in self.waiting
        self.loading.discard(work)
        self.running.pop(work, None)
        if work in self.waiting:
            self.waiting.remove(work)
        self.totals.aborted += held

    def drop(self) -> None:
        """Forget the prefix cache."""
        self.cache.clear()

    def stop(self) -> None:
        """Forget all."""
        for work in [*self.loading, *self.waiting, *self.running]:
            self.abort(work)
        if self._step is not None:
            self._step.cancel()
            self._step = None
        self.drop()

    # -- prefixes ----------------------------------------------------------------------------------

    def _own(self, work: Work) -> int:
        """Blocks of its prefix in the cache, which count as used now."""
        found = 0
        for block in work.blocks:
            if block not in self.cache:
                break
            self.cache.move_to_end(block)
            found += 1
        return found

    def _tokens(self, blocks: int, work: Work) -> int:
        """Of so many blocks; a prompt's last token is always computed."""
        per_block = self.settings.block_characters // self.settings.characters_per_token
        return min(blocks * per_block, work.prompt_tokens - 1)

    def _load_s(self, work: Work, own: int) -> float | None:
        """Seconds, with the link taken, where loading is quicker than computing."""
        if self.tier is None:
            return None
        tokens = self._tokens(own + self.tier.reach(work.blocks, own), work) - work.engine_tokens
        now = asyncio.get_running_loop().time()
        prefill_s = tokens * self.settings.prefill_token_s * self.slow
        if tokens <= 0 or self.tier.load_s(tokens, now) >= prefill_s:
            return None
        work.loaded_tokens = tokens
        return self.tier.begin(tokens, now)

    def _loaded(self, work: Work) -> None:
        work.timer = None
        self.loading.discard(work)
        self._enqueue(work)

    def _keep(self, blocks: Sequence[bytes]) -> None:
        """Into the cache; the tail first, so that heads go last."""
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.settings.cache_blocks:
            self.cache.popitem(last=False)

    # -- steps -------------------------------------------------------------------------------------

    def _enqueue(self, work: Work) -> None:
        if not work.loaded_tokens:
            work.engine_tokens = self._tokens(self._own(work), work)
        work.left = work.prompt_tokens - work.cached_tokens
        if self.settings.prefill_token_s == 0:
            self._prefilled(work)
        else:
            self.waiting.append(work)
        self._go()

    def _go(self) -> None:
        if self._step is None and (self.waiting or self.running):
            budget, prefilled = self.settings.chunk_tokens, []
            for work in self.waiting:
                if work.left == work.prompt_tokens - work.cached_tokens and not work.loaded_tokens:
                    work.engine_tokens = self._tokens(self._own(work), work)  # a sibling may be done since
                    work.left = work.prompt_tokens - work.engine_tokens
                now = min(budget, work.left)
                budget -= now
                prefilled.append((work, now))
                if not budget:
                    break
            tokens = self.settings.chunk_tokens - budget
            seconds = tokens * self.settings.prefill_token_s + (self.settings.step_s if self.running else 0)
            decoding = tuple(self.running)
            loop = asyncio.get_running_loop()
            self._step = loop.call_later(seconds * self.slow, self._stepped, prefilled, decoding)

    def _stepped(self, prefilled: Sequence[tuple[Work, int]], decoding: Sequence[Work]) -> None:
        self._step = None
        for work in decoding:
            if work in self.running:
                self._token(work)
        for work, tokens in prefilled:
            if work in self.waiting:
                work.left -= tokens
                if work.left <= 0:
                    self.waiting.remove(work)
                    self._prefilled(work)
        self._go()

    def _prefilled(self, work: Work) -> None:
        self.totals.engine_tokens += work.engine_tokens
        self.totals.loaded_tokens += work.loaded_tokens
        if work.blocks:
            self._keep(work.blocks)
            if self.tier is not None:
                self.tier.put(work.blocks)
        if self.watcher is not None:
            self.watcher.prefilled(work)
        self.running[work] = None
        self._token(work)
        if self.settings.step_s == 0:
            while work in self.running:
                self._token(work)

    def _token(self, work: Work) -> None:
        self.totals.output_tokens += 1
        work.produced += 1
        work.on_token(work, f" {work.produced % 1000:03d}"[: self.settings.characters_per_token])
        if work.produced >= work.output_tokens and work in self.running:
            del self.running[work]
            self.totals.finished += 1
            work.on_token(work, None)
