"""A router that runs takes new settings, and finds workers by name."""

import hashlib
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.router.http.rig import CHAT, ask, client, mocks, prompt, routing, run, until

from kvferry.errors import MisconfiguredError
from kvferry.router.app import Router
from kvferry.router.pilots import Share
from kvferry.router.settings import parse_names, parse_workers
from kvferry.testing.worker import MockWorker


def test_workers_and_pilots_change_while_it_serves() -> None:
    async def test() -> None:
        async with mocks(3) as (one, two, other), routing(one.url) as router:
            await ask(router, CHAT, prompt("1"))
            workers = parse_workers(f"{two.url},b={other.url}")
            router.reload(replace(router.settings, workers=workers, split=Share(1.0, "b")))
            assert (await ask(router, CHAT, prompt("2"))).status == 200 and other.seen
            router.reload(replace(router.settings, split=None))
            assert (await ask(router, CHAT, prompt("3"))).status == 200 and two.seen
            assert len(one.seen) == 1
            await until(lambda: router.roster.get(one.url) is None)

    run(test)


def test_what_was_done_by_hand_lasts_until_the_settings_are_read_anew() -> None:
    async def test() -> None:
        async with mocks(2) as (one, hand), routing(one.url) as router:
            assert router.reload(router.settings).document() == {
                "added": [],
                "drains": [],
                "changed": [],
                "needs_new_start": [],
            }
            router.add_worker(hand.url)
            router.drain_worker(one.url, grace_s=600)
            await until(lambda: router.roster.get(one.url) is None)
            router.reload(router.settings)
            assert router.roster.candidates("", "") == (one.url,)
            await until(lambda: router.roster.get(hand.url) is None)
            with pytest.raises(MisconfiguredError, match="no worker"):
                router.reload(replace(router.settings, workers=()))
            assert (await ask(router, CHAT, prompt())).status == 200

    run(test)


def test_where_all_workers_were_removed_no_model_is_said_not_to_exist() -> None:
    async def test() -> None:
        async with (
            mocks(2) as (one, other),
            routing(one.url, f"b={other.url}", probe_interval_s=1.0) as router,
        ):
            await until(lambda: all(worker.models is not None for worker in router.roster))
            assert (await ask(router, CHAT, prompt(model="nobody's"))).status == 404
            router.drain_worker(one.url, grace_s=600)
            answer = await ask(router, CHAT, prompt())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    run(test)


def test_health_is_the_routers_own_and_wants_no_key(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "trust.toml"
        file.write_text('keyless = "refuse"\n')
        async with mocks(1) as (one,), routing(one.url, trust=file) as router, client(router) as asks:
            asks.get("/health")
            assert (await asks.answer()).status == 200
            router.drain_worker(one.url, grace_s=600)
            asks.get("/health")
            answer = await asks.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert not one.seen

    run(test)


def test_samples_begin_anew_where_a_pilot_changes() -> None:
    async def test() -> None:
        half = Share(0.5, "b")
        async with (
            mocks(2) as (one, other),
            routing(one.url, f"b={other.url}", split=half, mirror=half) as router,
        ):
            for number in range(40):
                await ask(router, CHAT, prompt(f"conversation {number}"))
            router.reload(router.settings)
            assert router.pilots.of("split", "b").ended
            assert router.pilots.of("original", "").ended
            router.reload(replace(router.settings, split=Share(0.25, "b")))
            assert not router.pilots.of("split", "b").ended
            assert router.pilots.of("original", "").ended

    run(test)


def test_a_worker_that_moves_to_another_pool_keeps_its_requests() -> None:
    async def test() -> None:
        async with mocks(2) as (one, two), routing(one.url, two.url) as router:
            router.reload(replace(router.settings, workers=parse_workers(f"{one.url},b={two.url}")))
            assert router.roster.candidates("", "") == (one.url,)
            assert router.roster.candidates("b", "") == (two.url,)
            assert (await ask(router, CHAT, prompt())).status == 200

    run(test)


def test_a_trust_file_is_read_anew_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "trust.toml"
        file.write_text('keyless = "refuse"\n')
        async with mocks(1) as (worker,), routing(worker.url, trust=file) as router:
            assert (await ask(router, CHAT, prompt())).status == 401
            assert (await ask(router, CHAT, prompt(), "Authorization: Bearer k")).status == 200
            digest = hashlib.sha256(b"k").hexdigest()
            file.write_text(f'unlisted = "refuse"\n[groups.g]\nkeys = ["sha256:{digest}"]\n')
            router.reload(router.settings)
            assert (await ask(router, CHAT, prompt())).status == 200
            assert (await ask(router, CHAT, prompt(), "Authorization: Bearer x")).status == 401
            file.write_text("nonsense")
            with pytest.raises(MisconfiguredError, match=r"trust\.toml"):
                router.reload(replace(router.settings, workers=()))
            assert (await ask(router, CHAT, prompt(), "Authorization: Bearer k")).status == 200

    run(test)


def named(worker: MockWorker) -> AbstractAsyncContextManager[Router]:
    """A router that knows it by a name."""
    return routing(names=parse_names(f"http://localhost:{worker.port}"))


def test_workers_are_found_by_name() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), named(worker) as router:
            await until(lambda: worker.url in router.roster.candidates("", ""))
            assert (await ask(router, CHAT, prompt())).status == 200
            router._gone(worker.url)
            await until(lambda: worker.url not in router.roster.candidates("", ""))
            router.add_worker(worker.url)  # named itself: no name leads it away
            router._gone(worker.url)
            assert worker.url in router.roster.candidates("", "")

    run(test)


def test_names_are_of_plain_http() -> None:
    assert str(parse_names("b=http://engines:8000")[0]) == "b=http://engines:8000"
    with pytest.raises(MisconfiguredError, match="one by one"):
        parse_names("https://engines:8000")


def test_a_trust_file_that_says_something_else_is_told_of(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "trust.toml"
        file.write_text('keyless = "refuse"\n')
        async with mocks(1) as (one,), routing(one.url, trust=file) as router:
            assert router.reload(router.settings).changed == ()
            file.write_text('keyless = "shared"\n')
            assert router.reload(router.settings).changed == ("trust",)
            assert (await ask(router, CHAT, prompt())).status == 200

    run(test)


def test_a_trust_file_that_is_empty_changes_nothing(tmp_path: Path) -> None:
    """It was cut short: to take it for one without rules would let everybody in."""

    async def test() -> None:
        file = tmp_path / "trust.toml"
        file.write_text('keyless = "refuse"\n')
        async with mocks(1) as (one,), routing(one.url, trust=file) as router:
            for empty in ("", "# nothing\n"):
                file.write_text(empty)
                with pytest.raises(MisconfiguredError, match="says nothing"):
                    router.reload(router.settings)
                assert (await ask(router, CHAT, prompt())).status == 401

    run(test)
