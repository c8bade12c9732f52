"""Several routers before the same workers: each counts its own load, and together they spread it."""

import asyncio

import pytest
from tests.router.http.rig import CHAT, ask, mocks, prompt, routing, run, until

from kvferry.router.pilots import Share
from kvferry.secret import Secret


@pytest.mark.parametrize("policy", ["cost", "least_load"])
def test_bursts_at_two_routers_spread_over_the_workers_again_and_again(policy: str) -> None:
    async def test() -> None:
        async with (
            mocks(2, step_s=0.002) as workers,
            routing(*(worker.url for worker in workers), policy=policy) as one,
            routing(*(worker.url for worker in workers), policy=policy) as two,
        ):
            for burst in range(6):
                before = [len(worker.seen) for worker in workers]
                answers = await asyncio.gather(
                    *(
                        ask(router, CHAT, prompt(f"{burst} {number} {place}" * 200, max_tokens=10))
                        for number in range(12)
                        for place, router in enumerate((one, two))
                    )
                )
                assert all(answer.status == 200 for answer in answers)
                got = [len(worker.seen) - seen for worker, seen in zip(workers, before, strict=True)]
                assert sum(got) == 24 and min(got) >= 6, got

    run(test)


def test_routers_with_one_secret_salt_and_draw_alike() -> None:
    async def test() -> None:
        settings = {"trust_secret": Secret("one"), "split": Share(0.5, "b")}
        async with (
            mocks(2) as (usual, other),
            routing(usual.url, f"b={other.url}", **settings) as one,
            routing(usual.url, f"b={other.url}", **settings) as two,
        ):
            for number in range(16):
                before = len(usual.seen), len(other.seen)
                for router in (one, two):
                    await ask(router, CHAT, prompt(f"{number}"), "Authorization: Bearer k")
                assert sorted((len(usual.seen) - before[0], len(other.seen) - before[1])) == [0, 2]
            bodies = [seen.body for worker in (usual, other) for seen in worker.seen]
            assert len({body.partition(b",")[0] for body in bodies}) == 1  # one salt
            assert len(set(bodies)) == 16

    run(test)


def test_a_worker_that_one_router_finds_dead_costs_the_other_a_retry_at_most() -> None:
    async def test() -> None:
        async with (
            mocks(2) as (first, second),
            routing(first.url, second.url, probe_interval_s=1.0) as one,
            routing(first.url, second.url, probe_interval_s=1.0) as two,
        ):
            first.stop()
            for number in range(6):
                for router in (one, two):
                    assert (await ask(router, CHAT, prompt(f"{number}"))).status == 200
            for router in (one, two):
                await until(lambda router=router: router.roster.candidates("", "") == (second.url,))

    run(test)
