"""Workers by name: what a name server says, and what it does not say, leads to the right workers."""

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.router.http.rig import run, until

from kvferry.router import discovery
from kvferry.router.discovery import ABSENCES, MAX_ADDRESSES, Addresses, Discovery, Found
from kvferry.router.settings import WorkerAddress


def test_new_addresses_count_at_once_and_missing_ones_when_they_stay_away() -> None:
    known = Addresses()
    assert known.answer(["b", "a"]) == Found(("a", "b"))
    for _ in range(ABSENCES - 1):
        assert known.answer(["a"]) == Found()
    assert known.answer(["a", "b"]) == Found()  # back in time
    for _ in range(ABSENCES - 1):
        assert known.answer(["a"]) == Found()
    assert known.answer(["a"]) == Found((), ("b",))
    assert known.answer(["a", "b"]) == Found(("b",))


def test_an_empty_answer_changes_nothing() -> None:
    known = Addresses()
    known.answer(["a"])
    assert all(known.answer([]) == Found() for _ in range(10))


def test_no_answer_leads_to_more_workers_than_the_bound() -> None:
    assert len(Addresses().answer(f"{n}" for n in range(MAX_ADDRESSES + 5)).new) == MAX_ADDRESSES


@hypothesis_settings(deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=20))
def test_workers_are_those_of_the_newest_answers(answers: list[set[str]]) -> None:
    known, workers = Addresses(), set()
    for answer in answers:
        found = known.answer(answer)
        assert not set(found.new) & workers and set(found.gone) <= workers
        workers |= set(found.new)
        workers -= set(found.gone)
    told = [answer for answer in answers if answer]
    assert workers == set().union(*told[-ABSENCES:])


class Names:
    """A name server."""

    def __init__(self) -> None:
        self.says: list[str] | Exception | None = []  # None: nothing
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> "asyncio.Future[list[str]]":
        self.asked.append((host, port))

        async def answer() -> list[str]:
            if self.says is None:
                await asyncio.Event().wait()
            if isinstance(self.says, Exception):
                raise self.says
            return list(self.says or [])

        return asyncio.ensure_future(answer())


def _watched(names: Names, test: Any) -> None:
    async def whole() -> None:
        workers: dict[str, str] = {}
        found = Discovery(
            [WorkerAddress("http://engines:8000", "b")],
            found=lambda url, pool: workers.update({url: pool}),
            gone=workers.__delitem__,
            lookup=names,
            every_s=0.01,
        )
        try:
            await test(workers, found)
        finally:
            await found.close()

    run(whole)


def test_a_worker_to_which_another_name_leads_stays() -> None:
    one, two = Names(), Names()

    async def whole() -> None:
        workers: set[str] = set()
        found = Discovery(
            [WorkerAddress("http://one:80"), WorkerAddress("http://two:80")],
            found=lambda url, _: workers.add(url),
            gone=workers.discard,
            lookup=lambda host, port: (one if host == "one" else two)(host, port),
            every_s=0.01,
        )
        try:
            one.says = two.says = ["10.0.0.1"]
            await until(lambda: one.asked and two.asked and workers)
            one.says = ["10.0.0.2"]
            await until(lambda: "http://10.0.0.2:80" in workers)
            asked = len(one.asked)
            await until(lambda: len(one.asked) > asked + ABSENCES)
            assert workers == {"http://10.0.0.1:80", "http://10.0.0.2:80"}
            two.says = ["10.0.0.2"]
            await until(lambda: workers == {"http://10.0.0.2:80"})
        finally:
            await found.close()

    run(whole)


def test_workers_come_and_go_with_their_addresses() -> None:
    names = Names()

    async def test(workers: dict[str, str], _: Discovery) -> None:
        names.says = ["10.0.0.1", "fd00::1"]
        await until(lambda: workers == {"http://10.0.0.1:8000": "b", "http://[fd00::1]:8000": "b"})
        names.says = ["10.0.0.2", "fd00::1"]
        await until(lambda: workers == {"http://10.0.0.2:8000": "b", "http://[fd00::1]:8000": "b"})
        assert names.asked[0] == ("engines", 8000)

    _watched(names, test)


def test_a_name_server_that_fails_changes_nothing_and_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = Names()

    async def test(workers: dict[str, str], found: Discovery) -> None:
        names.says = ["10.0.0.1"]
        await until(lambda: workers)
        names.says = OSError("no such name")
        await until(lambda: found.failures > 2 * ABSENCES)
        assert workers == {"http://10.0.0.1:8000": "b"}
        names.says = ["10.0.0.3"]
        await until(lambda: list(workers) == ["http://10.0.0.3:8000"])

    with caplog.at_level(logging.WARNING):
        _watched(names, test)
    assert sum("cannot be looked up" in line for line in caplog.messages) == 1


def test_a_name_server_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.01)
    names = Names()
    names.says = None

    async def test(_: dict[str, str], found: Discovery) -> None:
        await until(lambda: found.failures > 3)
        assert len(names.asked) == 1

    _watched(names, test)


def test_real_names_are_looked_up() -> None:
    async def test() -> None:
        workers: list[str] = []
        found = Discovery(
            [WorkerAddress("http://localhost:1")],
            found=lambda url, _: workers.append(url),
            gone=workers.remove,
        )
        try:
            await until(lambda: "http://127.0.0.1:1" in workers)
        finally:
            await found.close()

    run(test)
