"""Whole fleets in virtual time: where requests go, and what that is worth."""

import asyncio
import statistics
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from tests.router.virtual import Conversations, Fleet, Turn, cost_guide, run_virtually, text

from kvferry.errors import BrokenError
from kvferry.router.cache_aware import CacheAware, Thresholds
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Asked, Ended, Guide, Key, Usage
from kvferry.router.knowledge import Knowledge
from kvferry.testing.worker_engine import WorkerSettings

TUNED = [Thresholds(), Thresholds(requests_apart=4), Thresholds(requests_apart=2, requests_ratio=1.2)]


def said(start: str, *turns: str) -> Turn:
    return [{"role": "system", "content": start}, *({"role": "user", "content": turn} for turn in turns)]


def played(guide: Callable[[Knowledge], Guide], *, slow: float = 1.0, **fleet: Any) -> tuple[float, float]:
    """Mean and 99th percentile of the time to the first token."""

    async def main() -> Fleet:
        made = Fleet(2, guide, **fleet)
        made.slow("w1", slow)
        await Conversations(sessions=80, per_s=2.0).play(made)
        return made

    ttfts = run_virtually(main()).ttfts()
    return statistics.mean(ttfts), ttfts[int(len(ttfts) * 0.99)]


def loads(guide: Guide) -> dict[str, dict[str, int]]:
    workers = guide.statistics()["workers"]
    assert isinstance(workers, dict)
    return workers


def test_with_a_shared_tier_and_a_slow_worker_it_beats_cache_aware_however_tuned() -> None:
    mean, tail = played(cost_guide, slow=3.0)
    others = [played(lambda _, t=t: CacheAware(t), slow=3.0, feeds=False) for t in TUNED]  # type: ignore[misc]
    assert mean <= 0.8 * min(other for other, _ in others)
    assert tail <= 0.6 * min(other for _, other in others)


@pytest.mark.parametrize("feeds", [True, False])
def test_without_a_shared_tier_it_is_no_worse_than_cache_aware(*, feeds: bool) -> None:
    mean, tail = played(cost_guide, slow=3.0, share=False, feeds=feeds)
    others = [played(lambda _, t=t: CacheAware(t), slow=3.0, share=False, feeds=False) for t in TUNED]  # type: ignore[misc]
    assert mean <= min(other for other, _ in others)
    assert tail <= min(other for _, other in others)


def test_a_hot_prefix_leaves_its_host_when_a_shared_tier_has_it_and_does_not_when_none_has() -> None:
    async def main(*, share: bool) -> list[str]:
        fleet = Fleet(4, cost_guide, share=share)
        hot = text("hot", 40_000)
        fleet.send(said(hot, "first"))
        await fleet.until_over()
        for number in range(12):
            fleet.send(said(hot, f"{number} " + text(str(number), 2000)))
        await fleet.until_over()
        return [answer.worker for answer in fleet.answers[1:]]

    spread, pinned = run_virtually(main(share=True)), run_virtually(main(share=False))
    assert set(spread) == {"w0", "w1", "w2", "w3"}
    assert len(set(pinned)) < 4
    assert max(pinned.count(worker) for worker in pinned) > max(spread.count(worker) for worker in spread)


def test_siblings_of_a_burst_follow_the_first_while_that_is_cheaper_and_spread_when_it_is_not() -> None:
    async def main(siblings: int, tail: int) -> Fleet:
        fleet = Fleet(4, cost_guide, share=False, feeds=False)
        for number in range(siblings):
            fleet.send(said(text("new", 40_000), text(f"q{number}", tail)))
            await asyncio.sleep(0.001)
        await fleet.until_over()
        return fleet

    few = run_virtually(main(4, 40))
    assert len({answer.worker for answer in few.answers}) == 1
    many = run_virtually(main(40, 8000))
    assert len({answer.worker for answer in many.answers}) == 4


def test_idle_equal_workers_share_unrelated_requests() -> None:
    async def main() -> list[str]:
        fleet = Fleet(4, cost_guide)
        for number in range(40):
            fleet.send(said(text(f"own {number}", 4000)))
            await asyncio.sleep(0.01)
        await fleet.until_over()
        return [answer.worker for answer in fleet.answers]

    chosen = run_virtually(main())
    assert all(7 <= chosen.count(worker) <= 13 for worker in ("w0", "w1", "w2", "w3"))


def test_a_session_stays_where_its_prefix_is_while_nothing_is_gained_by_leaving() -> None:
    async def main() -> set[str]:
        fleet = Fleet(4, cost_guide)
        turns: list[str] = []
        for number in range(12):
            turns.append(text(f"t{number}", 1500))
            fleet.send(said("Be brief.", *turns))
            await fleet.until_over()
            await asyncio.sleep(1)
        return {answer.worker for answer in fleet.answers}

    assert len(run_virtually(main())) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_came_back_empty_is_noticed(*, told: bool) -> None:
    async def main() -> tuple[list[str], int]:
        fleet = Fleet(2, cost_guide, share=False, feeds=told)
        prompts = [text(f"p{number}", 20_000) for number in range(10)]
        for prompt in prompts:
            fleet.send(said(prompt))
            await fleet.until_over()
        home = fleet.answers[0].worker
        held = [
            prompt for prompt, answer in zip(prompts, fleet.answers, strict=True) if answer.worker == home
        ]
        assert len(held) >= 3
        fleet.restart(home, told=told)
        for prompt in held[:2]:
            fleet.send(said(prompt, "again"))
            await fleet.until_over()
        fleet.send(said(held[2], "again"))
        await fleet.until_over()
        explained = fleet.guides[0].explain(fleet.answers[-1].request_id)
        assert explained is not None
        return held, int(str(explained["cached_tokens_expected"]))

    _, expected = run_virtually(main())
    assert expected < 100


def test_a_worker_that_slows_down_is_left_though_nobody_says_so() -> None:
    async def main() -> list[str]:
        fleet = Fleet(2, cost_guide, feeds=False, share=False)
        for number in range(80):
            if number == 20:
                fleet.slow("w1", 8.0, told=False)
            fleet.send(said(text(f"own {number}", 6000)))
            await asyncio.sleep(3.0)  # no queue tells it
        await fleet.until_over()
        return [answer.worker for answer in fleet.answers]

    chosen = run_virtually(main())
    assert chosen[:20].count("w1") >= 5
    assert chosen[40:].count("w1") <= 5


def test_a_worker_that_was_slow_once_is_tried_again() -> None:
    async def main() -> list[str]:
        fleet = Fleet(2, cost_guide, feeds=False, share=False)
        fleet.slow("w1", 8.0, told=False)
        for number in range(400):
            if number == 60:
                fleet.slow("w1", 1.0, told=False)
            fleet.send(said(text(f"own {number}", 6000)))
            await asyncio.sleep(1.0)
        await fleet.until_over()
        return [answer.worker for answer in fleet.answers]

    chosen = run_virtually(main())
    assert chosen[20:60].count("w1") < 10
    assert chosen[-60:].count("w1") > 10


def test_a_worker_that_hangs_gets_no_more_requests() -> None:
    async def main() -> list[str]:
        fleet = Fleet(2, cost_guide, feeds=False, share=False)
        fleet.slow("w1", 1e6, told=False)
        for number in range(40):
            fleet.send(said(text(f"own {number}", 3000)))
            await asyncio.sleep(0.3)
        return [answer.worker for answer in fleet.answers]

    assert run_virtually(main())[10:].count("w1") <= 2


def test_stale_knowledge_costs_speed_only() -> None:
    """Feeds are lost; the shared tier loses everything; nobody tells."""

    async def main(*, stale: bool) -> Fleet:
        fleet = Fleet(2, cost_guide)
        hot = text("hot", 20_000)
        for number in range(4):
            fleet.send(said(hot, f"a{number}"))
            await fleet.until_over()
        if stale:
            for url, feed in fleet.feeds_of.items():
                feed.on = False
                fleet.knowledges[0].lost(feed.name)
                fleet.engines[url].drop()
            assert fleet.tier is not None
            fleet.tier.held.clear()
        for number in range(40):
            fleet.send(said(hot, f"b{number} " + text(str(number), 2000)))
            await asyncio.sleep(0.1)
        await fleet.until_over()
        return fleet

    stale, fresh = run_virtually(main(stale=True)), run_virtually(main(stale=False))
    assert len(stale.ttfts()) == len(fresh.ttfts()) == 44
    assert stale.ttfts()[-1] < 4 * 20_000 / 4 * 2e-4 + 1


def test_two_routers_side_by_side_do_about_as_well_as_one() -> None:
    one, _ = played(cost_guide, slow=3.0)
    two, _ = played(cost_guide, slow=3.0, routers=2)
    assert two <= 1.3 * one


def test_ten_thousand_aborted_requests_leave_no_load_and_no_expectation() -> None:
    async def main() -> Fleet:
        fleet = Fleet(3, cost_guide, feeds=False)
        aborts = []
        for number in range(10_000):
            _, abort = fleet.send(said(f"{number} " + text("same", 600)))
            aborts.append(abort)
            if len(aborts) == 50:
                for abort in aborts:
                    abort()
                aborts.clear()
        return fleet

    fleet = run_virtually(main())
    guide = fleet.guides[0]
    assert isinstance(guide, CostGuide)
    assert sum(counts["ended"] for counts in loads(guide).values()) == 10_000
    for counts in loads(guide).values():
        assert (counts["requests"], counts["waiting_tokens"], counts["decoding"]) == (0, 0, 0)
    assert guide.pool.busy == 0
    assert len(fleet.knowledges[0].seen) == 0
    assert len(guide.ring) <= 4096


def test_an_explanation_says_what_each_worker_would_have_cost_and_what_came_of_it() -> None:
    async def main() -> dict[str, Any]:
        fleet = Fleet(2, cost_guide)
        for number in range(2):
            fleet.send(said(text("hot", 8000), text(f"q{number}", 3000)))
            await fleet.until_over()
        found = fleet.guides[0].explain(f"chatcmpl-{fleet.answers[-1].request_id}")
        assert found is not None
        assert fleet.guides[0].explain("never heard of") is None
        return dict(found)

    explained = run_virtually(main())
    assert explained["worker"] in {"w0", "w1"}
    assert explained["cached_tokens"] == pytest.approx(explained["cached_tokens_expected"], rel=0.1)
    assert explained["ttft_ms"] == pytest.approx(explained["ttft_ms_expected"], rel=0.3)
    assert {candidate["worker"] for candidate in explained["candidates"]} == {"w0", "w1"}
    for cost in explained["candidates"]:
        parts = (
            max(cost["wait_ms"], cost["load_ms"]) + cost["prefill_ms"] + cost["decode_ms"] + cost["work_ms"]
        )
        assert cost["cost_ms"] == pytest.approx(parts, abs=0.01)
    assert explained["candidates"][0]["cost_ms"] <= explained["candidates"][1]["cost_ms"]


def test_what_a_shared_tier_brings_is_wished_for_at_the_node() -> None:
    async def main() -> Any:
        fleet = Fleet(2, cost_guide)
        hot = text("hot", 40_000)
        for number in range(2):  # the second from a busy host
            fleet.send(said(hot, f"q{number}"))
            await fleet.until_over()
        for number in range(3):
            fleet.send(said(text(f"own {number}", 20_000)))
        guide = fleet.guides[0]
        assert isinstance(guide, CostGuide)
        reading = fleet.readers[0].read("/v1/chat/completions", _body(said(hot, "q9")))
        home = fleet.answers[0].worker
        other = "w1" if home == "w0" else "w0"
        flight = guide.begin(
            Asked("x", "m", reading.keys), among=[other], now=asyncio.get_running_loop().time()
        )
        blocks = fleet.engines[home].blocks_of(f"<system>{hot}")
        return flight.wish, other, blocks

    wish, other, blocks = run_virtually(main())
    assert wish.node == f"n-{other}"
    assert wish.namespace == b"n" * 16
    assert b"".join(blocks).startswith(wish.digests[: 32 * 100])
    assert len(wish.digests) >= 32 * 100


def _body(messages: Turn) -> bytes:
    import json

    return json.dumps({"model": "m", "messages": messages}).encode()


def test_of_a_thousand_workers_the_one_that_has_the_prefix_is_found() -> None:
    knowledge = Knowledge()
    guide = cost_guide(knowledge)
    workers = tuple(f"w{number}" for number in range(1000))
    keys = tuple(Key(f"k{number}".encode(), 1000 * (number + 1)) for number in range(20))
    first = guide.begin(Asked("a", "m", keys), among=workers, now=0.0)
    first.first_byte(1.0)
    first.end(Ended.DONE, 1.1)
    for number in range(50):
        flight = guide.begin(Asked(f"b{number}", "m", keys), among=workers, now=2.0 + number)
        assert flight.worker == first.worker
        flight.first_byte(2.1 + number)
        flight.end(Ended.DONE, 2.2 + number)
    assert len({guide.begin(Asked("c", "m", ()), among=workers, now=60.0).worker for _ in range(50)}) > 25


def test_only_the_workers_given_are_chosen_and_none_is_a_defect() -> None:
    guide = cost_guide(Knowledge())
    for url in ("a", "b", "c"):
        guide.worker_added(url)
    assert {guide.begin(Asked("r", "m", ()), among=["b", "b"], now=0.0).worker for _ in range(9)} == {"b"}
    with pytest.raises(BrokenError):
        guide.begin(Asked("r", "m", ()), among=[], now=0.0)


def test_workers_that_come_and_go_leave_nothing_behind() -> None:
    knowledge = Knowledge()
    guide = cost_guide(knowledge)
    random = Random(5)
    flights = []
    for number in range(2000):
        workers = [f"w{number // 10}", f"w{number // 10 + 1}"]
        flights.append(
            guide.begin(Asked(f"r{number}", "m", (Key(b"k", 400),)), among=workers, now=float(number))
        )
        if random.random() < 0.5:
            flights.pop(random.randrange(len(flights))).end(Ended.FAILED, float(number))
        if number % 10 == 9:
            guide.worker_lost(workers[0])
    for flight in flights:
        flight.end(Ended.ABORTED, 3000.0)
    assert guide.pool.busy == 0
    assert len(loads(guide)) <= 2
    assert len(guide.pool.workers) <= 2
    assert len(knowledge._workers) <= 2


def test_a_small_cache_is_respected() -> None:
    settings = WorkerSettings(prefill_token_s=2e-4, step_s=0.02, cache_blocks=100)

    async def main() -> int:
        fleet = Fleet(1, cost_guide, share=False, settings=settings)
        for number in range(4):
            fleet.send(said(text(f"p{number}", 12_000)))
            await fleet.until_over()
        fleet.send(said(text("p0", 12_000)))
        await fleet.until_over()
        explained = fleet.guides[0].explain(fleet.answers[-1].request_id)
        assert explained is not None
        assert explained["cached_tokens"] == 0
        return int(str(explained["cached_tokens_expected"]))

    assert run_virtually(main()) == 0


def test_answers_that_come_all_at_once_make_no_worker_look_slow_or_hung() -> None:
    guide = cost_guide(Knowledge())
    workers = ("a", "b")
    keys = (Key(b"k", 4000),)
    first = guide.begin(Asked("r", "m", keys, streamed=False), among=["a"], now=0.0)
    prices = []
    for now in (0.01, 5.0, 60.0):
        guide.begin(Asked("x", "m", (Key(b"z", 4000),)), among=workers, now=now).end(Ended.ABORTED, now)
        explained = guide.explain("x")
        assert explained is not None
        candidates = explained["candidates"]
        assert isinstance(candidates, list)
        prices.append({candidate["worker"]: candidate["wait_ms"] for candidate in candidates})
    assert prices[0]["a"] > 50
    assert prices[1] == prices[2] == {"a": 0, "b": 0}
    first.first_byte(61.0)
    first.end(Ended.DONE, 61.0, Usage(1000, 0, 500))
    assert guide.slowness(61.0)["a"] == pytest.approx(1.0)
    assert guide.pool.know("a").pace.unseen == 0


@pytest.mark.parametrize("how", [Ended.REFUSED, Ended.FAILED])
def test_a_request_that_is_refused_says_nothing_of_how_fast_its_worker_is(how: Ended) -> None:
    guide = cost_guide(Knowledge())
    for number in range(20):
        flight = guide.begin(Asked(f"r{number}", "m", (Key(b"k", 400_000),)), among=["a"], now=float(number))
        flight.first_byte(number + 0.001)
        flight.end(how, number + 0.002)
    assert guide.slowness(20.0)["a"] == pytest.approx(1.0)
    assert len(guide.knowledge.seen) == 0


def test_leaving_for_a_trifle_is_not_worth_it() -> None:
    """0.7 ms are to be gained: the prefix's worker keeps the request. 20 ms are not a trifle."""
    for waiting, stays in ((288, True), (1200, False)):
        guide = cost_guide(Knowledge())
        for url in ("home", "other"):
            guide.worker_added(url)
        first = guide.begin(Asked("a", "m", (Key(b"k", 400),)), among=["home"], now=0.0)
        first.first_byte(0.1)
        first.end(Ended.DONE, 0.2)
        guide.begin(Asked("b", "m", (Key(b"o", waiting),)), among=["home"], now=2.0)
        chosen = guide.begin(Asked("c", "m", (Key(b"k", 400),)), among=["home", "other"], now=2.0).worker
        assert (chosen == "home") is stays
        explained = guide.explain("c")
        assert explained is not None
        assert str(explained["reason"]).startswith("stays") is stays
