"""One trust domain can neither read, name, change, nor learn the presence of what another one stored."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.domains import BLUE, CHUNK_TOKENS, GREEN, Domain, engine_of, grant, host, names
from tests.node.fleet import PART_BYTES, WAIT_S, Engine, NodeProcess, at_rest, eventually
from tests.servers import Server, running_cluster, running_server

from kvferry.client.admin import AdminClient
from kvferry.client.messages import LoadEnd, NamespaceInfo, Reason, Tier
from kvferry.client.worker import WorkerClient
from kvferry.identity.chunks import ChunkChain
from kvferry.node.node import Node
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import Reply
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until

COUNT = 4
FLOOD_PROMPTS = 15


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """With two users, each limited to its domain by the line that ``kvferry flags valkey`` prints."""
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        for domain in (BLUE, GREEN):
            grant(server, domain.acl())
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.ask("FLUSHALL")
    return shared_server


def _stored(domain: Domain, node: Node, stack: ExitStack) -> list[bytes]:
    """Chunks that an engine of the domain has put through this node into Valkey."""
    engine = engine_of(domain, node, stack)
    chunks = domain.digests(COUNT)
    assert engine.save(chunks) == COUNT
    eventually(lambda: node.statistics().counters.stored_parts == COUNT, "write-back")
    return chunks


def test_a_domains_nodes_store_and_load_as_its_own_user(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    for domain in (BLUE, GREEN):
        here = host(tmp_path / f"{domain.name}-1", domain.url(server), stack)
        chunks = _stored(domain, here, stack)
        there = host(tmp_path / f"{domain.name}-2", domain.url(server), stack)
        engine = engine_of(domain, there, stack)
        answer = engine.lookup(chunks)
        assert answer.tiers == (Tier.VALKEY,) * COUNT
        assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, COUNT)]
        for node in (here, there):
            at_rest(node)
            assert not node.statistics().counters.store_failed
    assert len(server.key_names()) == 2 * len(names(server, BLUE, BLUE.digests(COUNT)))


def test_a_domains_user_serves_at_a_cluster(tmp_path: Path, stack: ExitStack) -> None:
    cluster = stack.enter_context(running_cluster())
    for server in cluster.servers:  # users are each server's own
        grant(server, BLUE.acl())
    here = host(tmp_path / "here", BLUE.url(*cluster.servers[:1]), stack)
    chunks = _stored(BLUE, here, stack)
    assert all(names(server, BLUE, chunks) for server in cluster.servers)
    engine = engine_of(BLUE, host(tmp_path / "there", BLUE.url(*cluster.servers[1:2]), stack), stack)
    answer = engine.lookup(chunks)
    assert answer.tiers == (Tier.VALKEY,) * COUNT
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, COUNT)]


def test_the_same_prompt_has_other_names_in_another_domain(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    _stored(BLUE, host(tmp_path / "blue", BLUE.url(server), stack), stack)
    node = host(tmp_path / "green", GREEN.url(server), stack)
    engine = engine_of(GREEN, node, stack)
    chunks = GREEN.digests(COUNT)
    assert not set(chunks) & set(BLUE.digests(COUNT))
    chain = ChunkChain(GREEN.key, BLUE.namespace.namespace, chunk_tokens=CHUNK_TOKENS)
    forged = chain.extend(range(COUNT * CHUNK_TOKENS))
    assert not set(forged) & set(BLUE.digests(COUNT))  # knowing the namespace does not help without the key
    answer = engine.lookup(chunks)
    assert (answer.count, answer.reason) == (0, Reason.ABSENT)


def test_a_forged_namespace_reaches_nothing_of_another_domain(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    chunks = _stored(BLUE, host(tmp_path / "blue", BLUE.url(server), stack), stack)
    before = sorted(server.key_names())
    node = host(tmp_path / "green", GREEN.url(server), stack)
    engine = engine_of(GREEN, node, stack, namespace=BLUE.namespace.namespace)
    # It is given even the digests, which it could not compute; and what is there answers as what is not.
    present = engine.lookup(chunks, "present")
    absent = engine.lookup(BLUE.digests(COUNT, seed=9), "absent")
    assert (present.count, present.reason) == (absent.count, absent.reason) == (0, Reason.TIER_DOWN)
    assert engine.save(chunks) == COUNT  # into its own node's memory
    eventually(lambda: node.statistics().counters.store_failed["refused"] == COUNT, "stores refused")
    assert sorted(server.key_names()) == before
    assert node.statistics().counters.missed_chunks == 0
    assert node.statistics().tier.failed["not_allowed"] >= 3 * COUNT  # type: ignore[union-attr]


def test_bytes_moved_under_another_domains_name_are_refused(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    chunks = _stored(BLUE, host(tmp_path / "blue", BLUE.url(server), stack), stack)
    mine = GREEN.digests(COUNT)
    for chunk, other in zip(chunks, mine, strict=True):
        for name in names(server, BLUE, [chunk]):
            stripe = name.rpartition(":")[2]
            moved = f"kvf1:{GREEN.namespace.namespace.hex()}:{other.hex()}:0:{stripe}"
            assert server.ask("COPY", name, moved) == 1
    assert len(names(server, GREEN, mine)) == len(names(server, BLUE, chunks)) > 0
    node = host(tmp_path / "green", GREEN.url(server), stack)
    engine = engine_of(GREEN, node, stack)
    answer = engine.lookup(mine)
    assert engine.load(answer, mine) == [LoadEnd(Reason.CORRUPT, 0)]
    assert node.statistics().counters.failed["corrupt"] > 0
    assert names(server, GREEN, mine[:1]) == []  # removed, and nothing of the other domain with it
    assert len(names(server, BLUE, chunks)) > 0
    at_rest(node)


def _as(domain: Domain, server: Server, *words: str) -> Reply:
    """One command by the domain's user."""
    deadline = time.monotonic() + WAIT_S
    settings = ValkeySettings(domain.url(server))
    connection = Connection.open(server.address, settings, tls=None, deadline=deadline)
    try:
        return connection.request(*[word.encode() for word in words], patience=Until(deadline))
    finally:
        connection.close()


READS = [
    "GET K",
    "GETRANGE K 0 9",
    "STRLEN K",
    "MGET K",
    "GETEX K",
    "DUMP K",
    "SUBSTR K 0 9",
    "EVAL return 0",
]
PRESENCE = ["TOUCH K", "EXISTS K", "TTL K", "TYPE K", "OBJECT ENCODING K", "OBJECT FREQ K", "MEMORY USAGE K"]
PRESENCE += ["SCAN 0", "KEYS kvf1:*", "RANDOMKEY", "DBSIZE", "CLUSTER KEYSLOT K", "WATCH K", "MONITOR"]
CHANGES = ["SET K x", "SETNX K x", "UNLINK K", "DEL K", "GETDEL K", "EXPIRE K 1", "APPEND K x", "RENAME K L"]
CHANGES += [
    "COPY K L",
    "RESTORE K 0 x",
    "FLUSHALL",
    "FLUSHDB",
    "SWAPDB 0 1",
    "CONFIG SET maxmemory 1",
    "SHUTDOWN",
]
POWERS = [
    "CONFIG GET *",
    "ACL LIST",
    "ACL SETUSER green allkeys",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
]
POWERS += [
    "SUBSCRIBE c",
    "PUBLISH c x",
    "MODULE LIST",
    "REPLICAOF a 1",
    "SLOWLOG GET",
    "LATENCY RESET",
    "SELECT 1",
]


@pytest.mark.parametrize("line", [*READS, *PRESENCE, *CHANGES, *POWERS])
def test_a_domains_user_can_do_nothing_to_what_another_domain_stored(
    shared_server: Server, line: str
) -> None:
    key = f"kvf1:{BLUE.namespace.namespace.hex()}:{BLUE.digests(1)[0].hex()}:0:0"
    absent = f"kvf1:{BLUE.namespace.namespace.hex()}:{BLUE.digests(1, seed=7)[0].hex()}:0:0"
    shared_server.ask("SET", key, "value")
    replies = [
        _as(GREEN, shared_server, *[{"K": name, "L": key + "x"}.get(word, word) for word in line.split(" ")])
        for name in (key, absent)
    ]
    assert {getattr(reply, "code", reply) for reply in replies} == {"NOPERM"}
    present, missing = (str(reply).replace(key, "K").replace(absent, "K") for reply in replies)
    assert present == missing  # so that the refusal itself tells nothing
    assert shared_server.ask("GET", key) == b"value"


def test_another_domain_is_refused_at_a_node_with_one_line(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    node = host(tmp_path / "blue", BLUE.url(server), stack)
    engine_of(BLUE, node, stack)
    other_key = Domain("blue", GREEN.key)
    for domain, said in ((GREEN, "'green'"), (other_key, "key for the trust domain 'blue'")):
        worker = WorkerClient(
            socket_path=node.settings.socket_path, engine="x", rank=0, namespace=domain.namespace
        )
        stack.callback(worker.close)
        eventually(lambda worker=worker: worker.last_error, "the refusal")
        assert said in worker.last_error
        assert "\n" not in worker.last_error
        assert worker.mapping is None


def test_a_node_stays_with_its_domain_when_the_last_engine_has_gone(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    node = host(tmp_path / "blue", BLUE.url(server), stack)
    engine_of(BLUE, node, stack).close()
    eventually(lambda: not node.statistics().engines, "nobody is connected")
    forged = NamespaceInfo(GREEN.namespace.namespace, (PART_BYTES,), CHUNK_TOKENS, "blue", "")
    worker = WorkerClient(socket_path=node.settings.socket_path, engine="x", rank=0, namespace=forged)
    stack.callback(worker.close)
    eventually(lambda: worker.last_error, "the refusal")
    assert worker.mapping is None


def _process(path: Path, domain: Domain, server: Server, stack: ExitStack, *extra: str) -> NodeProcess:
    """``kvferry node`` of a domain, as its user at Valkey."""
    path.mkdir(mode=0o700)
    secret = path / "password"
    secret.write_text(f"password-of-{domain.name}")
    secret.chmod(0o600)
    url = f"valkey://{domain.name}@127.0.0.1:{server.port}"
    arguments = ["--valkey", url, "--valkey-password-file", str(secret), "--domain", domain.name, *extra]
    process = NodeProcess(path / "node.sock", extra=arguments)
    stack.callback(process.close)
    return process


def _flood(domain: Domain, node: NodeProcess, stack: ExitStack) -> None:
    """Stores several times what the server has room for."""
    engine = Engine(node.socket_path, domain.namespace, name="flood")
    stack.callback(engine.close)
    engine.connected()
    with AdminClient(node.socket_path) as admin:
        for seed in range(FLOOD_PROMPTS):
            assert engine.save(domain.digests(10, seed=seed)) == 10
            eventually(lambda: not admin.status()["writeback_backlog_bytes"], "written back")
        assert admin.status()["counters"]["stored_parts"] == 10 * FLOOD_PROMPTS


@pytest.mark.parametrize(("quota", "unharmed"), [("32MiB", True), (None, False)])
def test_a_domain_that_floods_takes_its_own_quota_only(
    tmp_path: Path, stack: ExitStack, quota: str | None, unharmed: bool
) -> None:
    """Without a quota the server's eviction takes from everybody, or this test could not fail."""
    server = stack.enter_context(running_server("--maxmemory", "96mb", "--maxmemory-policy", "allkeys-lru"))
    for domain in (BLUE, GREEN):
        grant(server, domain.acl())
    chunks = BLUE.digests(10)
    first = _process(tmp_path / "blue-1", BLUE, server, stack)
    engine = Engine(first.socket_path, BLUE.namespace)
    stack.callback(engine.close)
    assert engine.connected().save(chunks) == 10
    eventually(lambda: len(names(server, BLUE, chunks)) == 20, "written back")  # two stripes each
    limits = [] if quota is None else ["--valkey-quota", quota]
    _flood(GREEN, _process(tmp_path / "green", GREEN, server, stack, *limits), stack)
    answer = engine.lookup(chunks)
    assert answer.tiers == (Tier.MEMORY,) * 10  # its own node's memory was out of reach in any case
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 10)]
    engine.close()
    assert first.close() == 0
    second = _process(tmp_path / "blue-2", BLUE, server, stack)  # has only what Valkey holds
    engine = Engine(second.socket_path, BLUE.namespace)
    stack.callback(engine.close)
    answer = engine.connected().lookup(chunks)
    assert (answer.tiers == (Tier.VALKEY,) * 10) is unharmed
    if unharmed:
        assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, 10)]
        kept = [key for key in server.key_names() if key.startswith(f"kvf1:{GREEN.tag.hex()}".encode())]
        assert 0 < len(kept) <= 2 * 32


def test_another_domain_fills_its_own_nodes_memory_alone(
    tmp_path: Path, server: Server, stack: ExitStack
) -> None:
    blue = host(tmp_path / "blue", BLUE.url(server), stack)
    chunks = _stored(BLUE, blue, stack)
    green = host(tmp_path / "green", GREEN.url(server), stack)
    flood = engine_of(GREEN, green, stack)
    for seed in range(10):
        flood.save(GREEN.digests(30, seed=seed))
    assert green.statistics().catalogue.evicted_parts > 0
    held = blue.statistics().catalogue
    assert (held.ready_parts, held.evicted_parts) == (COUNT, 0)
    engine = engine_of(BLUE, blue, stack)
    answer = engine.lookup(chunks)
    assert answer.tiers == (Tier.MEMORY,) * COUNT
    assert engine.load(answer, chunks) == [LoadEnd(Reason.COMPLETE, COUNT)]
