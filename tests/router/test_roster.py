"""Who may be asked follows from who is there, what they have and how they are."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.errors import CorruptError, RefusedError
from kvferry.router import roster as roster_module
from kvferry.router.health import Failure, Probed, State
from kvferry.router.models import merged, models_of, unknown_model
from kvferry.router.roster import Roster, Served


def _roster(*urls: str) -> tuple[Roster, Counter[str]]:
    in_flight: Counter[str] = Counter()
    roster = Roster(in_flight=lambda url: in_flight[url])
    for url in urls:
        roster.add(url, now=0.0)
    return roster, in_flight


def _answer(*names: str) -> bytes:
    return json.dumps(
        {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
    ).encode()


def _tell(roster: Roster, url: str, event: Failure | Probed | None) -> None:
    """None: a success."""
    worker = roster.get(url)
    assert worker is not None
    if isinstance(event, Failure):
        worker.health.failed(event, 0.0)
    elif event is not None:
        worker.health.probed(event, 1.0, jitter=0.0)
    else:
        worker.health.succeeded()
    roster.changed()


def _fail(roster: Roster, url: str, *what: Failure) -> None:
    for failure in what:
        _tell(roster, url, failure)


def test_all_that_are_up_may_be_asked_and_while_nothing_changes_the_answer_is_the_same_object() -> None:
    roster, _ = _roster("a", "b")
    first = roster.candidates("", "m")
    assert first == ("a", "b")
    assert roster.candidates("", "m") is first
    assert roster.candidates("", "m", tried={"a"}) == ("b",)


def test_the_suspect_is_asked_when_nobody_else_is_left() -> None:
    roster, _ = _roster("a", "b")
    _fail(roster, "a", Failure.LOST)
    assert roster.candidates("", "m") == ("b",)
    assert roster.candidates("", "m", tried={"b"}) == ("a",)
    assert roster.candidates("", "m", tried={"a", "b"}) == ()


def test_the_dead_do_not_look_idle() -> None:
    roster, _ = _roster("a", "b")
    _fail(roster, "a", Failure.REFUSED)
    assert roster.candidates("", "m") == ("b",)
    assert roster.candidates("", "m", tried={"b"}) == ()


def test_requests_that_fail_everywhere_leave_nobody_without_a_worker_that_answers_probes() -> None:
    roster, _ = _roster("a", "b")
    for url in ("a", "b"):
        _fail(roster, url, Failure.ERROR, Failure.ERROR, Failure.ERROR)
    assert roster.candidates("", "m") == ("a", "b")


def test_a_trial_is_one_request_at_a_time() -> None:
    roster, in_flight = _roster("a", "b")
    _fail(roster, "a", Failure.ERROR, Failure.ERROR, Failure.ERROR)
    _tell(roster, "a", Probed.WELL)
    assert roster.candidates("", "m") == ("b", "a")
    in_flight["a"] = 1
    assert roster.candidates("", "m") == ("b",)


def test_who_leaves_gets_nothing_more_and_is_gone_when_empty_or_late() -> None:
    roster, in_flight = _roster("a", "b", "c")
    in_flight.update(a=1, b=1)
    for url, until in (("a", 5.0), ("b", 9.0)):
        assert roster.drain(url, until=until)
    assert roster.candidates("", "") == ("c",)
    assert roster.drained(1.0) == []
    in_flight["b"] = 0
    assert [worker.url for worker in roster.drained(1.0)] == ["b"]
    assert [worker.url for worker in roster.drained(5.0)] == ["a"]
    assert [worker.url for worker in roster] == ["c"] and not roster.drain("a", until=1.0)


def test_failures_of_workers_that_are_gone_count_on() -> None:
    roster, in_flight = _roster("a", "b")
    in_flight["a"] = 1
    _fail(roster, "a", Failure.LOST)
    _fail(roster, "b", Failure.LOST, Failure.ERROR)
    roster.drain("a", until=9.0)
    roster.add("a", now=1.0)
    roster.drain("b", until=0.0)
    assert [worker.url for worker in roster.drained(1.0)] == ["b"]
    _fail(roster, "a", Failure.LOST)
    counted = {what: count for what, count in roster.failures().items() if count}
    assert counted == {Failure.LOST: 3, Failure.ERROR: 1}


def test_who_is_added_again_while_leaving_stays() -> None:
    roster, in_flight = _roster("a")
    in_flight["a"] = 1
    roster.drain("a", until=9.0)
    roster.add("a", now=1.0)
    assert roster.candidates("", "") == ("a",)
    assert roster.drained(10.0) == []
    first = roster.get("a")
    assert roster.add("a", now=2.0) is first


def test_a_worker_is_in_one_pool_and_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    roster, _ = _roster("a")
    with pytest.raises(RefusedError, match="in pool default"):
        roster.add("a", pool="b", now=0.0)
    roster.add("b", pool="b", now=0.0)
    assert roster.candidates("b", "") == ("b",) and roster.pools() == ("", "b")
    monkeypatch.setattr(roster_module, "MAX_WORKERS", 2)
    with pytest.raises(RefusedError, match="2 workers"):
        roster.add("c", now=0.0)


def test_models_are_asked_of_those_that_have_them() -> None:
    roster, _ = _roster("a", "b")
    assert roster.candidates("", "m") == ("a", "b") and roster.served("", "m") is Served.PERHAPS
    roster.learned("a", models_of(_answer("m", "adapter")))
    assert roster.candidates("", "adapter") == ("a", "b")
    roster.learned("b", models_of(_answer("m")))
    assert roster.candidates("", "adapter") == ("a",)
    assert roster.candidates("", "other") == () and roster.served("", "other") is Served.NO
    assert roster.candidates("", "") == ("a", "b")
    _fail(roster, "a", Failure.REFUSED)
    assert roster.candidates("", "adapter") == () and roster.served("", "adapter") is Served.YES


def test_an_answer_with_other_times_is_no_change() -> None:
    roster, _ = _roster("a")
    roster.learned("a", models_of(b'{"data":[{"id":"m","created":1}]}'))
    first = roster.candidates("", "m")
    roster.learned("a", models_of(b'{"data":[{"id":"m","created":2}]}'))
    assert roster.candidates("", "m") is first


def test_merged_models_are_each_there_once_in_the_workers_words() -> None:
    one = models_of(b'{"data":[{"id":"m","max_model_len":1.0e3},{"id":"x","parent":"m"}]}')
    two = models_of(_answer("m", "y"))
    answer = merged([one, two])
    assert [entry["id"] for entry in json.loads(answer)["data"]] == ["m", "x", "y"]
    assert b'{"id":"m","max_model_len":1.0e3}' in answer
    assert json.loads(merged([])) == {"object": "list", "data": []}
    assert models_of(answer) == models_of(_answer("m", "x", "y"))


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"data":[1]}', b'{"data":[{"id":5}]}', b'{"data":[{"id":""}]}', b"\xff"]
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(CorruptError, match="/v1/models"):
        models_of(answer)


def test_an_unknown_model_is_named_with_what_there_is() -> None:
    assert unknown_model("x", ["m", "m", "k"]) == "The model `x` does not exist. There is: k, m"
    assert unknown_model("x", []) == "The model `x` does not exist."


_EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([*Failure, *Probed, None])), max_size=30)


@hypothesis_settings(max_examples=runs(200), deadline=None)
@given(_EVENTS)
def test_what_is_remembered_is_what_a_new_look_finds(
    events: list[tuple[str, Failure | Probed | None]],
) -> None:
    roster, _ = _roster("a", "b", "c")
    for url, event in events:
        roster.candidates("", "")
        _tell(roster, url, event)
        remembered = roster.candidates("", "")
        up = {worker.url for worker in roster if worker.state is State.UP}
        assert up <= set(remembered)
        assert not up or set(remembered) <= {w.url for w in roster if w.state in (State.UP, State.TRIAL)}
        roster.changed()
        assert roster.candidates("", "") == remembered
