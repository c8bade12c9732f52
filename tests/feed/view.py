"""What somebody knows who only hears events: in plain sets, another way than the product's own."""

from collections import defaultdict

from kvferry.feed.wire import (
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Gone,
    Held,
    Level,
    Prompt,
    Rate,
    Result,
    Space,
    Speed,
)
from kvferry.identity.names import DIGEST_BYTES


def cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


class View:
    """Of one node. Implements ``router.feed.follower.Knowledge`` for a single one, too."""

    def __init__(self) -> None:
        self.spaces: dict[int, Space] = {}
        self.engines: dict[int, EngineUp] = {}
        self.rates: dict[Level, Rate] = {}
        self.speeds: dict[int, Speed] = {}
        self.held: defaultdict[tuple[Level, int, int], set[bytes]] = defaultdict(set)
        self.prompts: list[Prompt] = []
        self.results: list[Result] = []
        self.resets = 0
        self.losses = 0
        self.behind = ""

    def reset(self, node: str = "") -> None:
        for kept in (self.spaces, self.engines, self.rates, self.speeds, self.held):
            kept.clear()
        self.resets += 1

    def met(self, node: str, *, behind: str) -> None:
        self.behind = behind

    def lost(self, node: str = "") -> None:
        self.losses += 1

    def apply(self, node: str, event: AnyEvent) -> None:
        match event:
            case Held(level=level, engine=engine, space=space, digests=digests):
                self.held[level, engine, space] |= set(cut(digests))
            case Gone(level=level, engine=engine, space=space, digests=digests):
                self.held[level, engine, space] -= set(cut(digests))
            case Cleared(level=level, engine=engine):
                for name in [name for name in self.held if name[:2] == (level, engine)]:
                    del self.held[name]
            case Space(space=space):
                self.spaces[space] = event
            case EngineUp(engine=engine):
                self.engines[engine] = event
            case EngineDown(engine=engine):
                self.engines.pop(engine, None)  # a snapshot that began before it may not have it
                self.speeds.pop(engine, None)
                for name in [name for name in self.held if name[:2] == (Level.ENGINE, engine)]:
                    del self.held[name]
            case Rate(level=level):
                self.rates[level] = event
            case Speed(engine=engine):
                self.speeds[engine] = event
            case Prompt():
                self.prompts.append(event)
            case Result():
                self.results.append(event)

    def at(self, level: Level) -> set[bytes]:
        """In whatever space."""
        return {chunk for name, chunks in self.held.items() if name[0] is level for chunk in chunks}

    def said(self) -> tuple[object, ...]:
        """All that lasts."""
        held = {name: frozenset(chunks) for name, chunks in self.held.items() if chunks}
        return self.spaces, self.engines, self.rates, self.speeds, held
