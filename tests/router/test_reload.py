"""New settings change what they can in a router that runs, and say what they cannot."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.router.pilots import Share
from kvferry.router.reload import LIVE, Plan
from kvferry.router.reload import plan as between
from kvferry.router.settings import RouterSettings, parse_names, parse_workers
from kvferry.secret import Secret


def _settings(workers: str, **more: object) -> RouterSettings:
    return replace(RouterSettings(workers=parse_workers(workers)), **more)


def plan(
    old: RouterSettings,
    new: RouterSettings,
    *,
    running: dict[str, str] | None = None,
    led: dict[str, str] | None = None,
) -> Plan:
    """running: as the old settings say, where it is not given."""
    return between(old, new, running=dict(old.workers) if running is None else running, led=led or {})


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
    assert set(found.later) == {"metrics_port", "policy"} and found.changed == ("split",)
    assert found.settings == replace(old, split=Share(1.0, "a"))


def test_what_changes_at_once_are_settings() -> None:
    assert {field.name for field in fields(RouterSettings)} >= LIVE


@pytest.mark.parametrize("back", [True, False])
def test_going_there_and_back_ends_where_it_began(back: bool) -> None:
    one, two = _settings("http://a,http://b"), _settings("http://b,c=http://a")
    there = plan(one, two)
    again = plan(there.settings, one if back else two)
    assert again.drain == (("http://a",) if back else ())


def test_what_was_added_or_removed_by_hand_is_undone() -> None:
    settings = _settings("http://a,http://b")
    found = plan(settings, settings, running={"http://b": "", "http://hand": ""})
    assert found.drain == ("http://hand",)
    assert [str(worker) for worker in found.add] == ["http://a"]
    assert found.document()["added"] == ["http://a"] and found.document()["drains"] == ["http://hand"]


def test_workers_that_names_lead_to_stay_and_come_back() -> None:
    settings = _settings("http://a")
    led = {"http://n1": "", "http://n2": "b"}
    found = plan(settings, settings, running={"http://a": "", "http://n1": ""}, led=led)
    assert found.drain == () and [str(worker) for worker in found.add] == ["b=http://n2"]


def test_new_settings_that_leave_no_worker_are_refused() -> None:
    old = _settings("http://a")
    names = parse_names("http://engines:8000")
    with pytest.raises(MisconfiguredError, match="no worker would be left"):
        plan(old, replace(old, workers=(), names=names))
    assert plan(replace(old, names=names), replace(old, workers=(), names=names)).drain == ("http://a",)


def test_settings_are_named_as_they_are_written() -> None:
    old = _settings("http://a")
    assert plan(old, replace(old, probe_interval_s=9.0, engine_control=True)).later == (
        "probe",
        "engine_control",
    )
