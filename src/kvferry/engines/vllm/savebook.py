"""Which chunks are stored, which are on their way, and the pinned blocks behind those."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvferry.engines.vllm.messages import SaveChunk, SaveResult, SaveSpec
from kvferry.engines.vllm.pins import Pins

MAX_KNOWN_DIGESTS = 1 << 18


class SaveBook:
    """Scheduler's thread only. A chunk is known once every rank has it in the node."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._save_id = 0
        self._first_valid = 0  # saves before it were begun towards a node, or weights, of before
        self._wanted: dict[int, tuple[bytes, ...]] = {}
        self._stored: dict[int, list[frozenset[bytes]]] = {}
        self._in_flight: set[bytes] = set()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    @property
    def ready(self) -> bool:
        """Whether blocks can be pinned yet."""
        return self._pins.ready

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._pins.room

    def wants(self, digest: bytes) -> bool:
        """Whether this chunk should be stored now."""
        return digest not in self._known and digest not in self._in_flight

    def begin(self, prefix: Sequence[bytes], chunks: Sequence[SaveChunk]) -> SaveSpec:
        """Pin the chunks' blocks until all ranks have reported."""
        self._save_id += 1
        save = SaveSpec(self._save_id, tuple(prefix), tuple(chunks))
        self._pins.pin(save.save_id, (block for chunk in chunks for block in chunk.blocks))
        self._wanted[save.save_id] = tuple(chunk.digest for chunk in chunks)
        self._in_flight.update(self._wanted[save.save_id])
        return save

    def reported(self, result: SaveResult) -> int:
        """One rank's result. Chunks that are stored everywhere with it; 0 until the last rank."""
        if result.save_id not in self._wanted:
            return 0
        self._stored.setdefault(result.save_id, []).append(frozenset(result.stored))
        if not self._pins.reported(result.save_id):
            return 0
        wanted = self._wanted.pop(result.save_id)
        self._in_flight.difference_update(wanted)
        everywhere = frozenset.intersection(*self._stored.pop(result.save_id))
        if result.save_id >= self._first_valid:
            self.remember(digest for digest in wanted if digest in everywhere)
        return len(everywhere)

    def remember(self, digests: Iterable[bytes]) -> None:
        """These are stored."""
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN_DIGESTS:
            self._known.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        """These are not stored any more."""
        for digest in digests:
            self._known.pop(digest, None)

    def forget_all(self) -> None:
        """Another node, or another generation of weights. What is on its way is stored in the old one."""
        self._known.clear()
        self._first_valid = self._save_id + 1
