"""Workers are looked after: real sockets, workers that stop, hang, restart and talk nonsense."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvferry.errors import CorruptError, RetryError
from kvferry.router import attending
from kvferry.router.asking import NobodyThereError, get
from kvferry.router.attending import Attendant
from kvferry.router.health import Change, Failure, Health, Limits, State
from kvferry.router.roster import Roster, Served, Worker
from kvferry.testing.worker import MockWorker

QUICK = Limits(interval_s=0.05, timeout_s=0.2, min_wait_s=0.05, max_wait_s=0.1)
PATIENCE_S = 30.0


class Ward:
    """A roster, who looks after it, and what became known."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.left: list[str] = []
        self.changes: list[Change] = []
        self.in_flight: dict[str, int] = {}
        self.roster = Roster(in_flight=lambda url: self.in_flight.get(url, 0), limits=QUICK)
        self.heard: dict[str, float] = {}
        self.attendant = Attendant(
            self.roster,
            note=self.note,
            removed=self.left.append,
            heard_at=lambda url: self.heard.get(url, 0.0),
        )

    def note(self, url: str, event: Callable[[Health], Change]) -> None:
        change = self.roster.note(url, event)
        if change is not None and change.lost:
            self.lost.append(url)
        if change is not None and change.before is not change.after:
            self.changes.append(change)

    def failed(self, url: str, what: Failure) -> None:
        now = asyncio.get_running_loop().time()
        self.note(url, lambda health: health.failed(what, now))

    def add(self, url: str) -> Worker:
        worker = self.roster.add(url, now=asyncio.get_running_loop().time())
        self.attendant.attend(worker)
        return worker

    def state(self, url: str) -> State:
        worker = self.roster.get(url)
        return State.REMOVED if worker is None else worker.state


@asynccontextmanager
async def _ward() -> AsyncIterator[Ward]:
    ward = Ward()
    try:
        yield ward
    finally:
        await ward.attendant.close()
        assert ward.attendant.defects == 0


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def answering(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A server with these raw answers by path, which may change meanwhile; without one it is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.get(line.split()[1].decode(), b""))
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def ok(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


def test_a_worker_that_stops_is_down_and_lost_and_one_that_is_back_is_used() -> None:
    async def test() -> None:
        async with MockWorker() as worker, _ward() as ward:
            ward.add(worker.url)
            await until(lambda: ward.roster.served("", "mock") is Served.YES)
            worker.stop()
            await until(lambda: ward.state(worker.url) is State.DOWN)
            assert ward.roster.candidates("", "mock") == () and ward.lost == [worker.url]
            await worker.listen()
            await until(lambda: ward.state(worker.url) is State.UP)
            assert ward.roster.candidates("", "mock") == (worker.url,) and ward.lost == [worker.url]

    run(test)


def test_a_deaf_worker_is_down_and_holds_up_nobody_else() -> None:
    async def test() -> None:
        async with MockWorker() as deaf, MockWorker() as other, _ward() as ward:
            deaf.behave(deaf=True)
            ward.add(deaf.url)
            ward.add(other.url)
            await until(lambda: ward.state(deaf.url) is State.DOWN)
            assert ward.state(other.url) is State.UP
            deaf.behave(deaf=False)
            await until(lambda: ward.state(deaf.url) is State.UP)

    run(test)


def test_a_worker_too_busy_for_probes_is_up_as_long_as_it_answers_requests() -> None:
    async def test() -> None:
        async with answering({"/v1/models": ok(b'{"data":[]}')}) as url, _ward() as ward:
            ward.heard[url] = float("inf")
            worker = ward.add(url)
            await until(lambda: worker.models is not None)
            for _ in range(5):
                due = worker.health.next_probe_at()
                await until(lambda due=due: worker.health.next_probe_at() != due)
            assert not ward.changes
            ward.heard[url] = 0.0
            await until(lambda: worker.state is State.DOWN)

    run(test)


@pytest.mark.parametrize(("status", "state"), [(503, State.DOWN), (500, State.DOWN)])
def test_a_worker_that_says_it_is_ill_is_down(status: int, state: State) -> None:
    async def test() -> None:
        async with MockWorker() as worker, _ward() as ward:
            worker.behave(health=status)
            ward.add(worker.url)
            await until(lambda: ward.state(worker.url) is state)

    run(test)


def test_a_server_without_a_health_page_is_no_dead_worker() -> None:
    async def test() -> None:
        answers = {"/health": ok(b"", 404), "/v1/models": ok(b'{"data":[{"id":"m"}]}')}
        async with answering(answers) as url, _ward() as ward:
            ward.add(url)
            await until(lambda: ward.roster.served("", "m") is Served.YES)
            assert ward.state(url) is State.UP and not ward.changes

    run(test)


def test_a_worker_that_was_away_has_lost_what_it_held_only_if_its_process_is_another() -> None:
    async def test() -> None:
        began = b"# TYPE x gauge\nprocess_start_time_seconds %d.5e0\n"
        answers = {"/health": ok(b""), "/metrics": ok(began % 7), "/v1/models": ok(b'{"data":[]}')}
        async with answering(answers) as url, _ward() as ward:
            worker = ward.add(url)
            await until(lambda: not worker.health.boot_wanted)
            for process, lost in ((7, 0), (8, 1)):
                answers["/health"] = ok(b"", 503)
                await until(lambda: worker.state is State.DOWN)
                answers["/metrics"] = ok(began % process)
                answers["/health"] = ok(b"")
                await until(lambda: worker.state is State.UP and not worker.health.boot_wanted)
                assert len(ward.lost) == lost

    run(test)


def test_models_are_asked_again_soon_when_somebody_wants_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        answers = {"/health": ok(b""), "/v1/models": ok(b'{"data":[{"id":"m"}]}')}
        async with answering(answers) as url, _ward() as ward:
            ward.add(url)
            await until(lambda: ward.roster.served("", "m") is Served.YES)
            answers["/v1/models"] = ok(b'{"data":[{"id":"m"},{"id":"adapter"}]}')
            ward.attendant.look_again("")
            await until(lambda: ward.roster.served("", "adapter") is Served.YES)
            answers["/v1/models"] = b"nonsense\r\n\r\n"
            ward.attendant.look_again("")
            assert ward.roster.served("", "adapter") is Served.YES  # what it does not say stays

    monkeypatch.setattr(attending, "MODELS_EVERY_S", 3600.0)
    monkeypatch.setattr(attending, "MODELS_GAP_S", 0.01)
    run(test)


def test_what_requests_meet_is_acted_on_before_any_probe() -> None:
    async def test() -> None:
        async with MockWorker() as worker, _ward() as ward:
            ward.add(worker.url)
            ward.failed(worker.url, Failure.REFUSED)
            assert ward.state(worker.url) is State.DOWN and ward.lost == [worker.url]
            await until(lambda: ward.state(worker.url) is State.UP)
            for _ in range(QUICK.failures):
                ward.failed(worker.url, Failure.ERROR)
            assert ward.state(worker.url) is State.DOWN
            await until(lambda: ward.state(worker.url) is State.TRIAL)
            ward.note(worker.url, Health.succeeded)
            assert ward.state(worker.url) is State.UP
            ward.failed("http://nobody", Failure.ERROR)
            ward.note("http://nobody", Health.succeeded)

    run(test)


def test_a_worker_leaves_when_its_requests_have_ended_or_its_time_is_up() -> None:
    async def test() -> None:
        async with MockWorker() as first, MockWorker() as second, _ward() as ward:
            for worker in (first, second):
                ward.add(worker.url)
                ward.in_flight[worker.url] = 1
            assert ward.attendant.drain(first.url, grace_s=3600) and ward.attendant.drain(
                second.url, grace_s=0
            )
            await until(lambda: ward.state(second.url) is State.REMOVED)
            assert ward.state(first.url) is State.DRAINING
            again = ward.add(first.url)
            assert ward.state(first.url) is State.UP
            assert ward.attendant.drain(first.url, grace_s=3600) and again.state is State.DRAINING
            ward.in_flight[first.url] = 0
            await until(lambda: ward.state(first.url) is State.REMOVED)
            assert not ward.attendant.drain(first.url, grace_s=1)
            assert ward.left == [second.url, first.url]

    run(test)


def test_answers_are_read_in_any_framing() -> None:
    async def test() -> None:
        answers = {
            "/chunked": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
            "/closed": b"HTTP/1.0 200 X\r\n\r\nabc",
            "/sized": ok(b"abc"),
        }
        async with answering(answers) as url:
            for path in answers:
                answer = await get(url, path, timeout_s=PATIENCE_S)
                assert (answer.status, answer.body) == (200, b"abc")

    run(test)


def test_what_is_no_answer_is_an_error_of_ours() -> None:
    async def test() -> None:
        answers = {
            "/garbage": b"SMTP ready\r\n",
            "/large": ok(b"x" * 100),
            "/half": ok(b"abc")[:-1],
            "/part": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        }
        async with answering(answers) as url:
            with pytest.raises(CorruptError, match="no HTTP"):
                await get(url, "/garbage", timeout_s=PATIENCE_S)
            with pytest.raises(CorruptError, match="over 10 bytes"):
                await get(url, "/large", timeout_s=PATIENCE_S, limit=10)
            for path in ("/nothing", "/half", "/part"):
                with pytest.raises(RetryError, match="without a whole answer"):
                    await get(url, path, timeout_s=PATIENCE_S)
        with pytest.raises(NobodyThereError, match="nobody listens"):
            await get(url, "/", timeout_s=PATIENCE_S)
        with pytest.raises(RetryError):
            await get("http://no-such-host.invalid", "/", timeout_s=PATIENCE_S)

    run(test)
