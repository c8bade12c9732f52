"""A router that follows its workers' own KV events."""

from tests.router.http.rig import mocks, routing, run

from kvferry.router.feed.endpoints import KvEvents, Ports
from kvferry.router.health import Change, State


def test_a_worker_that_restarted_is_still_the_one_whose_events_are_followed() -> None:
    async def test() -> None:
        async with mocks(1) as (one,), routing(one.url, kv_events=KvEvents(Ports(1))) as router:
            before = router.knowledge.worker(one.url)
            assert before.node == f"kv-events {one.url}"
            router.reception.note(one.url, lambda health: Change(State.UP, State.UP, lost=True))
            after = router.knowledge.worker(one.url)
            assert after is not before
            assert after.node == f"kv-events {one.url}"

    run(test)
