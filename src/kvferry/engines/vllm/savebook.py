"""Which chunks are stored, which are on their way, and the pinned blocks behind those."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvferry.engines.vllm.messages import SaveChunk, SaveResult, SaveSpec
from kvferry.engines.vllm.pins import Pins

MAX_KNOWN_DIGESTS = 1 << 18


class SaveBook:
    """Scheduler's thread only. A group's part of a chunk is known once every rank has it in the node.

    counted: the group whose parts stand for chunks where these are counted.
    """

    def __init__(self, pins: Pins, *, groups: int = 1, counted: int = 0) -> None:
        self._pins = pins
        self._counted = counted
        self._save_id = 0
        self._first_valid = 0  # saves before it were begun towards a node, or weights, of before
        self._saves: dict[int, SaveSpec] = {}
        self._stored: dict[int, list[frozenset[bytes]]] = {}
        self._in_flight: set[tuple[int, bytes]] = set()
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(groups)]

    @property
    def ready(self) -> bool:
        """Whether blocks can be pinned yet."""
        return self._pins.ready

    @property
    def null_block(self) -> int | None:
        """See ``Pins``."""
        return self._pins.null_block

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._pins.room

    def wants(self, digest: bytes, group: int = 0) -> bool:
        """Whether the group's part of this chunk should be stored now."""
        return digest not in self._known[group] and (group, digest) not in self._in_flight

    def begin(self, prefix: tuple[bytes, ...], chunks: Sequence[SaveChunk], group: int = 0) -> SaveSpec:
        """Pin the chunks' blocks until all ranks have reported."""
        self._save_id += 1
        save = SaveSpec(self._save_id, prefix, tuple(chunks), group)
        self._pins.pin(save.save_id, (block for chunk in chunks for block in chunk.blocks))
        self._saves[save.save_id] = save
        self._in_flight.update((group, chunk.digest) for chunk in chunks)
        return save

    def reported(self, result: SaveResult) -> int:
        """One rank's result. Chunks that are stored everywhere with it; 0 until the last rank."""
        if result.save_id not in self._saves:
            return 0
        self._stored.setdefault(result.save_id, []).append(frozenset(result.stored))
        if not self._pins.reported(result.save_id):
            return 0
        save = self._saves.pop(result.save_id)
        wanted = [chunk.digest for chunk in save.chunks]
        self._in_flight.difference_update((save.group, digest) for digest in wanted)
        everywhere = frozenset.intersection(*self._stored.pop(result.save_id))
        if result.save_id >= self._first_valid:
            self.remember((digest for digest in wanted if digest in everywhere), save.group)
        return len(everywhere) if save.group == self._counted else 0

    def remember(self, digests: Iterable[bytes], group: int = 0) -> None:
        """The group's parts of these are stored."""
        known = self._known[group]
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > MAX_KNOWN_DIGESTS:
            known.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        """These are not stored any more, whatever the group."""
        for digest in digests:
            for known in self._known:
                known.pop(digest, None)

    def forget_all(self) -> None:
        """Another node, or another generation of weights. What is on its way is stored in the old one."""
        for known in self._known:
            known.clear()
        self._first_valid = self._save_id + 1
