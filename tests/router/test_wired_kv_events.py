"""A router that follows its workers' own KV events."""

import pytest
from tests.router.http.rig import CHAT, ask, mocks, prompt, routing, run

from kvferry.router.feed.endpoints import KvEvents, Ports
from kvferry.router.health import Change, State
from kvferry.router.models import models_of


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


def test_a_prompt_for_an_adapter_is_not_taken_for_one_of_its_base_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks have other names, though its tokens are the same."""

    async def test() -> None:
        asked: list[str] = []
        async with mocks(1) as (one,), routing(one.url, kv_events=KvEvents(Ports(1))) as router:
            answer = b'{"data":[{"id":"mock"},{"id":"style","parent":"mock"},{"id":"odd","parent":7}]}'
            router.roster.learned(one.url, models_of(answer))
            monkeypatch.setattr(
                router.engine_events, "sent", lambda url, what, path, body: asked.append(what.model)
            )
            for model in ("mock", "style", "odd"):
                assert (await ask(router, CHAT, prompt(model=model))).status == 200
        assert asked == ["mock", "odd"]

    run(test)
