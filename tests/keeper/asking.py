"""What tests of a node's side ask of keepers, and how they read the answers."""

import time

import pytest
from tests.keeper.fleet import Answers, some_refs

from kvferry.addresses import Address
from kvferry.keeper import peer
from kvferry.keeper.client import Keepers, KeeperStatus
from kvferry.keeper.wire import (
    Where,
)
from kvferry.tiers.contract import Outcome

REFS = some_refs(60, parts=2)
LONG_S = 60.0
NOBODY = Address("127.0.0.1", 1)
"""Nothing listens there."""


def soon() -> float:
    return time.monotonic() + LONG_S


def staged(keepers: Keepers, *, wait_s: float = LONG_S) -> list[Outcome]:
    """By index, each once."""
    answers = Answers()
    keepers.stage(REFS, deadline=time.monotonic() + wait_s, done=answers)
    calls = answers.wait(len(REFS))
    assert sorted(index for index, _ in calls) == list(range(len(REFS)))
    return [outcome for _, outcome in sorted(calls, key=lambda call: call[0])]


def located(keepers: Keepers, *, wait_s: float = LONG_S) -> list[Where]:
    answers = Answers()
    keepers.locate(REFS, deadline=time.monotonic() + wait_s, done=answers)
    ((where,),) = answers.wait()
    assert len(where) == len(REFS)
    return list(where)


def status(keepers: Keepers, number: int = 0) -> KeeperStatus:
    return keepers.statistics().keepers[number]


def silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that do not answer are noticed soon, and dropped never."""
    monkeypatch.setattr(peer, "PATIENCE_S", 0.1)
    monkeypatch.setattr(peer, "GIVE_UP_S", 600.0)
