"""The pages of one host pool and the store that keeps them: look, load, save."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engines.sglang.keys import PageNames
from kvferry.engines.sglang.pages import Pages, page_indices
from kvferry.engines.sglang.stores import PageStore

MAX_CANDIDATES = 64  # looked at by one query for a window of pages; what lies further down is not offered


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call moved."""

    pages: int
    nbytes: int
    seconds: float


class Ends:
    """Where the runs of a pool of windows end: a marker for the last page of each run that was stored.

    Runs are far apart, so the node is asked for the last marker instead of page after page.
    """

    def __init__(self, names: PageNames, store: PageStore) -> None:
        self.store = store
        self._names = names

    def note(self, last: str) -> None:
        """A run that ends with this page is stored."""
        self.store.save([], self._names.digests([last]), _fill_marker)

    def before(self, hashes: Sequence[str]) -> int:
        """Pages up to the last end among these; 0: there is none."""
        return self.store.match(self._names.digests(hashes)) if hashes else 0


def _fill_marker(page: int, part: int, view: memoryview) -> None:
    del page, part
    view[:] = bytes(view.nbytes)


class StoredPool:
    """One pool under one namespace. Any thread may call.

    last_only: a prefix needs only the pool's last page of it; the node finds that itself. ends: of a pool of
    windows.
    """

    def __init__(
        self,
        pool: Any,
        pages: Pages,
        *,
        names: PageNames,
        store: PageStore,
        last_only: bool,
        ends: Ends | None = None,
    ) -> None:
        self.pool = pool
        self._ends = ends
        self.store = store
        self._pages = pages
        self._page_slots = int(getattr(pool, "page_size", 1) or 1)
        self._names = names
        self._last_only = last_only

    def reach(self, hashes: Sequence[str]) -> int:
        """How many leading pages are there. Raises RefusedError for what is no page hash, as all these do."""
        digests = self._names.digests(hashes)
        if not digests:
            return 0
        if not self._last_only:
            return self.store.match(digests)
        asked = digests[:MAX_CANDIDATES]
        return next((n for n, one in enumerate(asked) if not self.store.match([one])), len(asked))

    def longest(self, hashes: Sequence[str], *, window: int, until: float = math.inf) -> int:
        """The longest prefix of these whose last ``window`` pages are there, or all where it is shorter.

        Looked for from the end on, until then: a gap rules out every prefix that needs the page which is
        missing.
        """
        digests = self._names.digests(hashes)
        if self._last_only:
            return self.store.match(digests) if digests else 0
        end = len(digests)
        for _ in range(MAX_CANDIDATES):
            needed = min(window, end)
            if not needed or time.monotonic() > until:
                return 0
            there = self.store.match(digests[end - needed : end][::-1])
            if there >= needed:
                return end
            end -= there + 1
            if self._ends is not None:
                end = self._ends.before(hashes[:end])
        return 0

    def load(self, hashes: Sequence[str], host_indices: Any) -> tuple[list[bool], Moved]:
        """Into the pool's slots. Only pages that are marked as loaded may be used."""
        began = time.perf_counter()
        indices = page_indices(host_indices, pages=len(hashes), page_slots=self._page_slots)
        digests = self._names.digests(hashes)
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
            self._names.digests(prefix),
            self._names.digests(hashes),
            lambda page, _, view: self._pages.copy_out(indices[page], view),
        )
        if self._ends is not None and hashes and held == len(hashes):
            self._ends.note(hashes[-1])
        return [page < held for page in range(len(hashes))], self._moved(held, began)

    def close(self) -> None:
        """Of the connections; joins their threads."""
        self.store.close()
        if self._ends is not None:
            self._ends.store.close()

    def _load(self, digests: list[bytes], indices: list[int]) -> int:
        if not digests:
            return 0
        return self.store.load(digests, lambda page, _, view: self._pages.copy_in(indices[page], view))

    def _moved(self, pages: int, began: float) -> Moved:
        return Moved(pages, pages * self._pages.nbytes, time.perf_counter() - began)
