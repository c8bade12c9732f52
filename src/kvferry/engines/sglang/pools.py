"""The pages of one host pool and the store that keeps them: look, load, save."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engines.sglang.keys import PageNames
from kvferry.engines.sglang.pages import Pages, page_indices
from kvferry.engines.sglang.stores import PageStore

MAX_PROBES = 64  # of one query for a window of pages: what lies further down is not offered


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call moved."""

    pages: int
    nbytes: int
    seconds: float


class StoredPool:
    """One pool under one namespace. Any thread may call.

    last_only: a prefix needs only the pool's last page of it; the node finds that itself.
    """

    def __init__(
        self, pool: Any, pages: Pages, *, names: PageNames, store: PageStore, last_only: bool
    ) -> None:
        self.pool = pool
        self.store = store
        self._pages = pages
        self._page_slots = int(getattr(pool, "page_size", 1) or 1)
        self._names = names
        self._last_only = last_only

    def digests(self, hashes: Sequence[str]) -> list[bytes]:
        """Raises RefusedError for what is no page hash."""
        return self._names.digests(hashes)

    def reach(self, digests: Sequence[bytes]) -> int:
        """How many leading pages are there."""
        if not digests:
            return 0
        if not self._last_only:
            return self.store.match(digests)
        return next((n for n, one in enumerate(digests) if not self.store.match([one])), len(digests))

    def longest(self, digests: Sequence[bytes], *, window: int) -> int:
        """The longest prefix of these whose last ``window`` pages are there, or all where it is shorter.

        Looked for from the end on: a gap rules out every prefix that needs the page which is missing.
        """
        if self._last_only:
            return self.store.match(digests) if digests else 0
        end = len(digests)
        for _ in range(MAX_PROBES):
            needed = min(window, end)
            if not needed:
                return 0
            there = self.store.match(digests[end - needed : end][::-1])
            if there >= needed:
                return end
            end -= there + 1
        return 0

    def load(self, hashes: Sequence[str], host_indices: Any) -> tuple[list[bool], Moved]:
        """Into the pool's slots. Only pages that are marked as loaded may be used."""
        began = time.perf_counter()
        indices = page_indices(host_indices, pages=len(hashes), page_slots=self._page_slots)
        digests = self.digests(hashes)
        if self._last_only:  # a load of several would bring the last alone
            loaded = [
                self._load([digest], [index]) == 1 for digest, index in zip(digests, indices, strict=True)
            ]
        else:
            whole = self._load(digests, indices)
            loaded = [page < whole for page in range(len(hashes))]
        return loaded, self._moved(sum(loaded), began)

    def save(
        self, prefix: Sequence[str], hashes: Sequence[str], host_indices: Any
    ) -> tuple[list[bool], Moved]:
        """Out of the pool's slots. True for what the node holds then, whoever stored it."""
        began = time.perf_counter()
        indices = page_indices(host_indices, pages=len(hashes), page_slots=self._page_slots)
        held = self.store.save(
            self.digests(prefix),
            self.digests(hashes),
            lambda page, _, view: self._pages.copy_out(indices[page], view),
        )
        return [page < held for page in range(len(hashes))], self._moved(held, began)

    def _load(self, digests: list[bytes], indices: list[int]) -> int:
        if not digests:
            return 0
        return self.store.load(digests, lambda page, _, view: self._pages.copy_in(indices[page], view))

    def _moved(self, pages: int, began: float) -> Moved:
        return Moved(pages, pages * self._pages.nbytes, time.perf_counter() - began)
