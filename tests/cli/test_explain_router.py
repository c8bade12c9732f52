"""A router's explanation as text."""

from random import Random

from kvferry.cli import router_status
from kvferry.cli.explain_router import render
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Asked, Ended, Key, Usage
from kvferry.router.knowledge import Knowledge


def test_it_shows_where_a_request_went_and_what_every_candidate_would_have_cost() -> None:
    guide = CostGuide(Knowledge(), random=Random(1))
    keys = (Key(b"a", 40_000), Key(b"b", 48_000))
    for number in range(2):
        flight = guide.begin(Asked(f"r{number}", "m", keys), among=["http://a", "http://b"], now=number * 9.0)
        begun = guide.explain(f"r{number}")
        assert begun is not None
        assert "not said" in render(begun)
        flight.first_byte(number * 9.0 + 1.0)
        flight.token(number * 9.0 + 1.0)
        flight.end(Ended.DONE, number * 9.0 + 2.0, Usage(12_000, 11_900 * number, 5))
    explained = guide.explain("r1")
    assert explained is not None
    lines = render(explained).splitlines()
    assert lines[0] == "request   r1 of m"
    assert f"sent to   {flight.worker}" in lines[1]
    assert "cached    11,900 tokens (11," in "\n".join(lines)
    assert "1,000.0 ms (" in lines[4]
    unsaid = "\n".join(render({**explained, "ttft_ms": None}).splitlines())
    assert "TTFT      - (no stream), " in unsaid
    assert lines[-3].split()[:2] == ["worker", "cost"]
    assert {line.split()[0] for line in lines[-2:]} == {"http://a", "http://b"}
    assert len({len(line) for line in lines[-3:]}) == 1


def test_a_feed_that_is_absent_is_said_once_and_to_be_no_fault() -> None:
    away = {"address": "h:9474", "state": "away", "error": "h:9474: Connection refused"}
    assert router_status._feed(away) == "away Connection refused"
    assert "fine without nodes" in router_status._feed({**away, "state": "absent"})
