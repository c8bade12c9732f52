"""A fleet in virtual time: mock engines, what their nodes publish, and a guide; no socket, no waiting."""

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvferry.feed.wire import EngineDown, EngineUp, Gone, Held, Level, Prompt, Rate, Space, Speed
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Asked, Ended, Flight, Guide, Usage
from kvferry.router.knowledge import Knowledge
from kvferry.router.reading import Reader
from kvferry.testing.worker_engine import MockEngine, SharedTier, Work, WorkerSettings

Turn = list[dict[str, str]]


class _Jumping(selectors.SelectSelector):
    """Nothing is waited for: time jumps to what is due next."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.now += timeout
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """Like ``asyncio.run``, in no time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


@dataclass
class NodeFeed:
    """A ``Watcher`` that tells the knowledge what the engine's node would."""

    name: str
    engine: MockEngine
    knowledges: Sequence[Knowledge]
    behind: str
    on: bool = True

    def _tell(self, *events: Any) -> None:
        if self.on:
            for knowledge in self.knowledges:
                for event in events:
                    knowledge.apply(self.name, event)

    def up(self) -> None:
        settings = self.engine.settings
        tokens = settings.block_characters // settings.characters_per_token
        for knowledge in self.knowledges if self.on else ():
            knowledge.met(self.name, behind=self.behind)
        self._tell(
            Space(1, b"n" * 16, "m", tokens, tokens * 1000),
            EngineUp(1, "e", 1, settings.cache_blocks * tokens),
        )
        if self.engine.tier is not None:
            self._tell(
                Rate(Level.VALKEY, self.engine.tier.latency_s, 1000 / max(self.engine.tier.token_s, 1e-12))
            )
        self.slowed(self.engine.slow)

    def down(self) -> None:
        self._tell(EngineDown(1))

    def asked(self, work: Work) -> None:
        digests, prompt, engine = b"".join(work.blocks), work.prompt_tokens, work.engine_tokens
        self._tell(Prompt(1, 1, f"chatcmpl-{work.request_id}-0badc0de", digests, prompt, engine))

    def prefilled(self, work: Work) -> None:
        if self.engine.tier is not None:
            self._tell(Held(Level.VALKEY, 0, 1, b"".join(work.blocks)))

    def slowed(self, factor: float) -> None:
        """Its own measure of it; a host that is throttled as a whole shows in it."""
        per_token_s = self.engine.settings.prefill_token_s * factor
        if per_token_s:
            self._tell(Speed(1, 0.0, per_token_s, 0.0))

    def evicted(self, blocks: Sequence[bytes]) -> None:
        self._tell(Gone(Level.VALKEY, 0, 1, b"".join(blocks)))


@dataclass
class Answered:
    """One request."""

    request_id: str
    worker: str
    sent_at: float
    ttft_s: float | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.done.is_set()


@dataclass
class Fleet:
    """Workers ``w0`` .. and guides in front of them. share: one tier for all. feeds: nodes publish."""

    workers: int
    guide: Callable[[Knowledge], Guide]
    share: bool = True
    feeds: bool = True
    routers: int = 1
    token_s: float = 2e-5  # of a load
    settings: WorkerSettings = field(
        default_factory=lambda: WorkerSettings(prefill_token_s=2e-4, step_s=0.02, cache_blocks=2000)
    )
    answers: list[Answered] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self.knowledges = [Knowledge() for _ in range(self.routers)]
        self.guides = [self.guide(knowledge) for knowledge in self.knowledges]
        self.urls = tuple(f"w{number}" for number in range(self.workers))
        self.tier = SharedTier(token_s=self.token_s) if self.share else None
        self.engines = {url: MockEngine(self.settings, self.tier) for url in self.urls}
        self.feeds_of = {
            url: NodeFeed(f"n-{url}", engine, self.knowledges, "valkey" if self.share else "", self.feeds)
            for url, engine in self.engines.items()
        }
        self.readers = [Reader(seed=number) for number in range(self.routers)]
        for url in self.urls:
            self.engines[url].watcher = self.feeds_of[url]
            for guide, knowledge in zip(self.guides, self.knowledges, strict=True):
                guide.worker_added(url)
                if self.feeds:
                    knowledge.near(url, f"n-{url}")
            self.feeds_of[url].up()

    def slow(self, url: str, factor: float, *, told: bool = True) -> None:
        """That worker takes so much longer from now on."""
        self.engines[url].slow = factor
        if told:
            self.feeds_of[url].slowed(factor)

    def restart(self, url: str, *, told: bool) -> None:
        """It comes back with an empty cache. told: its node says so."""
        self.engines[url].drop()
        if told:
            self.feeds_of[url].down()
            self.feeds_of[url].up()

    def send(
        self, messages: Turn, *, router: int = 0, tokens: int = 8
    ) -> tuple[Answered, Callable[[], None]]:
        """Send it now. Returns its answer, which is filled in as time passes, and what aborts it."""
        loop = asyncio.get_running_loop()
        self._number += 1
        request_id = f"r{self._number}"
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": tokens}).encode()
        reading = self.readers[router].read("/v1/chat/completions", body)
        asked = Asked(request_id, reading.model, reading.keys, max_tokens=reading.max_tokens)
        flight = self.guides[router].begin(asked, among=self.urls, now=loop.time())
        engine = self.engines[flight.worker]
        answer = Answered(request_id, flight.worker, loop.time())
        self.answers.append(answer)
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        work = engine.work(request_id, text, output_tokens=tokens, on_token=_follower(answer, flight))
        engine.submit(work)

        def abort() -> None:
            if not answer.over:
                engine.abort(work)
                answer.done.set()
                flight.end(Ended.ABORTED, loop.time())

        return answer, abort

    async def until_over(self) -> None:
        """All answers are whole."""
        for answer in self.answers:
            await answer.done.wait()

    def ttfts(self) -> list[float]:
        """Of those that came, sorted."""
        return sorted(answer.ttft_s for answer in self.answers if answer.ttft_s is not None)


def _follower(answer: Answered, flight: Flight) -> Callable[[Work, str | None], None]:
    def on_token(work: Work, text: str | None) -> None:
        now = asyncio.get_running_loop().time()
        if answer.over:
            return
        if text is None:
            answer.done.set()
            answer.cached_tokens, answer.prompt_tokens = work.cached_tokens, work.prompt_tokens
            flight.end(Ended.DONE, now, Usage(work.prompt_tokens, work.cached_tokens, work.produced))
        elif answer.ttft_s is None:
            answer.ttft_s = now - answer.sent_at
            flight.first_byte(now)
            flight.token(now)
        else:
            flight.token(now)

    return on_token


def text(name: str, characters: int) -> str:
    """Always the same of a name, and of no other."""
    random = Random(name)
    words = ["".join(random.choices("abcdefghijklmnop", k=6)) for _ in range(64)]
    return " ".join(random.choices(words, k=characters // 7 + 1))[:characters]


def cost_guide(knowledge: Knowledge) -> CostGuide:
    """Always with the same chances."""
    return CostGuide(knowledge, random=Random(1))


@dataclass
class Conversations:
    """Sessions of several turns; a share of them begins with one hot prefix. Arrivals at random."""

    sessions: int = 60
    turns: int = 5
    hot_share: float = 0.6
    hot_characters: int = 24_000
    own_characters: int = 8_000
    turn_characters: int = 1_200
    per_s: float = 2.0  # sessions begun
    think_s: float = 4.0
    seed: int = 3

    async def play(self, fleet: Fleet) -> None:
        """All of it."""
        random = Random(self.seed)
        tasks, at = [], 0.0
        for number in range(self.sessions):
            at += random.expovariate(self.per_s)
            hot = random.random() < self.hot_share
            start = text("hot", self.hot_characters) if hot else text(f"own {number}", self.own_characters)
            tasks.append(asyncio.ensure_future(self._session(fleet, number, at, start, Random(number))))
        await asyncio.gather(*tasks)

    async def _session(self, fleet: Fleet, number: int, at: float, start: str, random: Random) -> None:
        await asyncio.sleep(at)
        messages: Turn = [{"role": "system", "content": start}]
        for turn in range(self.turns):
            messages.append({"role": "user", "content": text(f"{number} {turn}", self.turn_characters)})
            answer, _ = fleet.send(messages, router=number % fleet.routers, tokens=random.randint(4, 24))
            await answer.done.wait()
            messages.append({"role": "assistant", "content": text(f"a {number} {turn}", 80)})
            await asyncio.sleep(random.expovariate(1 / self.think_s))
