"""When each key was used last, as passes over the whole of Valkey saw it. Pure.

What was used between two passes was stored and wanted again. Only what both passes saw tells that: what is
new has no earlier sighting. Of more keys than can be remembered, every two passes look at another slice.
"""

import xxhash

SLACK_S = 2.0
"""Servers count idle time by the second."""
STORED_COUNT = 5
"""With which a server that counts uses begins."""
MAX_SLICES = 1 << 16


class Sightings:
    """At most ``max_keys`` of a pass are remembered, and as many of the pass before. Times in seconds."""

    def __init__(self, *, max_keys: int) -> None:
        self._max_keys = max_keys
        self._before: dict[int, float] = {}
        self._now: dict[int, float] = {}
        self._slices = 1
        self._slice = 0
        self._second = False  # the second pass over this slice
        self._missed = False
        self._most = 0  # keys that any slice had

    def wanted(self, name: bytes) -> bool:
        """Whether this pass looks at that key."""
        return xxhash.xxh3_64_intdigest(name) % self._slices == self._slice

    def saw(self, name: bytes, earliest: float, latest: float) -> bool:
        """It was used last between these times. True if that was surely after the pass before."""
        before = self._see(name, latest)
        return before is not None and earliest > before + SLACK_S

    def counted(self, name: bytes, frequency: int) -> bool:
        """Where servers count uses in place of times. True if there was one since it was stored, or seen.

        The count falls with time: what is used rarely may need a few passes.
        """
        before = self._see(name, frequency)
        return frequency > (STORED_COUNT if before is None else before)

    def forget(self) -> None:
        """What was seen cannot be compared with what is seen now."""
        self._before, self._now = {}, {}

    def _see(self, name: bytes, what: float) -> float | None:
        """What the pass before saw."""
        key = xxhash.xxh3_64_intdigest(name)
        if len(self._now) < self._max_keys or key in self._now:
            self._now[key] = what
        else:
            self._missed = True
        return self._before.get(key)

    def looked_into(self, name: bytes, at: float) -> None:
        """We read it at that time ourselves, which older servers take for a use."""
        key = xxhash.xxh3_64_intdigest(name)
        if key in self._now:
            self._now[key] = at

    def end_pass(self) -> None:
        """The next pass begins."""
        self._most = max(self._most, len(self._now))
        self._before, self._now = self._now, {}
        if self._missed and self._slices < MAX_SLICES:
            self._cut(2 * self._slices)
        elif not self._second:
            self._second = True
        elif self._slices > 1:
            self._second = False
            self._slice += 1
            if self._slice == self._slices:
                self._cut(self._slices // 2 if self._most < self._max_keys // 4 else self._slices)

    def _cut(self, slices: int) -> None:
        """Begin with the first of so many slices."""
        self._slices = slices
        self._slice = self._most = 0
        self._second = self._missed = False
