"""Every decoder of foreign bytes: good inputs to damage, and what must hold whatever comes in.

A subject's ``feed`` returns when the input was accepted, or refused in the documented way; else it raises.
"""

import json
import math
import os
import struct
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from tests.fuzz import feeds, keepers

from kvferry.addresses import Address
from kvferry.config import load_node_settings
from kvferry.engines.vllm.settings import parse_settings
from kvferry.errors import CorruptError, KvferryError, MisconfiguredError, RefusedError
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.identity.domain import DomainKey
from kvferry.identity.header import HEADER_BYTES, pack_header, verify_header
from kvferry.identity.names import PartKey
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import part_checksums, stripe_plan
from kvferry.identity.weights import model_fingerprint
from kvferry.node import wire
from kvferry.node.framing import decode_from_client, decode_from_node, encode, hello_mismatch
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.protection import Checksums, Protection, Received, Sealed, ValueName
from kvferry.tiers.valkey.resp import Reader, ServerError
from kvferry.tiers.valkey.stream import DroppedError, Patience, Stream, Until
from kvferry.tiers.valkey.topology import parse_redirect, parse_slots
from kvferry.tiers.valkey.url import parse_url

NAMESPACE, CHUNK = bytes(range(16)), bytes(range(32))
KEY = PartKey(NAMESPACE, CHUNK, 3)
ASKED = Address("127.0.0.1", 6379)
PATIENCE = Until(math.inf)


@dataclass(frozen=True, slots=True)
class Subject:
    """cost: how many cheap inputs take as long as one of this. memory_bytes: what one may allocate."""

    name: str
    seeds: Sequence[bytes]
    feed: Callable[[bytes], None]
    cost: int = 1
    memory_bytes: int = 1 << 20


class Bytes(Stream):
    """A stream that delivers these bytes in pieces, then ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._piece = 1 + len(data) % 7 * 100
        self._tls = False
        self.progress_at = time.monotonic()

    def receive(self, view: memoryview, patience: Patience, flags: int = 0) -> int:
        count = min(view.nbytes, self._piece, len(self._data) - self._at)
        if not count:
            raise DroppedError("the server closed the connection")
        view[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count


def require(holds: bool, what: str) -> None:
    """A property that failed."""
    if not holds:
        raise AssertionError(what)


# ---- frames --------------------------------------------------------------------------------------

FROM_CLIENT: tuple[wire.Message, ...] = (
    wire.Hello(protocol=wire.PROTOCOL, version="1", role=wire.Role.WORKER, engine="e", token="t" * 40),
    wire.Attach(namespace=NAMESPACE, part_bytes=(1000, 0, 5), chunk_tokens=16, domain="d", label="l"),
    wire.Came(request_id="r", namespace=bytes(16), chunks=bytes(64), prompt_tokens=300, engine_tokens=128),
    wire.Lookup(
        ticket=1,
        request_id="r",
        namespace=NAMESPACE,
        chunks=CHUNK * 3,
        first_chunk=1,
        prompt_tokens=99,
        prefill=wire.Prefill(0.1, 0.2, 0.3),
        queued_s=1.5,
    ),
    wire.Attach(namespace=NAMESPACE, part_bytes=(9, 5), chunk_tokens=16, domain="d", trailing=(0, 2)),
    wire.Match(ticket=1, namespace=NAMESPACE, chunks=CHUNK * 3, max_wait_s=0.2),
    wire.Join(load_id=1, epoch=2, part=3),
    wire.Copied(load_id=1, part=0, chunks=(1, 2, 3)),
    wire.Reserve(ticket=1, namespace=NAMESPACE, part=0, prefix=CHUNK, chunks=CHUNK * 2),
    wire.Commit(namespace=NAMESPACE, part=0, filled=(wire.Filled(CHUNK, bytes(16)),)),
    wire.Report(request_id="r", reason="complete", load_s=0.5),
    wire.DropQuery(tier="memory"),
    wire.Ping(),
)
FROM_NODE: tuple[wire.Message, ...] = (
    wire.Welcome(protocol=wire.PROTOCOL, version="1", epoch=7, pid=1, pool_bytes=1 << 30),
    wire.Refusal(message="no"),
    wire.Attached(namespace=NAMESPACE),
    wire.Answer(
        ticket=1,
        request_id="r",
        epoch=7,
        load_id=9,
        first_chunk=0,
        count=1,
        tiers=b"\0",
        ready=(wire.Place(0, 0, 4096, bytes(16)),),
        deadline_s=1.0,
        stall_s=0.5,
        reason=wire.Reason.COMPLETE,
    ),
    wire.PartsReady(load_id=9, places=(wire.Place(1, 0, 8192, bytes(32)),)),
    wire.Matched(ticket=1, count=3, reason=wire.Reason.ABSENT),
    wire.Reserved(ticket=1, places=(wire.ReservedPlace(wire.ReserveOutcome.RESERVED, 4096),)),
    wire.Document(json=b"{}"),
)


def _frames(data: bytes) -> list[bytes]:
    buffer, payloads = FrameBuffer(limit=wire.MAX_HELLO_BYTES), []
    for at in range(0, len(data), 50):
        payloads += buffer.feed(data[at : at + 50])
        require(len(buffer._data) <= wire.MAX_HELLO_BYTES + 54, "more is held than a frame and a read")
    return payloads


def _from_client(data: bytes) -> None:
    try:
        for payload in _frames(data):
            hello_mismatch(payload, version="1")
            message = decode_from_client(payload)
            if isinstance(message, wire.Lookup):
                times = (message.queued_s, message.max_wait_s, *msgspec.structs.astuple(message.prefill))
                require(all(0 <= value <= 86400 for value in times), f"times out of bounds: {times}")
            encode(message)
    except RefusedError:
        pass


def _from_node(data: bytes) -> None:
    try:
        for payload in _frames(data):
            refusal_text(payload)
            encode(decode_from_node(payload))
    except RefusedError:
        pass


# ---- Valkey --------------------------------------------------------------------------------------

PAYLOAD = bytes(range(256)) * 4
STRIPE = stripe_plan(len(PAYLOAD))[0]
(CHECKSUM,) = part_checksums(memoryview(PAYLOAD))
HEADER = pack_header(KEY, part_bytes=len(PAYLOAD), stripe=STRIPE, stripe_count=1, checksum=CHECKSUM)
SLOTS = (
    b"*2\r\n*4\r\n:0\r\n:8191\r\n*4\r\n$9\r\n127.0.0.1\r\n:7000\r\n$3\r\nabc\r\n*0\r\n*3\r\n$9\r\n127.0.0.1\r\n:7003\r\n"
    b"$3\r\ndef\r\n*3\r\n:8192\r\n:16383\r\n*2\r\n$-1\r\n:7001\r\n"
)
REPLIES = (
    b"+OK\r\n",
    b"-OOM command not allowed\r\n",
    b":12\r\n",
    b"$5\r\nhello\r\n",
    b"$-1\r\n",
    b"*2\r\n:1\r\n$1\r\na\r\n",
    b"*-1\r\n",
    b"_\r\n",
    b"$16000000\r\nabc",
    b"*60000\r\n$15000000\r\nabc",
    b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*0\r\n",
    SLOTS,
)


def _replies(data: bytes) -> None:
    reader = Reader(Bytes(data))
    try:
        while True:
            reader.reply(PATIENCE)
    except DroppedError:
        pass


def _sound(address: Address) -> None:
    require(0 < address.port <= 65535, f"a port that no socket takes: {address.port}")


def _map(data: bytes) -> None:
    try:
        reply = Reader(Bytes(data)).reply(PATIENCE)
        for slots in parse_slots(reply, asked=ASKED):
            require(0 <= slots.first <= slots.last < 16384, "slots out of range")
            _sound(slots.address)
    except DroppedError:
        pass


def _redirect(data: bytes) -> None:
    try:
        reply = Reader(Bytes(data)).reply(PATIENCE)
    except DroppedError:
        return
    if isinstance(reply, ServerError) and (target := parse_redirect(reply, asked=ASKED)) is not None:
        _sound(target)


PLAIN, SEALED = Checksums(), Sealed(KeyRing((SealingKey(bytes(32)),)))


def _stored(protection: Protection) -> bytes:
    """The reply to a GET of the value."""
    name = ValueName(KEY, len(PAYLOAD), STRIPE)
    value = protection.guard().sending(name, payload=memoryview(PAYLOAD), checksum=CHECKSUM)
    return b"$1152\r\n" + value.header + bytes(value.payload) + b"\r\n"


def _value(protection: Protection) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        target = bytearray(len(PAYLOAD))
        connection = Connection(Bytes(data), protection.guard())
        name = ValueName(KEY, len(PAYLOAD), STRIPE)
        try:
            found = connection.value(name, memoryview(target), PATIENCE)
        except (CorruptError, DroppedError):
            return
        if isinstance(found, Received) and found.intact:
            require(target == PAYLOAD, "other bytes were taken for the value")

    return feed


def _header(data: bytes) -> None:
    try:
        verify_header(data, KEY, part_bytes=len(PAYLOAD), stripe=STRIPE)
    except CorruptError:
        return
    require(data[:HEADER_BYTES] == HEADER, "another header was accepted")


# ---- configuration -------------------------------------------------------------------------------

TOML = (
    b'pool = "64MiB"\nvalkey = "valkeys://kv@h.example:6379?ca=/a.pem"\ndeadline_cap_ms = 5000\n',
    b'socket = "/run/kvferry/node.sock"\ndomain = "payments"\nvalkey_password_file = "/nowhere"\n',
    b"pool = 67108864\nmetrics_port = 9471\n",
    b"pool = %b\n" % (b"9" * 400),
)
URLS = (
    b"valkey://h:6379",
    b"valkeys://user@h.example:6380?ca=/a&cert=/b&key=/c",
    b"redis://:secret@[::1]:7000,h2:7001",
    b"unix:///run/valkey.sock",
    b"rediss://u:p%40w@10.0.0.1",
)
EXTRAS = (
    b'{"socket": "/run/k.sock", "chunk_tokens": 256, "deadline_cap_ms": 1000, "domain": "d"}',
    b'{"domain_key_file": "/k", "token_file": "/t", "model_name": "m", "revision": "abc", "group": "root"}',
)


def _one_line(error: KvferryError) -> None:
    require(
        "\n" not in str(error) and 0 < len(str(error)) < 10_000,
        f"not one line of bounded length: {str(error)[:300]!r}",
    )


class _Scratch:
    """One file that is written anew for each input."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, data: bytes) -> Path:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, data)
        os.close(descriptor)
        return self.path


def _settings_file(scratch: _Scratch) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        try:
            load_node_settings(environ={}, config_path=scratch.write(data))
        except MisconfiguredError as error:
            _one_line(error)

    return feed


def _environment(data: bytes) -> None:
    names = ("KVFERRY_POOL", "KVFERRY_VALKEY", "KVFERRY_DEADLINE_CAP_MS", "KVFERRY_DOMAIN", "KVFERRY_TOKEN")
    values = os.fsdecode(data.replace(b"\0", b"")).split("\n")
    try:
        load_node_settings(environ=dict(zip(names, values, strict=False)))
    except MisconfiguredError as error:
        _one_line(error)


def _url(data: bytes) -> None:
    text = os.fsdecode(data)
    try:
        url = parse_url(text)
    except MisconfiguredError as error:
        _one_line(error)
        return
    for seed in url.seeds:
        require(bool(seed.host) and 0 <= seed.port <= 65535, f"no address: {seed!r}")
    require(repr(url) == repr(replace(url, password="another")), "a password in repr")


def _engine_settings(data: bytes) -> None:
    try:
        extra = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(extra, dict):
        return
    try:
        parse_settings(extra, environ={})
    except MisconfiguredError as error:
        _one_line(error)


def _key_file(scratch: _Scratch) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        try:
            DomainKey.from_file(scratch.write(data))
        except MisconfiguredError as error:
            _one_line(error)
            require(data.hex()[:16] not in str(error) or len(data) < 8, "a key in an error")

    return feed


def _weights(directory: Path) -> Callable[[bytes], None]:
    (directory / "config.json").write_text("{}")
    scratch = _Scratch(directory / "model.safetensors")

    def feed(data: bytes) -> None:
        scratch.write(data)
        try:
            model_fingerprint(directory)
        except KvferryError as error:
            _one_line(error)

    return feed


def _safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def subjects(directory: Path) -> list[Subject]:
    """All of them. directory: for those that read files; a new empty one."""
    (directory / "model").mkdir()
    for text in TOML:
        tomllib.loads(text.decode())  # good before it is damaged
    keeper_toml = _Scratch(directory / "keeper.toml")
    return [
        Subject("frames from clients", [encode(message) for message in FROM_CLIENT], _from_client),
        Subject("frames from nodes", [encode(message) for message in FROM_NODE], _from_node),
        Subject("frames to keepers", keepers.TO_KEEPER, keepers.to_keeper),
        Subject("frames from keepers", keepers.FROM_KEEPER, keepers.from_keeper),
        Subject("frames from routers", feeds.FROM_ROUTER, feeds.from_router),
        Subject("frames of feeds", feeds.TO_ROUTER, feeds.to_router, cost=2),
        Subject("KV events of vLLM", feeds.BATCHES, feeds.kv_events, cost=2),
        Subject("addresses of keepers", keepers.ADDRESSES, keepers.addresses, cost=2),
        Subject("words of keepers", keepers.WORDS, keepers.words, cost=2),
        Subject(
            "settings of keepers",
            keepers.TOML,
            lambda data: keepers.settings(keeper_toml.write(data)),
            cost=40,
            memory_bytes=4 << 20,
        ),
        Subject("replies of Valkey", REPLIES, _replies),
        Subject("values of Valkey", [_stored(PLAIN), b"$-1\r\n", b"-ERR x\r\n"], _value(PLAIN)),
        Subject("encrypted values", [_stored(SEALED), _stored(PLAIN)], _value(SEALED), cost=4),
        Subject("maps of a Cluster", [SLOTS], _map),
        Subject(
            "redirections",
            [
                b"-MOVED 3999 127.0.0.1:6381\r\n",
                b"-ASK 1 [::1]:6381\r\n",
                b"-MOVED 1 :7\r\n",
                b"-MOVED 1 h:%b\r\n" % (b"1" * 5000),
            ],
            _redirect,
        ),
        Subject("headers of parts", [HEADER], _header),
        Subject(
            "settings files",
            TOML,
            _settings_file(_Scratch(directory / "node.toml")),
            cost=40,
            memory_bytes=4 << 20,
        ),
        Subject(
            "environments",
            [b"64MiB\nvalkey://h\n500\nd\ntoken", b"1GB\nunix:///s", b"1GB\n\n\x1f500\n"],
            _environment,
            cost=3,
        ),
        Subject("URLs", URLS, _url),
        Subject("engine settings", EXTRAS, _engine_settings, cost=3),
        Subject(
            "key files",
            [b"ab" * 32 + b"\n", bytes(range(200, 232))],
            _key_file(_Scratch(directory / "key")),
            cost=4,
        ),
        Subject("weights", [_safetensors()], _weights(directory / "model"), cost=20, memory_bytes=128 << 20),
    ]
