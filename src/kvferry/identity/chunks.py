"""Chunk digests: a keyed chain over a request's tokens and what else changes their KV.

The digest of a chunk names the whole prefix that ends with it. It is keyed with the trust domain's key:
knowing a prompt does not let anyone outside the domain name, hence ask for, its chunks.
``docs/spec/identity.md`` is the specification; golden vectors pin it.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import BrokenError, RefusedError
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import MAX_CHUNK_TOKENS
from kvferry.identity.names import NAMESPACE_BYTES

CHAIN_VERSION = 1
MAX_SALT_BYTES = 1024
MAX_ADAPTER_BYTES = 64
MAX_ITEM_DIGEST_BYTES = 256
MAX_ITEMS = 1 << 16
MAX_TOKENS = 1 << 28

_ROOT_PERSON = b"kvferry-root"
_CHUNK_PERSON = b"kvferry-chunk"
_TOKEN_CODE = "I" if array("I").itemsize == 4 else "L"


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or span of embeddings that stands where tokens offset .. offset+length-1 do.

    digest: what names its content and its processing, 1 to 256 bytes.
    """

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides the tokens changes a request's KV, or keeps it apart.

    adapter: digest of the LoRA adapter, 1 to 64 bytes, or None for the base model.
    cache_salt: text that separates one user from another, or None. "" is a salt of its own.
    items: multimodal items in any order; they may overlap.

    Raises RefusedError where a value cannot be used: that request is then served without sharing.
    """

    adapter: bytes | None = None
    cache_salt: str | None = None
    items: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        """Check every value; a request may carry anything."""
        if self.adapter is not None:
            _check_digest("adapter", self.adapter, MAX_ADAPTER_BYTES)
        encode_salt(self.cache_salt)
        if len(self.items) > MAX_ITEMS:
            raise RefusedError(f"{len(self.items)} multimodal items: at most {MAX_ITEMS}")
        for item in self.items:
            _check_digest("multimodal", item.digest, MAX_ITEM_DIGEST_BYTES)
            if item.offset < 0 or item.length < 1 or item.offset + item.length > MAX_TOKENS:
                raise RefusedError(
                    f"multimodal item at {item.offset}, {item.length} tokens long: out of range"
                )


def _check_digest(what: str, digest: object, limit: int) -> None:
    """Engines hold some digests as text; encoding them is for the caller to decide, not to happen here."""
    if not isinstance(digest, bytes) or not 1 <= len(digest) <= limit:
        size = f"{len(digest)} bytes" if isinstance(digest, bytes) else type(digest).__name__
        raise RefusedError(f"{what} digest is {size}: give 1 to {limit} bytes")


def encode_salt(salt: object) -> bytes | None:
    """A cache salt as UTF-8, None if there is none. RefusedError for anything but short Unicode text.

    The message does not repeat the salt: it may be derived from a user's identity.
    """
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise RefusedError(f"cache_salt is a {type(salt).__name__}: it must be text")
    if len(salt) > MAX_SALT_BYTES:
        raise RefusedError(f"cache_salt has {len(salt)} characters: at most {MAX_SALT_BYTES} bytes")
    try:
        encoded = salt.encode("utf-8")
    except UnicodeEncodeError:  # whose message would show the salt
        raise RefusedError("cache_salt is not Unicode text: it holds a lone surrogate") from None
    if len(encoded) > MAX_SALT_BYTES:
        raise RefusedError(f"cache_salt has {len(encoded)} bytes: at most {MAX_SALT_BYTES}")
    return encoded


def _optional(value: bytes | None) -> bytes:
    """Absent and empty differ: 00, or 01 and the length-prefixed bytes."""
    return b"\0" if value is None else b"\1" + struct.pack("<I", len(value)) + value


def token_array(token_ids: Sequence[int]) -> "array[int]":
    """The token ids as 32-bit integers. RefusedError for ids that are not integers of 0 .. 2**32-1."""
    if isinstance(token_ids, (bytes, bytearray, memoryview, str)):
        raise RefusedError(f"token ids are {type(token_ids).__name__}: a sequence of integers is needed")
    try:
        return array(_TOKEN_CODE, token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise RefusedError(f"token ids must be integers of 0 to 2**32-1: {error}") from error


class ChunkChain:
    """The chunk digests of one request, extended as its tokens become known.

    Not thread-safe. Raises BrokenError for arguments of a wrong size.
    """

    def __init__(
        self, domain_key: DomainKey, namespace: bytes, *, chunk_tokens: int, extras: Extras | None = None
    ) -> None:
        if len(namespace) != NAMESPACE_BYTES or not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
            raise BrokenError(f"namespace of {len(namespace)} bytes, chunks of {chunk_tokens} tokens")
        extras = extras or Extras()
        self._key = domain_key
        self._chunk_tokens = chunk_tokens
        self._tail: array[int] = array(_TOKEN_CODE)
        self._digests: list[bytes] = []
        self._items = sorted(extras.items, key=lambda item: (item.offset, item.length, item.digest))
        self._next_item = 0
        self._open_items: list[MultimodalItem] = []
        root = domain_key.hasher(_ROOT_PERSON)
        root.update(struct.pack("<I16sI", CHAIN_VERSION, namespace, chunk_tokens))
        root.update(_optional(extras.adapter))
        root.update(_optional(encode_salt(extras.cache_salt)))
        self._parent = root.digest()

    @property
    def digests(self) -> list[bytes]:
        """The digests of all full chunks so far, 32 bytes each."""
        return list(self._digests)

    @property
    def tokens(self) -> int:
        """All tokens given so far, those that do not fill a chunk included."""
        return len(self._digests) * self._chunk_tokens + len(self._tail)

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Append tokens; return the digests of the chunks they filled, maybe none.

        RefusedError, with nothing appended, for unusable ids or past MAX_TOKENS.
        """
        added = token_array(token_ids)
        if self.tokens + len(added) > MAX_TOKENS:
            raise RefusedError(f"a request of more than {MAX_TOKENS} tokens")
        self._tail.extend(added)
        full = len(self._tail) // self._chunk_tokens
        if not full:
            return []
        taken = self._tail[: full * self._chunk_tokens]
        del self._tail[: full * self._chunk_tokens]
        if sys.byteorder == "big":
            taken.byteswap()
        step = self._chunk_tokens * taken.itemsize
        prefix_tokens = struct.pack("<I", self._chunk_tokens)
        new: list[bytes] = []
        with memoryview(taken).cast("B") as raw:
            for start in range(0, full * step, step):
                chunk = self._key.hasher(_CHUNK_PERSON)
                chunk.update(self._parent + self._encode_items(len(self._digests) + len(new)) + prefix_tokens)
                chunk.update(raw[start : start + step])
                self._parent = chunk.digest()
                new.append(self._parent)
        self._digests += new
        return new

    def _encode_items(self, index: int) -> bytes:
        """The multimodal items that cover tokens of chunk ``index``, placed relative to its start."""
        start = index * self._chunk_tokens
        end = start + self._chunk_tokens
        while self._next_item < len(self._items) and self._items[self._next_item].offset < end:
            self._open_items.append(self._items[self._next_item])
            self._next_item += 1
        if not self._open_items:
            return b"\0\0\0\0"
        out = bytearray(struct.pack("<I", len(self._open_items)))
        for item in self._open_items:
            out += struct.pack("<I", len(item.digest)) + item.digest
            out += struct.pack("<qQ", item.offset - start, item.length)
        self._open_items = [item for item in self._open_items if item.offset + item.length > end]
        return bytes(out)
