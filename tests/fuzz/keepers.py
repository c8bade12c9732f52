"""What a keeper and its peers read of each other, and where keepers are said to be."""

from collections.abc import Sequence

from kvferry.errors import MisconfiguredError, RefusedError
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper import wire
from kvferry.keeper.address import parse_keepers, parse_listen
from kvferry.keeper.framing import decode_from_keeper, decode_to_keeper, encode, hello_mismatch
from kvferry.keeper.settings import load_keeper_settings, parse_key_ids, parse_names
from kvferry.values import parse_age

KEYS = [PartKey(bytes(range(16)), bytes(range(n, n + 32)), n) for n in range(3)]
(PARTS,) = wire.Parts.of([PartRef(key, 1000 + key.part) for key in KEYS])

_TO_KEEPER: Sequence[wire.Message] = (
    wire.Hello(protocol=wire.PROTOCOL, version="1", token="t" * 40, node="n", key_ids=b"abcdefgh"),
    wire.Stored(parts=PARTS, positions=(0, 1, 2), likely=b"\0\1\0"),
    wire.Used(parts=PARTS),
    wire.Locate(ticket=1, parts=PARTS, deadline_s=0.5),
    wire.Stage(ticket=2, parts=PARTS, deadline_s=5.0),
    wire.Cancel(ticket=2),
    wire.Remove(parts=PARTS),
    wire.Ping(),
    wire.StatusQuery(ticket=3),
    wire.Drop(ticket=4, tier=wire.DropTier.DISK, namespace=bytes(16), older_than_s=60.0),
    wire.Drop(ticket=5, tier=wire.DropTier.OBJECTS, parts=PARTS),
    wire.DropEnded(namespace=bytes(16)),
    wire.MostReused(ticket=6, within_s=86400.0, max_bytes=1 << 40),
)
_FROM_KEEPER: Sequence[wire.Message] = (
    wire.Welcome(protocol=wire.PROTOCOL, version="1", name="k"),
    wire.Refusal(message="no"),
    wire.Located(ticket=1, where=b"\0\1\2\3"),
    wire.Staged(ticket=2, indexes=(0, 2), outcomes=b"\0\5"),
    wire.Pong(),
    wire.Document(ticket=3, json=b"{}"),
    wire.Reused(ticket=6, parts=PARTS, last=True),
)
TO_KEEPER = [encode(message) for message in _TO_KEEPER]
FROM_KEEPER = [encode(message) for message in _FROM_KEEPER]
ADDRESSES = (b"store1,store2:9472", b"[::1]:9472", b"10.0.0.5", b"::1", b"a.b-c.example:1")
WORDS = (b"store1,store2", b"5f0c31aa,00112233", b"30d", b"1.5h", b"90")
TOML = (
    b'valkey = "valkey://h"\ndisk = "/d"\ndisk_size = "1TiB"\nobjects = "file:///o"\nobjects_age = "30d"\n',
    b'valkey = "valkeys://u@h?ca=/a"\nobjects = "s3://b/p"\nname = "a"\nkeepers = "a,b"\n',
    b'valkey = "valkey://h"\nobjects = "s3://b"\nencryption_key_ids = "5f0c31aa"\nlisten = "127.0.0.1:0"\n',
    b'valkey = "valkey://h"\nobjects = "s3://b"\nobjects_size = 1000000000\ntls_cert = "/c"\n',
)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _frames(data: bytes) -> list[bytes]:
    buffer, payloads = FrameBuffer(limit=wire.MAX_HELLO_BYTES), []
    for at in range(0, len(data), 50):
        payloads += buffer.feed(data[at : at + 50])
    return payloads


def to_keeper(data: bytes) -> None:
    try:
        for payload in _frames(data):
            hello_mismatch(payload, version="1")
            message = decode_to_keeper(payload)
            if isinstance(message, wire.Stored | wire.Locate | wire.Stage | wire.Used | wire.Remove):
                refs = message.parts.refs()
                _require(all(ref.nbytes > 0 and len(ref.key.chunk) == 32 for ref in refs), "a bad part")
                _require(len(refs) == len(message.parts), "lengths differ")
            if isinstance(message, wire.Locate | wire.Stage):
                _require(0 <= message.deadline_s <= 86400, f"a time out of bounds: {message.deadline_s}")
            encode(message)
    except RefusedError:
        pass


def from_keeper(data: bytes) -> None:
    try:
        for payload in _frames(data):
            refusal_text(payload)
            message = decode_from_keeper(payload)
            if isinstance(message, wire.Located):
                _require(all(wire.Where(byte) is not None for byte in message.where), "a place that is none")
            if isinstance(message, wire.Staged):
                outcomes = [wire.OUTCOMES[byte] for byte in message.outcomes]
                _require(len(outcomes) == len(message.indexes), "lengths differ")
            encode(message)
    except RefusedError:
        pass


def _one_line(error: MisconfiguredError) -> None:
    _require("\n" not in str(error) and 0 < len(str(error)) < 10_000, f"not one line: {str(error)[:300]!r}")


def addresses(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for parse in (parse_keepers, lambda text: (parse_listen(text),)):
        try:
            for address in parse(text):
                _require(bool(address.host) and 0 <= address.port <= 65535, f"no address: {address!r}")
        except MisconfiguredError as error:
            _one_line(error)


def words(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for parse in (parse_names, parse_key_ids, parse_age):
        try:
            parse(text)
        except MisconfiguredError as error:
            _one_line(error)


def settings(path: object) -> None:
    try:
        load_keeper_settings(environ={}, config_path=str(path))
    except MisconfiguredError as error:
        _one_line(error)
