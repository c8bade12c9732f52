"""What is replayed: traces by their readers, and a made-up mix of long conversations and one-time prompts."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.valkey_eviction.replay import Prompt
from kvferry.errors import MisconfiguredError
from kvferry.traces.policies import Policy, hits
from kvferry.traces.request import KEY_BYTES, Request
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile

MAX_PROMPTS = 200_000
_SYSTEM_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Mix:
    """name: for people. log: what the exact policies need, every chunk full."""

    name: str
    prompts: tuple[Prompt, ...]
    log: ReuseLog

    @classmethod
    def of(cls, name: str, requests: Iterable[Request]) -> "Mix":
        """Of requests with content, in order; those without a time or content are left out."""
        numbers: dict[tuple[int, bytes], int] = {}
        prompts: list[Prompt] = []
        log = ReuseLog(1)
        first_s = 0.0
        for request in requests:
            if request.blocks is None or request.time_s is None:
                continue
            chunks: list[int] = []
            at = -1
            for place in range(0, len(request.blocks), KEY_BYTES):
                at = numbers.setdefault((at, request.blocks[place : place + KEY_BYTES]), len(numbers))
                chunks.append(at)
            if not chunks:
                continue
            log.add(Request(request.time_s, len(chunks), None, request.blocks))
            first_s = request.time_s if not prompts else first_s
            prompts.append(Prompt(request.time_s - first_s, tuple(chunks)))
            if len(prompts) >= MAX_PROMPTS:
                break
        if not prompts:
            raise MisconfiguredError(f"{name}: no prompt with a time and content")
        return cls(name, tuple(prompts), log)

    @classmethod
    def of_file(cls, path: Path) -> "Mix":
        """A trace file. MisconfiguredError for one that cannot be read."""
        return cls.of(path.name, TraceFile(path).requests(Malformed()))

    @property
    def end_s(self) -> float:
        """When the last prompt comes."""
        return max(prompt.at_s for prompt in self.prompts)

    @property
    def chunks(self) -> tuple[int, int]:
        """Asked for: in all, and in the last half of prompts."""
        sizes = [len(prompt.chunks) for prompt in self.prompts]
        return sum(sizes), sum(sizes[len(sizes) // 2 :])

    def exact(self, policy: Policy, chunks: int) -> tuple[float, float]:
        """Share of chunks that a policy hits, exactly kept: in all, and in the last half."""
        found = hits(self.log, policy, [chunks])[0]
        total, half = self.chunks
        return found.tokens / total, found.last_half_tokens / half


def chats_and_scan(*, seed: int = 3, conversations: int = 60, length_s: float = 3600.0) -> Mix:
    """Conversations under one system prompt that grow by 4 chunks a turn, and as many one-time prompts again.

    A turn comes 20 to 180 s after the one before it. A conversation ends at 64 chunks, and another begins.
    """
    return Mix.of("chats and scan", _chats_and_scan(random.Random(seed), conversations, length_s))


def _chats_and_scan(choice: random.Random, conversations: int, length_s: float) -> Iterator[Request]:
    def key() -> bytes:
        return choice.randbytes(KEY_BYTES)

    system = [key() for _ in range(_SYSTEM_CHUNKS)]
    turns = [(choice.uniform(0, 180), system + [key() for _ in range(16)]) for _ in range(conversations)]
    scans = [(choice.uniform(0, length_s), None) for _ in range(round(length_s * conversations / 100))]
    events: list[tuple[float, list[bytes] | None]] = [*turns, *scans]
    events.sort(key=lambda event: event[0], reverse=True)
    while events:
        at, known = events.pop()
        if at >= length_s:
            continue
        blocks = known if known is not None else [key() for _ in range(choice.randrange(16, 96))]
        yield Request(at, len(blocks), None, b"".join(blocks))
        if known is not None:
            longer = known + [key() for _ in range(4)]
            if len(longer) > 64:
                longer = system + [key() for _ in range(16)]
            following = at + choice.uniform(20, 180)
            place = next((i for i in range(len(events) - 1, -1, -1) if events[i][0] > following), -1)
            events.insert(place + 1, (following, longer))
