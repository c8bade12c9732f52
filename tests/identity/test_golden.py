"""Names and headers never change, and follow from the specification alone."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from tests.identity.golden import FILE, build, write_model

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
BUILT = build()


@pytest.mark.parametrize("section", sorted(BUILT))
def test_what_is_computed_equals_the_golden_vectors(section: str) -> None:
    assert BUILT[section] == GOLDEN[section]


def test_the_golden_file_holds_nothing_that_is_no_longer_checked() -> None:
    assert sorted(GOLDEN) == sorted(BUILT)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_another_process_with_another_hash_seed_computes_the_same(hash_seed: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    printed = subprocess.run(
        [sys.executable, "-m", "tests.identity.golden"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout
    assert json.loads(printed) == GOLDEN


def _optional(value: bytes | None) -> bytes:
    return b"\0" if value is None else b"\1" + struct.pack("<I", len(value)) + value


@pytest.mark.parametrize("vector", GOLDEN["chains"], ids=lambda vector: vector["name"])
def test_a_chain_written_from_the_specification_gives_the_same_digests(vector: dict) -> None:
    key, size, extras = bytes.fromhex(vector["key"]), vector["chunk_tokens"], vector["extras"]
    adapter = None if extras["adapter"] is None else bytes.fromhex(extras["adapter"])
    salt = None if extras["cache_salt"] is None else extras["cache_salt"].encode()
    root = struct.pack("<I", 1) + bytes.fromhex(vector["namespace"]) + struct.pack("<I", size)
    root += _optional(adapter) + _optional(salt)
    parent = hashlib.blake2b(root, key=key, digest_size=32, person=b"kvferry-root").digest()
    items = sorted((i["offset"], i["length"], bytes.fromhex(i["digest"])) for i in extras["items"])
    digests = []
    for start in range(0, vector["tokens"] // size * size, size):
        covering = [i for i in items if i[0] < start + size and i[0] + i[1] > start]
        message = parent + struct.pack("<I", len(covering))
        for offset, length, digest in covering:
            message += struct.pack("<I", len(digest)) + digest + struct.pack("<qQ", offset - start, length)
        message += struct.pack("<I", size)
        message += b"".join(struct.pack("<I", (i * 7919 + 11) % 50257) for i in range(start, start + size))
        parent = hashlib.blake2b(message, key=key, digest_size=32, person=b"kvferry-chunk").digest()
        digests.append(parent.hex())
    assert digests == vector["digests"]


def _encode(value: object) -> bytes:
    match value:
        case str():
            return b"s" + struct.pack("<I", len(value.encode())) + value.encode()
        case bytes():
            return b"b" + struct.pack("<I", len(value)) + value
        case int():
            return b"i" + struct.pack("<Q", value)
        case float():
            return b"f" + struct.pack("<d", value)
        case list():
            return b"l" + struct.pack("<I", len(value)) + b"".join(map(_encode, value))
        case dict():
            fields = [
                struct.pack("<I", len(name)) + name.encode() + _encode(item)
                for name, item in sorted(value.items())
            ]
            return b"r" + struct.pack("<I", len(fields)) + b"".join(fields)
    raise AssertionError(value)


@pytest.mark.parametrize("vector", GOLDEN["namespaces"], ids=lambda vector: vector["spec"]["model"])
def test_a_fingerprint_written_from_the_specification_is_the_same(vector: dict) -> None:
    spec = dict(vector["spec"])
    for name in ("domain_key_id", "weights"):
        spec[name] = bytes.fromhex(spec[name])
    for name in ("kv_scales", "settings"):
        spec[name] = sorted(spec[name], key=lambda item: item["name"].encode())
    encoding = b"kvferry namespace\0" + struct.pack("<I", 1) + _encode(spec)
    assert encoding.hex() == vector["encoding"]
    expected = _tag(spec["domain"], spec["domain_key_id"])
    expected += hashlib.blake2b(encoding, digest_size=12, person=b"kvferry-ns").digest()
    assert expected.hex() == vector["fingerprint"]


def _tag(domain: str, key_id: bytes) -> bytes:
    return hashlib.blake2b(key_id + domain.encode(), digest_size=4, person=b"kvferry-tag").digest()


@pytest.mark.parametrize("vector", GOLDEN["tags"], ids=lambda vector: vector["tag"])
def test_a_tag_written_from_the_specification_is_the_same(vector: dict) -> None:
    assert _tag(vector["domain"], bytes.fromhex(vector["key_id"])).hex() == vector["tag"]


@pytest.mark.parametrize("vector", GOLDEN["headers"], ids=lambda vector: f"{vector['part_bytes']}")
def test_a_header_written_from_the_specification_is_the_same(vector: dict) -> None:
    sizes = GOLDEN["stripes"].get(str(vector["part_bytes"]), [vector["part_bytes"]])
    index = vector["stripe"]
    namespace, chunk, part = vector["key"]
    head = b"kvfy" + bytes([1, 0, 1, 0]) + bytes.fromhex(namespace) + bytes.fromhex(chunk)
    head += struct.pack(
        "<IIIIQQ", part, index, len(sizes), sizes[index], vector["part_bytes"], sum(sizes[:index])
    )
    head += bytes(range(200, 216)) + bytes(16)
    assert (head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))).hex() == vector["hex"]


def _sized64(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def test_a_weights_fingerprint_written_from_the_specification_is_the_same(tmp_path: Path) -> None:
    write_model(tmp_path)
    message = struct.pack("<I", 1)
    message += (
        _sized64(b"config") + _sized64(b"config.json") + _sized64((tmp_path / "config.json").read_bytes())
    )
    opaque = (tmp_path / "extra.bin").read_bytes()
    mib = 1 << 20
    message += _sized64(b"weights") + _sized64(b"extra.bin") + struct.pack("<Q", len(opaque))
    message += _sized64(opaque[:mib])
    for k in range(256):
        start = mib + (len(opaque) - 2 * mib) * k // 256
        message += _sized64(opaque[start : start + 4096])
    message += _sized64(opaque[-mib:])
    tensors = (tmp_path / "model.safetensors").read_bytes()
    data = 8 + int.from_bytes(tensors[:8], "little")
    message += _sized64(b"weights") + _sized64(b"model.safetensors") + struct.pack("<Q", len(tensors))
    message += _sized64(tensors[8:data]) + struct.pack("<QQ", 2, 1)
    middle = data + (10000 - 4096) // 2
    message += _sized64(tensors[middle : middle + 4096]) + _sized64(tensors[-3:])
    expected = hashlib.blake2b(message, digest_size=32, person=b"kvferry-weights").hexdigest()
    assert expected == GOLDEN["weights"]["model"]


def _floor_class(nbytes: int) -> int:
    return max(size for size in _classes() if size <= nbytes)


def _classes() -> list[int]:
    sizes = [
        base * quarter // 4 for power in range(6, 21) for base in [1 << power] for quarter in (4, 5, 6, 7)
    ]
    return [*sizes, 1 << 21, 5 << 19]


@pytest.mark.parametrize("part_bytes", sorted(map(int, GOLDEN["stripes"])))
def test_a_cut_written_from_the_specification_is_the_same(part_bytes: int) -> None:
    sizes: list[int] = [part_bytes] if part_bytes <= 128 << 10 else []
    while sum(sizes) < part_bytes:
        remaining = part_bytes - sum(sizes)
        fitting = [size for size in _classes() if size >= remaining + 192]
        if fitting and fitting[0] - remaining <= part_bytes // 40:
            sizes.append(remaining)
        else:
            sizes.append(_floor_class(remaining + 192) - 192)
    assert sizes == GOLDEN["stripes"][str(part_bytes)]
