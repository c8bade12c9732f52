"""Which packs manifests name, and when to write another one.

A manifest is a cache: a start reads few of them instead of the end of every pack. Whoever finds enough packs
that none names writes one, and whoever finds many small ones joins them; two that do so at a time waste a
little and break nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.tiers.objects.books import Books
from kvferry.tiers.objects.format import PackIndex, manifest_bytes, pack_manifest
from kvferry.tiers.objects.names import Name

NEW_PACKS = 32
"""So many packs that no manifest names are worth one."""
SMALL_BYTES = 1 << 20
MAX_SMALL = 8
"""More small ones than that, of one namespace, are joined."""
LARGEST_BYTES = 4 << 20
"""Reading one keeps the thread of all requests busy for a fifth of a second."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """To be written. replaces: what to delete afterwards."""

    namespace: bytes
    packs: Sequence[PackIndex]
    replaces: Sequence[Name] = ()

    def data(self) -> bytes:
        """The object."""
        return pack_manifest(self.packs)


class Manifests:
    """known: those in the bucket, and the packs each names."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._sizes: dict[Name, int] = {}
        self.known: dict[Name, frozenset[bytes]] = {}

    def saw(self, name: Name, nbytes: int, packs: Iterable[PackIndex]) -> None:
        """One was read or written."""
        self.known[name] = frozenset(pack.ident for pack in packs)
        self._sizes[name] = nbytes

    def keep(self, names: Iterable[Name]) -> None:
        """Only these are there."""
        self.known = {name: self.known[name] for name in names if name in self.known}
        self._sizes = {name: self._sizes[name] for name in self.known}

    def due(self) -> list[Manifest]:
        """Those to write now."""
        covered = {ident for packs in self.known.values() for ident in packs}
        loose: dict[bytes, list[PackIndex]] = defaultdict(list)
        with self._books.lock:
            for pack in self._books.catalogue.oldest():
                if pack.ident not in covered:
                    loose[pack.namespace].append(pack.index)
        found = [
            Manifest(namespace, piece)
            for namespace, packs in loose.items()
            if len(packs) >= NEW_PACKS
            for piece in split(packs)
        ]
        return found + self._joined()

    def _joined(self) -> list[Manifest]:
        small: dict[bytes, list[Name]] = defaultdict(list)
        for name, nbytes in self._sizes.items():
            if nbytes < SMALL_BYTES:
                small[name.namespace].append(name)
        found = []
        for namespace, names in small.items():
            if len(names) <= MAX_SMALL:
                continue
            with self._books.lock:
                packs = self._books.catalogue.packs
                idents = sorted({ident for name in names for ident in self.known[name] if ident in packs})
                pieces = split([packs[ident].index for ident in idents])
            last = len(pieces) - 1
            found += [
                Manifest(namespace, piece, names if number == last else ())
                for number, piece in enumerate(pieces)
            ]
        return found


def split(packs: Sequence[PackIndex]) -> list[list[PackIndex]]:
    """None larger than a manifest may be."""
    pieces: list[list[PackIndex]] = []
    size = 0
    for pack in packs:
        nbytes = manifest_bytes([pack])
        if not pieces or size + nbytes > LARGEST_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(pack)
        size += nbytes
    return pieces
