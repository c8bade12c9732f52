"""TLS on both sides: towards clients, and towards workers."""

import asyncio
import shutil
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from tests.router.http.rig import CHAT, Client, ask, prompt, routing, run, scripted, until
from tests.router.http.test_failing import WHOLE, saying
from tests.tiers.authority import Authority

from kvferry.router import app
from kvferry.router.app import Router
from kvferry.router.http.limits import Limits


async def connected(router: Router, context: ssl.SSLContext) -> Client:
    address = router.address
    return Client(*await asyncio.open_connection(address.host, address.port, ssl=context))


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


def test_clients_are_served_over_tls_and_plain_ones_are_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("router")

    async def test() -> None:
        async with scripted(saying(WHOLE)) as url, routing(url, tls_cert=own.cert, tls_key=own.key) as router:
            one = await connected(router, trusting(authority))
            one.post(CHAT, prompt())
            assert (await one.answer()).body == b"ok"
            one.close()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ask(router, CHAT, prompt())

    run(test)


def test_who_says_nothing_in_place_of_a_handshake_is_left_in_time(tmp_path: Path) -> None:
    own = Authority(tmp_path).issue("router")

    async def test() -> None:
        limits = replace(Limits(), head_s=0.1)
        async with routing("http://127.0.0.1:1", limits=limits, tls_cert=own.cert, tls_key=own.key) as router:
            one = await Client.to(router.address)
            assert await one.rest() == b""
            one.close()

    run(test)


def test_clients_without_a_certificate_are_turned_away_where_one_is_wanted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, theirs = authority.issue("router"), authority.issue("client")

    async def test() -> None:
        files = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": authority.ca}
        async with scripted(saying(WHOLE)) as url, routing(url, **files) as router:
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                one = await connected(router, trusting(authority))
                one.post(CHAT, prompt())
                await one.answer()
            context = trusting(authority)
            context.load_cert_chain(theirs.cert, theirs.key)
            one = await connected(router, context)
            one.post(CHAT, prompt())
            assert (await one.answer()).body == b"ok"
            one.close()

    run(test)


def test_a_replaced_certificate_is_shown_to_the_next_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.01)
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    own, new = before.issue("router"), after.issue("new")

    async def test() -> None:
        async with (
            scripted(saying(WHOLE, WHOLE)) as url,
            routing(url, tls_cert=own.cert, tls_key=own.key) as router,
        ):
            kept = await connected(router, trusting(before))
            server = router._server
            shutil.copy(new.key, own.key)
            shutil.copy(new.cert, own.cert)
            await until(lambda: router._server is not server)
            one = await connected(router, trusting(after))
            for each in (one, kept):
                each.post(CHAT, prompt())
                assert (await each.answer()).body == b"ok"
                each.close()

    run(test)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_worker_at_https_is_verified(trusted: bool, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    theirs, ours = authority.issue("worker"), authority.issue("router")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(theirs.cert, theirs.key)
    context.load_verify_locations(cafile=str(authority.ca))
    context.verify_mode = ssl.CERT_REQUIRED

    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await saying(WHOLE)(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        files = {
            "worker_tls_ca": authority.ca if trusted else stranger.ca,
            "worker_tls_cert": ours.cert,
            "worker_tls_key": ours.key,
        }
        try:
            async with routing(url, **files) as router:
                answer = await ask(router, CHAT, prompt())
                assert (answer.status, answer.body == b"ok") == ((200, True) if trusted else (502, False))
        finally:
            server.close()

    run(test)
