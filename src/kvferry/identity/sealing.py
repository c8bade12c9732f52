"""AES-256-GCM over stored stripes: keys, and what is done with them. ``docs/spec/part-header.md``.

A key is never used as it is: each stripe has a key of its own, derived from the one in the file and the
stripe's name. So random nonces are drawn anew for each name, and their limit of 2^32 values per key
counts per stripe, not per fleet (``docs/decisions/encryption.md``).

Needs the ``cryptography`` package, which is loaded only where keys are.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvferry.errors import CorruptError, MisconfiguredError
from kvferry.identity.header import KEY_ID_BYTES, SealedHeader
from kvferry.identity.regular import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

KEY_BYTES = 32
MAX_KEYS = 4
"""The current one and those before it: each is one more name to ask for where nothing is stored."""
MAX_FILE_BYTES = 4096
_ID_PERSON = b"kvferry-seal-id"
_KEY_PERSON = b"kvferry-seal-key"
_HINT = "make a key with: openssl rand -hex 32"


class SealingKey:
    """One 256-bit key. ``key_id``: 4 bytes that follow from it and do not give it away."""

    __slots__ = ("_key", "key_id")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise MisconfiguredError(f"an encryption key has {KEY_BYTES} bytes, not {len(key)}: {_HINT}")
        self._key = bytes(key)
        self.key_id = hashlib.blake2b(key=self._key, digest_size=KEY_ID_BYTES, person=_ID_PERSON).digest()

    def _stripe_key(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, key=self._key, digest_size=KEY_BYTES, person=_KEY_PERSON).digest()

    def sealing(self, name: bytes, nonce: bytes) -> "AEADEncryptionContext":
        """Encrypts the payload of the stripe with that ``header.sealed_name``; then has its ``tag``."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        context = Cipher(algorithms.AES256(self._stripe_key(name)), modes.GCM(nonce)).encryptor()
        context.authenticate_additional_data(name + self.key_id + nonce)
        return context

    def opening(self, header: SealedHeader) -> "Opening":
        """Decrypts the payload behind that header."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        mode = modes.GCM(header.nonce)
        context = Cipher(algorithms.AES256(self._stripe_key(header.name)), mode).decryptor()
        context.authenticate_additional_data(header.associated)
        return Opening(context, header.tag)

    def __repr__(self) -> str:
        return f"SealingKey(id={self.key_id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an encryption key is not serialised: load it where it is needed")


class Opening:
    """A payload being decrypted, piece by piece. Nothing of it may be used before ``finish`` returned."""

    __slots__ = ("_context", "_tag")

    def __init__(self, context: "AEADDecryptionContext", tag: bytes) -> None:
        self._context = context
        self._tag = tag

    def piece(self, encrypted: memoryview, into: memoryview) -> None:
        """Decrypt the next bytes into memory of the same length that does not overlap."""
        self._context.update_into(encrypted, into)

    def finish(self) -> None:
        """CorruptError unless header and payload are what was encrypted under this key."""
        from cryptography.exceptions import InvalidTag

        try:
            self._context.finalize_with_tag(self._tag)
        except InvalidTag:
            raise CorruptError("stored value: its tag does not match (damaged or forged)") from None


class KeyRing:
    """The keys of a node. The first encrypts, all decrypt."""

    __slots__ = ("keys",)

    def __init__(self, keys: Sequence[SealingKey]) -> None:
        """Raises MisconfiguredError without keys, with too many, with equal ones, or without the package."""
        if not 1 <= len(keys) <= MAX_KEYS:
            raise MisconfiguredError(f"{len(keys)} encryption keys: give 1 to {MAX_KEYS}: {_HINT}")
        if len({key.key_id for key in keys}) != len(keys):
            raise MisconfiguredError(f"two encryption keys have the same id: remove one, or {_HINT}")
        _must_have_package()
        self.keys = tuple(keys)

    @classmethod
    def load(cls, path: Path | str) -> "KeyRing":
        """From a file with 64 hexadecimal digits a line; blank lines do not count.

        Others may neither read nor change it. Raises MisconfiguredError, one line without any digit of a key.
        """
        try:
            with open_regular(path) as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise MisconfiguredError(f"encryption key file {path}: {error.strerror}: {_HINT}") from error
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise MisconfiguredError(f"encryption key file {path} is open to others: chmod 600 {path}")
        if len(content) > MAX_FILE_BYTES:
            raise MisconfiguredError(f"encryption key file {path} is longer than {MAX_FILE_BYTES} bytes")
        try:
            return cls(list(_keys(content)))
        except MisconfiguredError as error:
            raise MisconfiguredError(f"encryption key file {path}: {error}") from None

    def __repr__(self) -> str:
        return f"KeyRing(ids={[key.key_id.hex() for key in self.keys]})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("encryption keys are not serialised: load them where they are needed")


def _keys(content: bytes) -> list[SealingKey]:
    found: list[SealingKey] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        key = b""
        with contextlib.suppress(ValueError):  # whose message could show a part of the key
            key = bytes.fromhex(line.decode("ascii"))
        if len(key) != KEY_BYTES or len(line.strip()) != 2 * KEY_BYTES:
            raise MisconfiguredError(f"line {number} does not hold 64 hexadecimal digits: {_HINT}")
        found.append(SealingKey(key))
    return found


def _must_have_package() -> None:
    try:
        import cryptography.hazmat.primitives.ciphers  # noqa: F401
    except ImportError as error:
        raise MisconfiguredError(
            "encryption needs the package cryptography: pip install cryptography"
        ) from error
