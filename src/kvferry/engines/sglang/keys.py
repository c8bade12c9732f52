"""What SGLang calls a page, as a chunk digest of ours.

SGLang names a page by a SHA-256 chain over the tokens of its prefix, begun with the request's ``extra_key``
(LoRA adapter id included) and ``cache_salt``; what stands for an image among the tokens follows from its
pixels, or from a hash that the request brings, which is not seen here. The name is public: whoever knows a
prompt can compute it. The digest is keyed with the domain's key.
"""

import re
import struct
from collections.abc import Sequence

from kvferry.errors import RefusedError
from kvferry.identity.domain import DomainKey

KEYS_VERSION = 1
_PERSON = b"kvferry-sglang"
_HASH = re.compile(r"[0-9a-f]{64}")


class PageNames:
    """The digests of one pool's pages."""

    def __init__(self, key: DomainKey, namespace: bytes) -> None:
        self._base = key.hasher(_PERSON)
        self._base.update(struct.pack("<I", KEYS_VERSION) + namespace)

    def digests(self, hashes: Sequence[str]) -> list[bytes]:
        """32 bytes per page hash. RefusedError for what is not 64 hexadecimal digits."""
        found = []
        for name in hashes:
            if not _HASH.fullmatch(name):
                raise RefusedError(f"{name!r} is no page hash of SGLang")
            state = self._base.copy()
            state.update(bytes.fromhex(name))
            found.append(state.digest())
        return found
