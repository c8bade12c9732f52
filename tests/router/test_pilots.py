"""Who is in a pilot stays in it, and what is said of it is what was measured."""

import json
import random

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.router.contract import Asked, Ended, Key, Usage
from kvferry.router.pilot_report import document, text
from kvferry.router.pilots import (
    KEPT,
    MAX_CONVERSATIONS,
    Measured,
    MeasuredFlight,
    Pilots,
    Share,
    parse_share,
)
from kvferry.router.policies import RoundRobin
from kvferry.router.reading import Reader


def _asked(opening: str = "", *, session: str = "", salt: str = "", request_id: str = "r") -> Asked:
    return Asked(request_id, "m", (Key(b"k", 1),), salt=salt, session=session, opening=opening)


def _turns(count: int, system: str, user: str) -> list[Asked]:
    """Of a conversation, as they are read."""
    messages = [{"role": "user", "content": user}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    found = []
    for number in range(count):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        reading = Reader(seed=number).read("/v1/chat/completions", body, with_opening=True)
        found.append(Asked(f"{number}", "m", reading.keys, opening=reading.opening))
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"turn {number}"}]
    return found


def test_shares_are_written_as_percentages_of_a_pool() -> None:
    assert parse_share(" 10%=poolB ") == Share(0.1, "poolB") and str(parse_share("0.5%=b")) == "0.5%=b"


@pytest.mark.parametrize("given", ["", "10=poolB", "0%=b", "101%=b", "10%=", "10%=9", 10, "1e1%=b", "-1%=b"])
def test_what_is_no_share_is_one_line(given: object) -> None:
    with pytest.raises(MisconfiguredError, match="write it like 10%=poolB"):
        parse_share(given)


def test_about_so_many_conversations_are_in_it() -> None:
    pilots = Pilots(split=Share(0.1, "b"))
    chosen = sum(pilots.pool(_asked(f"user {n}"), "") == "b" for n in range(20_000))
    assert 0.09 < chosen / 20_000 < 0.11
    assert all(Pilots(split=Share(1.0, "b")).pool(_asked(f"{n}"), "") == "b" for n in range(100))


def test_a_conversation_stays_where_it_began() -> None:
    pilots = Pilots(split=Share(0.5, "b"), mirror=Share(0.5, "b"))
    both = set()
    for n in range(50):
        turns = _turns(4, "system" * (n % 2), f"user {n}")
        assert len({pilots.pool(turn, "") for turn in turns}) == 1
        assert len({pilots.mirrored(turn) for turn in turns}) == 1
        both.add(pilots.pool(turns[0], ""))
        sessions = [_asked(f"{turn}", session=f"s{n}") for turn in range(4)]
        assert len({pilots.pool(turn, "") for turn in sessions}) == 1
    assert both == {"", "b"}


def test_requests_that_nothing_connects_are_drawn_one_by_one() -> None:
    pilots = Pilots(split=Share(0.5, "b"))
    body = json.dumps({"model": "m", "prompt": "p"}).encode()
    assert Reader().read("/v1/completions", body, with_opening=True).opening == ""
    assert {pilots.pool(_asked(request_id=f"{n}"), "") for n in range(64)} == {"", "b"}


def test_users_who_share_a_session_name_are_drawn_separately_and_split_and_mirror_too() -> None:
    pilots = Pilots(split=Share(0.5, "b"), mirror=Share(0.5, "b"))
    users = [_asked(session="1", salt=f"user {n}") for n in range(64)]
    assert {pilots.pool(user, "") for user in users} == {"", "b"}
    assert {(pilots.pool(user, ""), pilots.mirrored(user)) for user in users} == {
        ("", False), ("", True), ("b", False), ("b", True)
    }  # fmt: skip


def test_what_has_no_prompt_is_not_mirrored() -> None:
    assert not Pilots(mirror=Share(1.0, "b")).mirrored(Asked("r", "m", ()))


def _flown(told: Measured, *, stream: bool, how: Ended = Ended.DONE, usage: Usage | None = None) -> None:
    guide = RoundRobin()
    flight = MeasuredFlight(guide.begin(_asked(), among=["w"], now=10.0), told, came=9.0, stream=stream)
    assert flight.worker == "w"
    flight.first_byte(11.0)
    for at in (11.0, 11.5, 12.0):
        flight.token(at)
    flight.end(how, 12.5, usage)
    loads = guide.statistics()["workers"]
    assert isinstance(loads, dict) and loads["w"]["requests"] == 0  # the flight inside has ended


def test_a_stream_is_measured_from_when_it_came() -> None:
    told = Measured()
    _flown(told, stream=True)
    _flown(told, stream=True, usage=Usage(100, 25, 11))
    assert list(told.ttft_s) == [2.0, 2.0] and list(told.total_s) == [3.5, 3.5]
    assert list(told.tokens_per_s) == [2.0, 10.0]
    assert (told.cached_tokens, told.prompt_tokens) == (25, 100)


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    told = Measured()
    _flown(told, stream=False)
    assert not told.ttft_s and not told.tokens_per_s and list(told.total_s) == [3.5]


@pytest.mark.parametrize("how", [Ended.FAILED, Ended.ABORTED, Ended.REFUSED])
def test_what_was_not_done_is_counted_and_not_timed(how: Ended) -> None:
    told = Measured()
    _flown(told, stream=True, how=how)
    assert told.ended == {how.value: 1} and not told.ttft_s and not told.total_s
    assert told.judged == (how is Ended.FAILED)


def test_memory_is_bounded() -> None:
    told = Measured()
    for n in range(MAX_CONVERSATIONS + 10):
        told.saw(_asked(f"{n}"))
        told.ttft_s.append(1.0)
    assert len(told.conversations) == MAX_CONVERSATIONS and len(told.ttft_s) == KEPT


def _filled(told: Measured, n: int, scale: float) -> None:
    draw = random.Random(5)
    for number in range(n):
        told.saw(_asked(f"{number}"))
        told.ended[Ended.DONE.value] += 1
        told.ttft_s.append(scale * (1 + draw.random()))
        told.tokens_per_s.append(50.0)


def test_a_difference_is_told_where_the_intervals_show_one() -> None:
    pilots = Pilots(split=Share(0.1, "b"))
    _filled(pilots.of("split", ""), 500, 1.0)
    _filled(pilots.of("split", "b"), 500, 0.5)
    page = document(pilots)
    found = page["split"]["ratios"]["ttft_s_p50"]
    assert found["low"] <= 0.5 <= found["high"] < 1 and page["mirror"] is None
    assert page["split"]["other"]["ttft_s_p99"]["n"] == 500
    lines = "\n".join(text(pilots))
    assert "TTFT p50, ms" in lines and "errors, %" in lines and "-: none yet" in lines
    (row,) = (line for line in text(pilots) if "TTFT p50, ms" in line)
    assert "  " in row[30:].strip()  # columns do not touch
    assert float(row.split()[3].replace(",", "")) == pytest.approx(1500, rel=0.2)
    assert "TTFT p50" in lines and "] less" in lines and "no difference shown" in lines


def test_too_few_are_said_to_be() -> None:
    pilots = Pilots(mirror=Share(0.1, "b"))
    _filled(pilots.of("original", ""), 100, 1.0)
    _filled(pilots.of("mirror", "b"), 4, 0.1)
    pilots.of("mirror", "b").skipped = 3
    lines = text(pilots)
    assert any("TTFT p50" in line and "too few to tell" in line for line in lines)
    assert lines[-1].strip() == "3 copies were not made: too many in flight"
    assert document(pilots)["mirror"]["ratios"]["ttft_s_p99"]["low"] is None


def test_without_a_pilot_it_says_how_to_have_one() -> None:
    assert text(Pilots()) == ["no pilot: start the router with --split 10%=POOL or --mirror 5%=POOL"]
    assert text(Pilots(split=Share(0.1, "b")))[0] == "split 10% to b"
