"""A caller that floods the router waits behind itself, not in front of others."""

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http.rig import (
    CHAT,
    Answer,
    Client,
    Handler,
    prompt,
    read_request,
    routing,
    run,
    scripted,
    until,
)

from kvferry.router.app import Router
from kvferry.router.http.limits import Limits
from kvferry.router.http.waiting import Waiting
from kvferry.router.reception import network
from kvferry.router.trust import Rules, Trust, key_digest

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def one_by_one() -> tuple[list[str], asyncio.Semaphore, Handler]:
    """Whose requests came, in order; each release lets one be answered."""
    came: list[str] = []
    may = asyncio.Semaphore(0)

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await read_request(reader):
            found = re.search(rb'"content": ?"(\w+)', request)
            assert found is not None
            came.append(found[1].decode())
            await may.acquire()
            writer.write(WHOLE)

    return came, may, worker


async def asked(router: Router, name: str, *fields: str, host: str = "127.0.0.1") -> Answer:
    """From that address."""
    address = router.address
    one = Client(*await asyncio.open_connection(address.host, address.port, local_addr=(host, 0)))
    try:
        one.post(CHAT, prompt(name), *fields)
        return await one.answer()
    finally:
        one.close()
        with contextlib.suppress(ConnectionError):
            await one.writer.wait_closed()


@pytest.mark.parametrize("by", ["address", "group"])
def test_who_waits_beside_a_flood_gets_every_second_place(by: str) -> None:
    """Made-up API keys make no further callers of one."""
    keys = {b"a1": "alpha", b"a2": "alpha", b"b1": "beta"}
    rules = Rules(listed={key_digest(key): group for key, group in keys.items()} if by == "group" else {})

    def fields(caller: str, number: int) -> str:
        if by == "group":
            return f"Authorization: Bearer {'b1' if caller == 'calm' else f'a{number % 2 + 1}'}"
        return f"Authorization: Bearer {caller}{number}"

    def host(caller: str) -> str:
        return "127.0.0.2" if by == "address" and caller == "calm" else "127.0.0.1"

    async def test() -> None:
        came, may, worker = one_by_one()
        limits = replace(Limits(), per_worker=1)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            router.reception.trust = Trust(rules)
            async with asyncio.TaskGroup() as group:

                def begin(caller: str, number: int) -> None:
                    group.create_task(asked(router, caller, fields(caller, number), host=host(caller)))

                for number in range(21):
                    begin("flood", number)
                await until(lambda: len(router.proxy.waiting) == 20)
                for number in range(5):
                    begin("calm", number)
                await until(lambda: len(router.proxy.waiting) == 25)
                for _ in range(26):
                    may.release()
            assert came[0] == "flood"
            assert came[1:11].count("calm") == 5
            assert came.count("flood") == 21

    run(test)


def test_in_a_full_queue_whoever_has_the_most_waiting_makes_room() -> None:
    async def test() -> None:
        came, may, worker = one_by_one()
        limits = replace(Limits(), per_worker=1, waiting=4)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            flood = [asyncio.ensure_future(asked(router, "flood")) for _ in range(5)]
            await until(lambda: len(router.proxy.waiting) == 4)
            calm = [asyncio.ensure_future(asked(router, "calm", host="127.0.0.2")) for _ in range(2)]
            await until(lambda: sum(one.done() for one in flood) == 2)
            refused = [one.result() for one in flood if one.done()]
            assert [(one.status, one.headers["retry-after"]) for one in refused] == [(429, "1")] * 2
            assert (await asked(router, "flood")).status == 429
            assert (await asked(router, "calm", host="127.0.0.2")).status == 429  # as many as the other has
            for _ in range(5):
                may.release()
            answers = await asyncio.gather(*flood, *calm)
            assert sorted(one.status for one in answers) == [200] * 5 + [429] * 2
            assert came.count("calm") == 2

    run(test)


@dataclass(eq=False)
class Somebody:
    """A waiter that notes what becomes of it."""

    caller: str
    lane: str
    placed: list["Somebody"]
    room: list[int]
    crowded: bool = False

    def place(self) -> bool:
        if not self.room[0]:
            return False
        self.room[0] -= 1
        self.placed.append(self)
        return True

    def crowded_out(self) -> None:
        self.crowded = True


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from("abc"), st.sampled_from("xy")),
        st.tuples(st.just("free"), st.integers(1, 3)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(STEPS)
def test_nobody_is_lost_or_placed_twice_and_turns_are_taken(steps: list[tuple[object, ...]]) -> None:
    waiting, placed, room = Waiting(8, clock=lambda: 0.0), list[Somebody](), [0]
    inside: list[Somebody] = []
    for step in steps:
        if step[0] == "join":
            one = Somebody(str(step[1]), str(step[2]), placed, room)
            if waiting.join(one):
                inside.append(one)
            else:
                counts = {name: sum(other.caller == name for other in inside) for name in "abc"}
                assert max(counts.values()) <= counts[one.caller] + 1
        elif step[0] == "free":
            room[0] = int(str(step[1]))
            before = len(placed)
            waiting.wake()
            for lane in "xy":
                served = [one.caller for one in placed[before:] if one.lane == lane]
                was = {one.caller for one in inside if one.lane == lane}
                first = served[: len(was)]
                assert len(set(first)) == len(first)  # nobody twice while another one had none
        elif inside:
            waiting.leave(inside[int(str(step[1])) % len(inside)])
            del inside[int(str(step[1])) % len(inside)]
        inside = [one for one in inside if not one.crowded and one not in placed]
        assert len(waiting) == len(inside) <= 8
        assert set(waiting.older_than(0.0)) == set(inside)
    assert len(placed) == len({id(one) for one in placed})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%lo", "fe80::2", True),
        ("", "", True),
    ],
)
def test_a_host_is_one_caller_however_many_addresses_it_has(one: str, other: str, *, same: bool) -> None:
    assert (network(one) == network(other)) is same
