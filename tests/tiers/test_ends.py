"""Every item ends once, in time, as what happened to it: seen with a server that does as it is told."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.servers import Cluster, Server

from kvferry.addresses import Address
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.stripes import part_checksums, stripe_plan
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.tier_contract import Results, fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem
from kvferry.tiers.valkey import scout
from kvferry.tiers.valkey.greeting import ServerReport
from kvferry.tiers.valkey.jobs import Cause, Job, Operation, Part, Verb, stripe_key
from kvferry.tiers.valkey.lanes import Lane
from kvferry.tiers.valkey.router import Router
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.topology import SlotRange
from kvferry.tiers.valkey.url import ValkeyUrl

FAR_S = 60.0
Serve = Callable[[socket.socket], None]


class Puppet:
    """A listening socket; each connection is served by ``serve`` on a thread of its own."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def tier(self, **values: object) -> ValkeyTier:
        """A started tier of this server."""
        settings = ValkeySettings(ValkeyUrl((self.address,)), **values)  # type: ignore[arg-type]
        tier = ValkeyTier(settings, tls=None, report=ServerReport())
        tier._router.start()
        return tier

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(connection)

    def close(self) -> None:
        """Close every socket and join the threads."""
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._open):
            sock.close()


@contextlib.contextmanager
def puppet(serve: Serve, **values: object) -> Iterator[ValkeyTier]:
    """A tier of a puppet; both are closed."""
    made = Puppet(serve)
    tier = made.tier(**values)
    try:
        yield tier
    finally:
        tier.close()
        made.close()


def greet(connection: socket.socket) -> None:
    """Take CLIENT SETNAME and PING."""
    seen = b""
    while b"PING\r\n" not in seen:
        seen += received(connection)
    connection.sendall(b"+OK\r\n+PONG\r\n")


def received(connection: socket.socket) -> bytes:
    """More bytes; OSError at the end."""
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionResetError
    return data


def test_an_idle_server_that_misses_one_question_is_not_taken_for_dead() -> None:
    deaf, answered = threading.Lock(), threading.Event()

    def serve(connection: socket.socket) -> None:
        greet(connection)
        while True:
            if received(connection) and deaf.acquire(blocking=False):
                continue  # the first question stays without an answer
            connection.sendall(b"+PONG\r\n")
            answered.set()

    with puppet(serve, idle_s=0.05) as tier:
        assert answered.wait(WAIT_S)
        (shard,) = tier._router.shards
        assert not shard.is_open
        assert shard._breaker.opened == 0


def test_a_short_deadline_behind_a_long_one_ends_only_its_own_part() -> None:
    first, go, over, deaf = threading.Event(), threading.Event(), threading.Event(), threading.Lock()

    def serve(connection: socket.socket) -> None:
        greet(connection)
        while True:
            data = received(connection)
            if b"TOUCH" in data:
                connection.sendall(b":0\r\n" * data.count(b"TOUCH"))
            elif b"SET" in data and deaf.acquire(blocking=False):
                first.set()
                go.wait()
                connection.sendall(b"+OK\r\n")
                over.wait()  # takes no more bytes and answers nothing
                return
            elif b"SET" in data:
                connection.sendall(b"+OK\r\n")

    with puppet(serve, stall_s=FAR_S) as tier:
        refs = [some_ref(1000, 1), some_ref(1000, 2), some_ref(32 << 20, 3)]
        results = [Results(1) for _ in refs]
        try:
            for ref, result, deadline_s in zip(refs, results, (FAR_S, FAR_S, 2.0), strict=True):
                data = some_bytes(ref.nbytes, 1)
                item = StoreItem(ref, data, part_checksums(data))
                tier.store([item], deadline=time.monotonic() + deadline_s, done=result.done)
                assert first.wait(WAIT_S)
            waiting = tier._router.shards[0]._queues[Lane.STORE].jobs
            eventually(lambda: len(waiting) == 1 + len(stripe_plan(refs[2].nbytes)), "all queued")
            go.set()  # now the second and stripes of the third are sent in one go
            assert results[2].wait() == [Outcome.LATE]
            assert results[1].wait() != [Outcome.LATE]  # a server so silent may have been shut out by now
        finally:
            go.set()
            over.set()


def test_a_greeting_that_trickles_is_the_servers_fault_not_the_deadlines() -> None:
    def serve(connection: socket.socket) -> None:
        for byte in b"+O" + b"K" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with puppet(serve, connect_s=0.2, stall_s=FAR_S) as tier:
        outcome = fetch_all(tier, [some_ref(1000, 1)])[0][0].outcome
        assert outcome in (Outcome.FAILED, Outcome.REFUSED)
        assert tier.statistics().failed.get("late") is None


@pytest.mark.parametrize("wrong", [b"+OK\r\n", b"$1\r\nx\r\n", b"*0\r\n"])
def test_an_answer_of_another_kind_is_never_taken_for_presence(wrong: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        greet(connection)
        while True:
            connection.sendall(wrong * received(connection).count(b"TOUCH"))

    with puppet(serve) as tier:
        assert probe_all(tier, [some_ref(1000, 1)]) == [Outcome.FAILED]


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example", ".example", "no\0host"])
def test_a_host_that_cannot_be_a_name_is_one_line(host: str) -> None:
    with pytest.raises(MisconfiguredError) as caught:
        ValkeyTier.connect(ValkeySettings(ValkeyUrl((Address(host, 6379),))))
    assert "\n" not in str(caught.value)


def test_seeds_that_hang_do_not_use_up_the_time_of_one_that_answers(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        seeds = [Address("127.0.0.1", sock.getsockname()[1]) for sock in silent]
        tier = ValkeyTier.connect(ValkeySettings(ValkeyUrl((*seeds, server.address))))
        tier.close()


def test_a_resolver_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    real = socket.getaddrinfo

    def hangs(host: str, port: int, **options: int) -> object:
        if not options.get("flags"):
            answers.wait()
        return real(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    settings = ValkeySettings(ValkeyUrl((Address("valkey.example", 6379),)), connect_s=0.2)
    before = frozenset(threading.enumerate())
    try:
        with pytest.raises(MisconfiguredError):
            ValkeyTier.connect(settings)
        tier = ValkeyTier(settings, tls=None, report=ServerReport())
        tier._router.start()
        assert fetch_all(tier, [some_ref(1000, 1)], deadline_s=0.1)[0][0].outcome is Outcome.LATE
        assert fetch_all(tier, [some_ref(1000, 1)])[0][0].outcome in (Outcome.FAILED, Outcome.REFUSED)
        tier.close()
        waiting = [
            thread
            for thread in frozenset(threading.enumerate()) - before
            if thread.name.startswith("kvferry-resolve")
        ]
        assert len(waiting) == 1  # one question, however often it is asked
    finally:
        answers.set()
    for thread in waiting:
        thread.join()


def test_a_failed_store_leaves_what_another_node_stored(server: Server) -> None:
    ref = some_ref(4 << 20, 1)
    data = some_bytes(ref.nbytes, 1)
    ours, theirs, forbidden = (stripe_key(ref.key, s.index) for s in stripe_plan(ref.nbytes))
    keys = f"%RW~{ours.decode()} %RW~{theirs.decode()} %R~{forbidden.decode()}".split()
    server.ask("ACL", "SETUSER", "partly", "on", ">pw", *keys, "+@all")
    server.ask("SET", theirs, "stored by another node")
    tier = ValkeyTier.connect(ValkeySettings(ValkeyUrl((server.address,), user="partly", password="pw")))
    try:
        assert store_all(tier, [(ref, data)]) == [Outcome.REFUSED]
        assert probe_all(tier, [ref]) == [Outcome.MISS]  # behind the removal, on the same connection
        assert server.key_names() == [theirs]
    finally:
        tier.close()
        server.ask("ACL", "DELUSER", "partly")


def test_a_callback_that_fails_costs_nobody_else_its_answer(server: Server, tier: ValkeyTier) -> None:
    refs = [some_ref(1000, seed) for seed in range(6)]
    store_all(tier, [(ref, some_bytes(1000, 1)) for ref in refs])
    for deadline_s, outcome in ((WAIT_S, Outcome.OK), (-1.0, Outcome.LATE)):  # by replies, and all at once
        results = Results(5)

        def done(index: int, result: FetchResult, results: Results = results) -> None:
            if index == 0:
                raise ValueError("a defect of the caller")
            results.done(index - 1, result)

        items = [FetchItem(ref, memoryview(bytearray(1000))) for ref in refs]
        tier.fetch(items, deadline=time.monotonic() + deadline_s, done=done)
        assert {result.outcome for result in results.wait()} == {outcome}
    assert fetch_all(tier, refs)[0][0].outcome is Outcome.OK
    assert "defect" not in tier.statistics().failed


def test_checksums_of_another_number_than_stripes_are_a_defect_of_the_caller(tier: ValkeyTier) -> None:
    ref = some_ref(4 << 20, 1)
    data = some_bytes(ref.nbytes, 1)
    for checksums in (part_checksums(data)[:1], (*part_checksums(data), bytes(16))):
        with pytest.raises(BrokenError):
            tier.store([StoreItem(ref, data, checksums)], deadline=0.0, done=lambda *_: None)


def test_parked_jobs_keep_their_deadline_while_the_map_is_asked_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    asked = threading.Event()

    def hangs(*_: object, **__: object) -> tuple[SlotRange, ...]:
        asked.set()
        answers.wait()
        return ()

    tier = ValkeyTier.connect(cluster.settings())
    ref = some_ref(1000, 1)
    job = waiting_job(tier, deadline_s=0.2)
    monkeypatch.setattr(scout, "ask_topology", hangs)
    try:
        tier._router.retry(job)
        assert asked.wait(WAIT_S)
        eventually(lambda: job.part.lost, "the deadline")
        assert job.part.cause is Cause.LATE
        assert probe_all(tier, [ref]) == [Outcome.MISS]  # nobody else is held up
    finally:
        answers.set()
        tier.close()


def test_a_job_parked_while_the_tier_closes_ends(cluster: Cluster) -> None:
    router = Router(cluster.settings(), tls=None, topology=(SlotRange(0, 16383, cluster.servers[0].address),))
    tier = ValkeyTier(cluster.settings(), tls=None, report=ServerReport())
    jobs = [waiting_job(tier, deadline_s=FAR_S) for _ in range(3)]
    router.retry(jobs[0])
    router.begin_refresh()
    router.retry(jobs[1])
    router.close()
    router.end_refresh(())
    router.retry(jobs[2])
    assert [job.part.cause for job in jobs] == [Cause.CLOSED] * 3


def waiting_job(tier: ValkeyTier, *, deadline_s: float) -> Job:
    """A question that is not queued anywhere."""
    ref = some_ref(1000, 7)
    part = Part(Operation(time.monotonic() + deadline_s), 0, ref, jobs=1, report=lambda _: None)
    return Job(part, stripe_plan(ref.nbytes)[0], Verb.TOUCH, payload=None)
