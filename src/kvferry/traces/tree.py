"""What a prompt shares with earlier ones: a radix tree over block keys; memory grows with distinct content.

A segment is a run of blocks that every request so far passed as a whole: its blocks share one latest request.
A request that leaves a segment in its middle, or ends there, splits it:

        parent ── segment                parent ── head ── segment (now the tail, with all it had below it)

The tail keeps the segment's number, so the children below it need no change.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.traces.request import KEY_BYTES

_ROOT = 0
_KEY_BITS = 8 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class Passed:
    """What earlier requests left of a prompt.

    runs: (request, blocks) from the first block on: the latest request that had these blocks at this place.
        Requests descend: who had a block had everything before it.
    known_blocks: the sum over ``runs``; every block after it is new.
    """

    runs: Sequence[tuple[int, int]]
    known_blocks: int


class PrefixTree:
    """All prompts so far, by content."""

    def __init__(self) -> None:
        self._keys = bytearray()  # of all segments, one after another
        self._start = array("q", [0])  # per segment: its first key's number in ``_keys``
        self._length = array("i", [0])
        self._latest = array("i", [-1])
        self._children: dict[int, int] = {}  # segment number and a first key, as one integer -> segment
        self.blocks = 0

    def add(self, request: int, blocks: bytes) -> Passed:
        """Take in the next request, whose numbers ascend; what it shares with those before it."""
        keys, children, latest = self._keys, self._children, self._latest
        runs: list[tuple[int, int]] = []
        at, end, parent = 0, len(blocks), _ROOT
        while at < end:
            edge = parent << _KEY_BITS | int.from_bytes(blocks[at : at + KEY_BYTES], "little")
            segment = children.get(edge)
            if segment is None:
                self._append(edge, request, blocks[at:])
                break
            start, length = self._start[segment], self._length[segment]
            first, stop = start * KEY_BYTES, (start + length) * KEY_BYTES
            rest = blocks[at : at + stop - first]
            if len(rest) < stop - first or rest != keys[first:stop]:
                length = _common(rest, keys[first : first + len(rest)])
                segment = self._split(edge, segment, length)
            previous = latest[segment]
            if runs and runs[-1][0] == previous:
                runs[-1] = (previous, runs[-1][1] + length)
            else:
                runs.append((previous, length))
            latest[segment] = request
            parent = segment
            at += length * KEY_BYTES
        return Passed(runs, at // KEY_BYTES)

    def _append(self, edge: int, request: int, blocks: bytes) -> None:
        count = len(blocks) // KEY_BYTES
        self._children[edge] = len(self._start)
        self._start.append(len(self._keys) // KEY_BYTES)
        self._length.append(count)
        self._latest.append(request)
        self._keys += blocks
        self.blocks += count

    def _split(self, edge: int, segment: int, length: int) -> int:
        """The new segment: the first ``length`` blocks of the given one, which keeps the others."""
        head, start = len(self._start), self._start[segment]
        self._start.append(start)
        self._length.append(length)
        self._latest.append(self._latest[segment])
        self._start[segment] = start + length
        self._length[segment] -= length
        self._children[edge] = head
        at = (start + length) * KEY_BYTES
        self._children[head << _KEY_BITS | int.from_bytes(self._keys[at : at + KEY_BYTES], "little")] = (
            segment
        )
        return head


def _common(one: bytes, other: bytes | bytearray) -> int:
    """How many keys two runs of equal length share from the first on, which is at least one."""
    low, high = KEY_BYTES, len(one)  # equal before low; the answer is at most high
    while low < high:
        middle = (low + high + KEY_BYTES) // (2 * KEY_BYTES) * KEY_BYTES
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - KEY_BYTES
    return low // KEY_BYTES
