"""A router that may open no more files blames nobody, says so, and goes on when it may."""

import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.router.http.rig import CHAT, client, mocks, prompt, routing, run, until

from kvferry.router import attending
from kvferry.router.asking import Answer, UntriedError
from kvferry.router.descriptors import clients_within_descriptors, lacks_descriptors
from kvferry.router.health import Failure, State


@contextlib.contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """In this process, for a while. What is yielded takes those again that became free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def fill() -> None:
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    try:
        fill()
        yield fill
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_without_a_descriptor_no_worker_is_blamed_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attending, "UNTRIED_S", 0.02)
    untried: list[str] = []
    get = attending.get

    async def counting(url: str, path: str, **how: Any) -> Answer:
        try:
            return await get(url, path, **how)
        except UntriedError:
            untried.append(url + path)
            raise

    monkeypatch.setattr(attending, "get", counting)

    async def test() -> None:
        async with (
            mocks(2) as workers,
            routing(*(worker.url for worker in workers), probe_interval_s=0.1) as router,
            client(router) as one,
        ):
            await until(lambda: all(worker.models is not None for worker in router.roster))
            with no_descriptors() as refill, caplog.at_level(logging.ERROR, "kvferry.router"):
                await until(lambda: untried)  # what was under way has ended by the third
                await until(lambda: len(untried) > 2)
                for _ in range(3):
                    refill()
                    one.post(CHAT, prompt())
                    answer = await one.answer()
                    assert answer.status == 503
                    assert b"no descriptors left" in answer.body and "retry-after" in answer.headers
                asked = len(untried)
                await until(lambda: len(untried) > asked + 4)
                states = {worker.state for worker in router.roster}
            assert states == {State.UP}
            assert len(caplog.messages) == 1
            assert router.roster.failures() == {what: 3 if what is Failure.UNTRIED else 0 for what in Failure}
            assert router.proxy.statistics().events["worker_untried"] == 3
            one.post(CHAT, prompt())
            assert (await one.answer()).status == 200
            probed = [worker.health.next_probe_at() for worker in router.roster]
            await until(
                lambda: all(
                    worker.health.next_probe_at() != due
                    for worker, due in zip(router.roster, probed, strict=True)
                )
            )

    run(test)


def test_a_name_that_is_not_found_for_want_of_a_descriptor_is_told_from_one_that_is_not_there() -> None:
    error = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert not lacks_descriptors(error)
    with no_descriptors():
        assert lacks_descriptors(error)


@pytest.mark.parametrize(("limit", "clients"), [(1024, 256), (60_000, 16_384), (64, 10), (20, 1)])
def test_no_more_clients_are_let_in_than_descriptors_suffice_for(
    limit: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert clients_within_descriptors(16_384) == clients
