"""The soak: what it takes for wrong is wrong, what it excuses is excusable, and a short one finds nothing."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.bench.soak import report
from kvferry.bench.soak.asking import Answer, Question
from kvferry.bench.soak.audit import Notes, judge
from kvferry.bench.soak.judging import Exchange, Finding, Judge
from kvferry.bench.soak.run import Event, Outcome
from kvferry.bench.soak.traffic import Shape, Traffic
from kvferry.bench.soak.users import Tally, Users
from kvferry.errors import RetryError
from kvferry.testing.expectations import eventually

CHUNKS = [bytes([n]) * 32 for n in range(4)]


def _notes(directory: Path, *, loaded: Sequence[str], at: int = 1, first: int = 0, part: int = 0) -> None:
    """An engine stores chunk 1 as two blocks, twice and differently; another loads."""
    storing, loading = Notes(directory, "one"), Notes(directory, "two")
    storing.stored(part=0, chunk=CHUNKS[1], blocks=["a", "b"])
    storing.stored(part=0, chunk=CHUNKS[1], blocks=["c", "d"])
    storing.stored(part=0, chunk=CHUNKS[2], blocks=["e", "f"])
    loading.promised(load=7, epoch=1, chunks=CHUNKS[:3])
    loading.loaded(load=7, epoch=1, part=part, position=at, first=first, blocks=loaded)
    storing.close()
    loading.close()


@pytest.mark.parametrize(("loaded", "first"), [(["a", "b"], 0), (["c", "d"], 0), (["b"], 1)])
def test_blocks_that_some_engine_stored_under_that_name_are_right(
    tmp_path: Path, loaded: list[str], first: int
) -> None:
    _notes(tmp_path, loaded=loaded, first=first)
    verdict = judge(tmp_path)
    assert (verdict.wrong, verdict.blocks, verdict.chunks) == ([], len(loaded), 3)


@pytest.mark.parametrize(
    ("loaded", "at", "first", "part"),
    [
        (["e", "f"], 1, 0, 0),  # another chunk's
        (["a", "d"], 1, 0, 0),  # of two engines
        (["a"], 1, 1, 0),  # at another place
        (["a", "b"], 1, 0, 1),  # of a part that nobody stored
        (["a", "b"], 0, 0, 0),  # of a chunk that nobody stored
        (["a", "b"], 3, 0, 0),  # beyond what was promised
    ],
)
def test_all_other_blocks_are_wrong(
    tmp_path: Path, loaded: list[str], at: int, first: int, part: int
) -> None:
    _notes(tmp_path, loaded=loaded, at=at, first=first, part=part)
    assert len(judge(tmp_path).wrong) == 1


def test_half_a_line_of_a_killed_engine_counts_nothing(tmp_path: Path) -> None:
    _notes(tmp_path, loaded=["a", "b"])
    with (tmp_path / "9-killed.notes").open("wb") as file:
        file.write(b'{"load": 1, "epo')
    assert not judge(tmp_path).wrong


class Reference:
    """An engine without a cache: answers 5s; from own hits of 128 tokens 6s. Two tokens may be a tie."""

    def __init__(self, *, gap: float = 1.0, cached: int = 0) -> None:
        self._gap, self._cached, self._warm = gap, cached, set[str]()

    def __call__(self, question: Question) -> Answer:
        if question.logprobs is not None:
            return Answer([5], whole=True, likely=[{5: -0.5, 7: -0.5 - self._gap}])
        own = question.salt in self._warm and len(question.prompt) > 129
        if len(question.prompt) == 129:
            self._warm.add(question.salt)
        return Answer([6 if own else 5] * question.max_tokens, cached=self._cached, whole=True)


def _exchange(tokens: list[int], *, cached: int = 0) -> Exchange:
    question = Question(tuple(range(300)), 4)
    return Exchange("A", question, Answer(tokens, cached=cached, whole=len(tokens) == 4))


@pytest.mark.parametrize(
    ("tokens", "cached", "gap", "finding"),
    [
        ([5, 5, 5, 5], 128, 1.0, Finding.EQUAL),
        ([5, 5], 0, 1.0, Finding.EQUAL),
        ([], 0, 1.0, Finding.EQUAL),
        ([6, 6, 6, 6], 128, 1.0, Finding.OWN_HIT),
        ([6, 6, 6, 6], 0, 1.0, Finding.WRONG),
        ([5, 5, 7, 9], 128, 0.0005, Finding.TIE),
        ([5, 5, 7, 9], 128, 0.01, Finding.WRONG),
        ([5, 5, 8, 9], 128, 0.0005, Finding.WRONG),  # not among the likeliest
    ],
)
def test_an_answer_is_right_or_explained_or_wrong(
    tokens: list[int], cached: int, gap: float, finding: Finding
) -> None:
    assert Judge(Reference(gap=gap), tie=0.001)(_exchange(tokens, cached=cached)) is finding


def test_a_reference_that_reuses_something_judges_nothing() -> None:
    with pytest.raises(RetryError):
        Judge(Reference(cached=128), tie=0.001)(_exchange([5]))


def _traffic(user: int, seed: int = 1) -> Traffic:
    return Traffic(f"{seed}/{user}", vocabulary=100, shape=Shape(longest=900))


def test_conversations_share_beginnings_grow_and_end() -> None:
    openings = {tuple(_traffic(user).begins().history) for user in range(50)}
    assert 1 < len(openings) <= Shape().openings
    traffic, turns = _traffic(1), 0
    conversation = traffic.begins()
    while (said := traffic.says(conversation)) is not None:
        prompt, tokens = said
        assert len(prompt) + tokens <= 900
        assert prompt[: len(conversation.history)] == tuple(conversation.history)
        conversation.history += [3] * tokens
        turns += 1
    assert turns >= 1
    asked = _traffic(1).says(_traffic(1).begins())
    assert asked == _traffic(1).says(_traffic(1).begins())


def test_every_answer_is_judged_and_what_fails_is_a_problem() -> None:
    tally, rng = Tally(), random.Random(1)
    fates = ["wrong", "silent", "gone", *["right"] * 30]

    def ask(replica: str, question: Question) -> Answer | None:
        fate = fates.pop() if fates else "right"
        if fate == "silent":
            raise RetryError("no answer")
        if fate == "gone":
            return None
        stop = question.stop_after
        tokens = question.max_tokens if stop is None else stop
        return Answer([5 if fate == "right" else 8] * tokens, whole=stop is None)

    users = Users(
        [_traffic(user, seed=rng.randrange(1 << 30)) for user in range(3)],
        ask=ask,
        replicas=("A", "B"),
        judge=Judge(Reference(), tie=0.001),
        tally=tally,
    )
    users.start()
    eventually(lambda: not fates, "all of that to happen")
    users.stop()
    assert tally.requests["failed"] == tally.requests["without their engine"] == 1
    judged = tally.requests["answered"] + tally.requests["given up"]
    assert tally.findings.total() == judged
    assert any("no answer" in problem for problem in tally.problems)
    assert len(tally.problems) == 1 + tally.findings[Finding.WRONG]


def test_what_was_not_tried_or_not_given_back_is_a_problem_and_all_is_in_the_document() -> None:
    outcome = Outcome(Tally(), events={Event.NODE: 2}, left=["a block"], missing=["loads"])
    outcome.tally.judged(Finding.WRONG)
    outcome.tally.problem("WRONG: one")
    assert len(outcome.problems) == 3
    found = json.loads(json.dumps(report.document(outcome, {"seed": "1"})))
    assert found["judged"]["wrong"] == 1
    assert len(found["problems"]) == 3
    assert "node killed and restarted" in report.terminal(outcome)
