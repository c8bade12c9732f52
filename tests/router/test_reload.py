"""New settings change what they can in a router that runs, and say what they cannot."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvferry.router.pilots import Share
from kvferry.router.reload import LIVE, plan
from kvferry.router.settings import RouterSettings, parse_workers
from kvferry.secret import Secret


def _settings(workers: str, **more: object) -> RouterSettings:
    return replace(RouterSettings(workers=parse_workers(workers)), **more)


def test_workers_are_added_drained_and_moved() -> None:
    found = plan(_settings("http://a,http://b,x=http://c"), _settings("http://b,y=http://c,http://d"))
    assert found.drain == ("http://a", "http://c")
    assert [str(worker) for worker in found.add] == ["y=http://c", "http://d"]
    assert found.settings.workers == parse_workers("http://b,y=http://c,http://d") and found.later == ()


def test_the_same_settings_change_nothing() -> None:
    settings = _settings("http://a,http://b")
    found = plan(settings, settings)
    assert (found.drain, found.add, found.later, found.settings) == ((), (), (), settings)


def test_trust_and_pilots_change_at_once() -> None:
    new = _settings(
        "http://a,b=http://b",
        trust=Path("t"),
        trust_secret=Secret("s"),
        split=Share(0.1, "b"),
        mirror=Share(0.2, "b"),
    )
    found = plan(_settings("http://a,b=http://b"), new)
    assert found.settings == new and found.later == ()


def test_what_needs_a_new_start_stays_and_is_named() -> None:
    old = _settings("http://a")
    found = plan(old, replace(old, metrics_port=1, policy="least_load", split=Share(1.0, "a")))
    assert set(found.later) == {"metrics_port", "policy"}
    assert found.settings == replace(old, split=Share(1.0, "a"))


def test_what_changes_at_once_are_settings() -> None:
    assert {field.name for field in fields(RouterSettings)} >= LIVE


@pytest.mark.parametrize("back", [True, False])
def test_going_there_and_back_ends_where_it_began(back: bool) -> None:
    one, two = _settings("http://a,http://b"), _settings("http://b,c=http://a")
    there = plan(one, two)
    again = plan(there.settings, one if back else two)
    assert again.drain == (("http://a",) if back else ())
