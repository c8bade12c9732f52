"""The key of a trust domain: 32 secret bytes that every engine of one deployment shares."""

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from kvferry.errors import MisconfiguredError
from kvferry.identity.names import DIGEST_BYTES, DOMAIN_TAG_BYTES
from kvferry.identity.regular import open_regular

KEY_BYTES = 32
KEY_ID_BYTES = 8
KEY_VARIABLE = "KVFERRY_DOMAIN_KEY"

_ID_PERSON = b"kvferry-key-id"
_TAG_PERSON = b"kvferry-tag"
_DEFAULT_PERSON = b"kvferry-default"


class DomainKey:
    """A domain's key. It is never printed, compared in variable time, or serialised.

    ``is_default`` marks the key that follows from the domain's name alone: it keeps domains apart, but
    holds no secret.
    """

    __slots__ = ("_key", "is_default", "key_id")

    def __init__(self, key: bytes, *, is_default: bool = False) -> None:
        if len(key) != KEY_BYTES:
            raise MisconfiguredError(f"a domain key has {KEY_BYTES} bytes, not {len(key)}: {_HINT}")
        self._key = bytes(key)
        self.is_default = is_default
        self.key_id = hashlib.blake2b(key=self._key, digest_size=KEY_ID_BYTES, person=_ID_PERSON).digest()

    @classmethod
    def default(cls, domain: str) -> "DomainKey":
        """The key of a domain that was given none: public, since it follows from the name."""
        key = hashlib.blake2b(_encoded(domain), digest_size=KEY_BYTES, person=_DEFAULT_PERSON).digest()
        return cls(key, is_default=True)

    @classmethod
    def from_hex(cls, text: str, *, source: str) -> "DomainKey":
        """A key written as 64 hexadecimal digits. ``source`` names where it came from in errors."""
        try:
            key = bytes.fromhex(text.strip())
        except ValueError:
            key = b""  # and no chaining: the message of fromhex could show a part of the key
        if len(key) != KEY_BYTES:
            raise MisconfiguredError(f"{source} does not hold 64 hexadecimal digits: {_HINT}")
        return cls(key)

    @classmethod
    def from_file(cls, path: Path | str) -> "DomainKey":
        """A key file: 32 raw bytes or 64 hexadecimal digits; others must not be able to read or change it."""
        try:
            with open_regular(path) as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(4096)
        except OSError as error:
            raise MisconfiguredError(f"domain key file {path}: {error.strerror}: {_HINT}") from error
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise MisconfiguredError(f"domain key file {path} is open to others: chmod 600 {path}")
        if len(content) == KEY_BYTES and not content.isascii():  # 32 readable characters are no random key
            return cls(content)
        return cls.from_hex(content.decode("ascii", errors="replace"), source=f"domain key file {path}")

    @classmethod
    def load(
        cls, domain: str, *, key_file: Path | str | None = None, environ: Mapping[str, str] = os.environ
    ) -> "DomainKey":
        """The key from ``key_file``, else from $KVFERRY_DOMAIN_KEY (hexadecimal), else the default one."""
        if key_file is not None:
            return cls.from_file(key_file)
        text = environ.get(KEY_VARIABLE)
        if text is not None:
            return cls.from_hex(text, source=f"${KEY_VARIABLE}")
        return cls.default(domain)

    def hasher(self, person: bytes) -> "hashlib.blake2b":
        """A keyed BLAKE2b-256 state, personalised for one purpose."""
        return hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=person)

    def __repr__(self) -> str:
        return f"DomainKey(id={self.key_id.hex()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainKey) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.key_id)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a domain key is not serialised: load it where it is needed")


def domain_tag(domain: str, key_id: bytes) -> bytes:
    """The public DOMAIN_TAG_BYTES that every namespace of a domain begins with, and so every name it stores.

    It lets a store limit a user to one domain. It is no secret, and too short to be one: what keeps others
    from naming a chunk is the key. Raises MisconfiguredError for a name that is no Unicode text.
    """
    message = key_id + _encoded(domain)
    return hashlib.blake2b(message, digest_size=DOMAIN_TAG_BYTES, person=_TAG_PERSON).digest()


def _encoded(domain: str) -> bytes:
    try:
        return domain.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MisconfiguredError(f"domain name {domain!r} is not Unicode text") from error


_HINT = "make one with: openssl rand -hex 32"
