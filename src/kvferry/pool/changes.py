"""Which chunks the pool got whole or lost since somebody asked last. Pure."""

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from kvferry.identity.names import PartKey
from kvferry.pool.entries import Namespace


class Changed(NamedTuple):
    """whole: whether it is now (``entries.Namespace.whole``)."""

    namespace: bytes
    chunk: bytes
    whole: bool


class Changes:
    """Each chunk is in it once, however often it changed."""

    def __init__(self, namespaces: Mapping[bytes, Namespace]) -> None:
        self._namespaces = namespaces
        self._chunks: dict[tuple[bytes, bytes], None] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def note(self, key: PartKey) -> None:
        """This part became readable, or is no longer."""
        self._chunks[key.namespace, key.chunk] = None

    def take(self, most: int) -> list[Changed]:
        """So many of those that may have changed, and how they are now; the rest with later calls."""
        if len(self._chunks) <= most:
            taken, self._chunks = list(self._chunks), {}
        else:
            taken = list(islice(self._chunks, most))
            for name in taken:
                del self._chunks[name]
        spaces = self._namespaces
        return [Changed(namespace, chunk, spaces[namespace].whole(chunk)) for namespace, chunk in taken]
