"""What is encrypted comes back only whole, under its own name and key; keys show nowhere."""

import builtins
import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from tests.identity.golden import FILE

from kvferry.errors import BrokenError, CorruptError, MisconfiguredError
from kvferry.identity.header import (
    HEADER_BYTES,
    pack_header,
    pack_sealed_header,
    sealed_name,
    verify_header,
    verify_sealed_header,
)
from kvferry.identity.names import PartKey
from kvferry.identity.sealing import MAX_KEYS, KeyRing, SealingKey
from kvferry.identity.stripes import Stripe, stripe_plan

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))["sealed"]
KEY = SealingKey(bytes(range(32)))
NAME = PartKey(bytes(range(16)), bytes(range(32)), 5)
PART_BYTES = 300
STRIPE = stripe_plan(PART_BYTES)[0]
NONCE = bytes(range(12))
PAYLOAD = bytes(range(100)) * 3


def sealed(key: SealingKey = KEY, name: PartKey = NAME, nonce: bytes = NONCE) -> tuple[bytes, bytes]:
    """Header and encrypted payload."""
    named = sealed_name(name, part_bytes=PART_BYTES, stripe=STRIPE, stripe_count=1)
    context = key.sealing(named, nonce)
    encrypted = context.update(PAYLOAD) + context.finalize()
    return pack_sealed_header(named, key_id=key.key_id, nonce=nonce, tag=context.tag), encrypted


def opened(header: bytes, encrypted: bytes, key: SealingKey = KEY, name: PartKey = NAME) -> bytes:
    """The payload, as a reader gets it who asked for ``name`` under ``key``."""
    found = verify_sealed_header(header, name, part_bytes=PART_BYTES, stripe=STRIPE, key_id=key.key_id)
    opening, plain = key.opening(found), memoryview(bytearray(len(encrypted)))
    for start in range(0, len(encrypted), 64):
        piece = memoryview(encrypted)[start : start + 64]
        opening.piece(piece, plain[start : start + piece.nbytes])
    opening.finish()
    return bytes(plain)


def test_what_was_sealed_opens_piece_by_piece() -> None:
    header, encrypted = sealed()
    assert len(header) == HEADER_BYTES
    assert len(encrypted) == len(PAYLOAD)
    assert opened(header, encrypted) == PAYLOAD


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["part_bytes"])
def test_a_value_written_from_the_specification_is_the_same(vector: dict[str, Any]) -> None:
    key, nonce, payload, header, encrypted = (
        bytes.fromhex(vector[field])
        for field in ("encryption_key", "nonce", "payload", "header", "encrypted")
    )
    name = header[:88]
    key_id = hashlib.blake2b(b"", key=key, digest_size=4, person=b"kvferry-seal-id").digest()
    own_key = hashlib.blake2b(name, key=key, digest_size=32, person=b"kvferry-seal-key").digest()
    both = AESGCM(own_key).encrypt(nonce, payload, name + key_id + nonce)
    assert (encrypted, header[88:104], header[104:120]) == (both[:-16], both[-16:], key_id + nonce)
    part_bytes, plan = vector["part_bytes"], stripe_plan(vector["part_bytes"])
    wanted = PartKey(bytes.fromhex(vector["key"][0]), bytes.fromhex(vector["key"][1]), vector["key"][2])
    stripe = plan[vector["stripe"]]
    plain = pack_header(
        wanted, part_bytes=part_bytes, stripe=stripe, stripe_count=len(plan), checksum=bytes(16)
    )
    assert name[:6] + b"\2" + name[7:] == plain[:6] + b"\2" + plain[7:88]


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_every_flipped_bit_of_the_header_is_detected(position: int) -> None:
    header, encrypted = sealed()
    for bit in range(8):
        damaged = bytearray(header)
        damaged[position] ^= 1 << bit
        with pytest.raises(CorruptError):
            opened(bytes(damaged), encrypted)


@given(position=st.integers(0, 8 * len(PAYLOAD) - 1))
def test_every_flipped_bit_of_the_payload_is_detected(position: int) -> None:
    header, encrypted = sealed()
    damaged = bytearray(encrypted)
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(CorruptError, match="tag"):
        opened(header, bytes(damaged))


@pytest.mark.parametrize("position", [*range(4, 88), *range(104, 120)])
def test_a_forger_who_also_mends_the_check_is_detected(position: int) -> None:
    """Without the key nobody can say anything else of these bytes: the tag covers the header too."""
    header, encrypted = sealed()
    damaged = bytearray(header)
    damaged[position] ^= 1
    mended = pack_sealed_header(
        bytes(damaged[:88]),
        key_id=bytes(damaged[104:108]),
        nonce=bytes(damaged[108:120]),
        tag=bytes(damaged[88:104]),
    )
    with pytest.raises(CorruptError):
        opened(mended, encrypted)


@pytest.mark.parametrize(
    "other",
    [NAME._replace(namespace=bytes(16)), NAME._replace(chunk=bytes(32)), NAME._replace(part=6)],
    ids=["namespace", "chunk", "part"],
)
def test_a_value_renamed_in_its_header_does_not_open(other: PartKey) -> None:
    header, encrypted = sealed()
    named = sealed_name(other, part_bytes=PART_BYTES, stripe=STRIPE, stripe_count=1)
    forged = pack_sealed_header(named, key_id=KEY.key_id, nonce=NONCE, tag=header[88:104])
    with pytest.raises(CorruptError, match="tag"):
        opened(forged, encrypted, name=other)


def test_another_key_opens_nothing_even_with_its_own_id_in_the_header() -> None:
    header, encrypted = sealed()
    other = SealingKey(bytes(32))
    with pytest.raises(CorruptError, match="cipher"):
        opened(header, encrypted, key=other)
    forged = pack_sealed_header(header[:88], key_id=other.key_id, nonce=NONCE, tag=header[88:104])
    with pytest.raises(CorruptError, match="tag"):
        opened(forged, encrypted, key=other)


def test_plain_and_encrypted_headers_are_never_taken_for_each_other() -> None:
    plain = pack_header(NAME, part_bytes=PART_BYTES, stripe=STRIPE, stripe_count=1, checksum=bytes(16))
    with pytest.raises(CorruptError, match="protection"):
        verify_sealed_header(plain, NAME, part_bytes=PART_BYTES, stripe=STRIPE, key_id=KEY.key_id)
    with pytest.raises(CorruptError, match="protection"):
        verify_header(sealed()[0], NAME, part_bytes=PART_BYTES, stripe=STRIPE)


def test_equal_payloads_look_different_under_every_name_nonce_and_key() -> None:
    found = [
        sealed()[1],
        sealed(nonce=bytes(12))[1],
        sealed(name=NAME._replace(part=6))[1],
        sealed(key=SealingKey(bytes(32)))[1],
    ]
    assert len({bytes(each) for each in found}) == len(found)


def test_a_header_with_fields_of_a_wrong_length_is_never_written() -> None:
    named = sealed_name(NAME, part_bytes=PART_BYTES, stripe=STRIPE, stripe_count=1)
    good = {"key_id": bytes(4), "nonce": bytes(12), "tag": bytes(16)}
    for name, changed in ((named[1:], {}), (named, {"nonce": b""}), (named, {"tag": b""})):
        with pytest.raises(BrokenError):
            pack_sealed_header(name, **(good | changed))
    for key, stripe in ((NAME._replace(chunk=b""), STRIPE), (NAME, Stripe(1, 0, 1))):
        with pytest.raises(BrokenError):
            sealed_name(key, part_bytes=PART_BYTES, stripe=stripe, stripe_count=1)


# ---- key files


def key_file(tmp_path: Path, text: str, *, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


A, B = "ab" * 32, "Cd" * 32


def test_the_keys_of_a_file_come_in_order(tmp_path: Path) -> None:
    ring = KeyRing.load(key_file(tmp_path, f"{A}\n\n  {B}  \r\n"))
    expected = [SealingKey(bytes.fromhex(A)).key_id, SealingKey(bytes.fromhex(B)).key_id]
    assert [key.key_id for key in ring.keys] == expected


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "0 encryption keys"),
        ("\n\n", 0o600, "0 encryption keys"),
        (f"{A}\n{B[:-1]}\n", 0o600, "line 2"),
        (f"{A}\n{B}00\n", 0o600, "line 2"),
        (f"{A[:40]} {A[40:]}\n", 0o600, "line 1"),
        (f"{A[:-1]}g\n", 0o600, "line 1"),
        (f"{A[:-1]}é\n", 0o600, "line 1"),
        (f"{A}\n{A.upper()}\n", 0o600, "same id"),
        ("".join(f"{number:064x}\n" for number in range(MAX_KEYS + 1)), 0o600, f"1 to {MAX_KEYS}"),
        (f"{A}\n" * 100, 0o600, "longer than"),
        (f"{A}\n", 0o604, "chmod 600"),
        (f"{A}\n", 0o620, "chmod 600"),
    ],
)
def test_a_wrong_key_file_is_one_line_that_shows_no_key(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    path = key_file(tmp_path, text, mode=mode)
    with pytest.raises(MisconfiguredError, match=words) as caught:
        KeyRing.load(path)
    error: BaseException | None = caught.value
    while error is not None:
        assert "\n" not in str(error)
        assert not any(secret in str(error).lower() for secret in (A[:12], B[:12].lower()))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert str(path) in str(caught.value)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="nowhere"):
        KeyRing.load(tmp_path / "nowhere")


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MisconfiguredError, match=r"pip install cryptography"):
        KeyRing.load(key_file(tmp_path, A))


def test_a_key_shows_nowhere_and_is_not_serialised() -> None:
    secret = os.urandom(32)
    key = SealingKey(secret)
    ring = KeyRing([key])
    for shown in (repr(key), str(key), repr(ring), f"{ring}"):
        assert key.key_id.hex() in shown
        assert secret.hex()[:12] not in shown
        assert repr(secret)[2:12] not in shown
    for thing in (key, ring):
        with pytest.raises(TypeError):
            pickle.dumps(thing)
    assert secret[:4] != key.key_id


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_has_256_bits(length: int) -> None:
    with pytest.raises(MisconfiguredError, match="32 bytes"):
        SealingKey(bytes(length))
