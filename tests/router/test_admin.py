"""The router's own questions and orders, on a Unix socket."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.router.http.rig import CHAT, Client, ask, mocks, prompt, routing, run, until

from kvferry.errors import MisconfiguredError
from kvferry.router.admin import Admin
from kvferry.router.app import Router
from kvferry.router.orders import orders
from kvferry.router.reload import Plan


@asynccontextmanager
async def administered(router: Router, path: Path) -> AsyncIterator[list[str]]:
    """Orders are taken there. What is given counts reloads."""
    reloads: list[str] = []

    def reload() -> Plan:
        reloads.append("again")
        return router.reload(router.settings)

    admin = Admin(path, orders(router, reload))
    await admin.start()
    try:
        yield reloads
    finally:
        await admin.close()


async def order(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any]:
    """Status and document."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode())
    await asyncio.sleep(0)
    writer.write(data)
    one = Client(reader, writer)
    answer = await one.answer()
    one.close()
    return answer.status, answer.json()


def test_workers_come_and_go_at_run_time_and_requests_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "own" / "router.sock"

    async def test() -> None:
        async with mocks(2) as (a, b), routing(a.url) as router, administered(router, path) as reloads:
            answer = await ask(router, CHAT, prompt("hello " * 100))
            name = answer.headers["x-request-id"]
            _, told = await order(path, "GET", f"/explain?request={name}")
            assert told["worker"] == a.url
            assert (await order(path, "GET", "/explain?request=nobody"))[0] == 404
            assert (await order(path, "POST", "/workers", {"url": b.url}))[0] == 200
            _, workers = await order(path, "GET", "/workers")
            assert [worker["url"] for worker in workers] == [a.url, b.url]
            assert workers[0]["state"] == "up" and workers[0]["load"]["chosen"] == 1
            assert (await order(path, "DELETE", f"/workers?url={a.url}"))[0] == 200
            await until(lambda: len(router.roster) == 1)
            for _ in range(3):
                await ask(router, CHAT, prompt())
            assert (len(a.seen), len(b.seen)) == (1, 3)
            _, status = await order(path, "GET", "/status")
            assert status["proxy"]["requests"] == 4 and status["policy"] == "cost"
            code, said = await order(path, "POST", "/reload")
            assert code == 200 and reloads == ["again"]
            assert (said["added"], said["drains"]) == ([a.url], [b.url])  # as the settings have it

    run(test)
    assert not path.exists()


@pytest.mark.parametrize(
    ("status", "method", "target", "body"),
    [
        (404, "GET", "/", None),
        (404, "PUT", "/workers", {}),
        (400, "POST", "/workers", {"url": 3}),
        (400, "POST", "/workers", {"url": "gpu1:8000"}),
        (400, "POST", "/workers", {"url": "http://gpu1:8000", "weight": 1}),
        (413, "POST", "/workers", {"url": "x" * 70_000}),
        (400, "POST", "/workers", {"url": "http://gpu1:8000", "pool": "two words"}),
        (404, "DELETE", "/workers?url=http://gpu1:1", None),
        (400, "DELETE", "/workers?url=http://gpu1:1&grace_s=soon", None),
        (400, "DELETE", "/workers?url=http://gpu1:1&grace_s=nan", None),
    ],
)
def test_an_order_that_is_none_changes_nothing(
    status: int, method: str, target: str, body: object, tmp_path: Path
) -> None:
    path = tmp_path / "own" / "router.sock"

    async def test() -> None:
        async with mocks(1) as (a,), routing(a.url) as router, administered(router, path):
            found, told = await order(path, method, target, body)
            assert found == status and told["error"]["message"]
            assert len(router.roster) == 1

    run(test)


def test_nobody_but_the_router_s_user_can_open_it_and_one_router_has_it(tmp_path: Path) -> None:
    path = tmp_path / "own" / "router.sock"

    async def test() -> None:
        async with mocks(1) as (a,), routing(a.url) as router, administered(router, path):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
            with pytest.raises(MisconfiguredError, match=r"a router already runs.*--admin-socket"):
                Admin(path, {})

    run(test)
