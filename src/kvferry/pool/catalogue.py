"""What the pool holds: a pure state machine over keys, slots, pins and reservations.

No clock, no I/O, no locks: the node's loop is its only user. States and words are in ``pool.entries``,
the order of eviction in ``pool.policy``, the memory in ``pool.slots``. One key has at most one entry at
any time, so a pin or a reservation is named by key and owner alone.

A commit or abandon of something the owner does not hold (never reserved, committed before, or taken
back by ``release_owner``) raises BrokenError, as does an unpin too many: the caller has a defect or is
out of date, and nothing was changed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvferry.errors import BrokenError, RefusedError
from kvferry.identity.names import DIGEST_BYTES, PartKey
from kvferry.pool.books import check_books
from kvferry.pool.changes import Changes
from kvferry.pool.entries import (
    CatalogueStatistics,
    Declined,
    DeclineReason,
    Entry,
    EntryState,
    Gap,
    Holdings,
    Namespace,
    Owner,
    Reserved,
    Slot,
    check_sizes,
    show,
)
from kvferry.pool.policy import EvictionPolicy
from kvferry.pool.room import RoomFinder
from kvferry.pool.slots import SlotAllocator

MAX_NAMESPACES = 1024
MAX_EVICTED_UNREPORTED = 65536
_NOTHING: dict[int, Entry] = {}


class Catalogue:
    """The parts in one arena of ``allocator.arena_bytes`` bytes."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._slots = allocator
        self._policy = EvictionPolicy(allocator.arena_bytes)
        self._namespaces: dict[bytes, Namespace] = {}
        self._owners: dict[Owner, Holdings] = {}
        self._at: dict[int, Entry] = {}  # offset -> entry
        self._evicted: deque[PartKey] = deque(maxlen=MAX_EVICTED_UNREPORTED)
        self._room = RoomFinder(allocator, self._policy)
        self._ready = self._filling = self._unlinked = self._chunks = self._pins = 0
        self._pinned_bytes = self._filling_bytes = 0
        self._committed = self._abandoned = self._dropped = 0
        self._evictions = self._evicted_bytes = self._full = self._unreported = 0
        self._changes: Changes | None = None

    def register(
        self, namespace: bytes, part_bytes: tuple[int, ...], domain: str, *, trailing: tuple[int, ...] = ()
    ) -> None:
        """Announce a namespace and the bytes of each of its parts (0: no such part). Idempotent.

        trailing: see ``identity.boundaries``; empty when a boundary needs all parts of all chunks.
        Raises RefusedError for bad or differing sizes, another domain, and past MAX_NAMESPACES.
        """
        known = self._namespaces.get(namespace)
        if known is not None:
            has, wanted = (known.part_bytes, known.trailing, known.domain), (part_bytes, trailing, domain)
            if has != wanted:
                raise RefusedError(
                    f"namespace {namespace.hex()} is registered with parts, trailing numbers and domain "
                    f"{has}, not {wanted}; use one engine setup per namespace"
                )
            return
        check_sizes(namespace, part_bytes, trailing)
        if len(self._namespaces) >= MAX_NAMESPACES:
            raise RefusedError(
                f"more than {MAX_NAMESPACES} namespaces on one node; restart the node to forget old ones"
            )
        self._namespaces[namespace] = Namespace(part_bytes, domain, trailing)

    # --- reading

    @property
    def mark(self) -> int:
        """Older than whatever is stored or used from now on."""
        return self._policy.mark

    def gaps(self, namespace: bytes, chunks: Sequence[bytes]) -> Iterator[Gap]:
        """Those of these chunks that lack READY parts, in order, with what they lack. Recency stays."""
        return self._space(namespace).gaps(chunks)

    def state(self, key: PartKey) -> EntryState:
        """What a reader sees. Unknown namespaces are ABSENT."""
        entry = self._find(key)
        if entry is None or entry.unlinked:
            return EntryState.ABSENT
        return EntryState.READY if entry.filler is None else EntryState.FILLING

    def pin(self, key: PartKey, owner: Owner) -> Slot | None:
        """Hold a READY part in memory until as many ``unpin`` calls; None when it is not READY."""
        entry = self._find(key)
        if entry is None or not entry.readable:
            return None
        self._pin(entry, owner)
        return entry.slot()

    def unpin(self, key: PartKey, owner: Owner) -> None:
        """Give one pin back. Raises BrokenError when the owner has none on that part."""
        entry = self._find(key)
        holdings = self._owners.get(owner)
        if entry is None or holdings is None or entry not in holdings.pins:
            raise BrokenError(f"owner {owner} released a pin it does not hold: {show(key)}")
        holdings.pins[entry] -= 1
        if not holdings.pins[entry]:
            del holdings.pins[entry]
            self._forget_idle(owner)
        self._unpin(entry, 1)

    def touch(self, namespace: bytes, chunks: Sequence[bytes]) -> int:
        """A request uses this prefix (once per request): make it recent, head last, and count the use.

        Of parts with a trailing number only those that a boundary at its end needs: the others are not used.
        Returns a mark for ``reserve(spare_from=...)``: all that was stamped is at or after it.
        """
        return self._stamp(namespace, chunks, self._policy.use)

    def refresh(self, namespace: bytes, chunks: Sequence[bytes], *, new: int = 0) -> int:
        """As ``touch``, but not a use: puts a prefix that is being stored or loaded in order.

        new: the last so many chunks are new: all their parts count, and what their boundaries need.
        """
        return self._stamp(namespace, chunks, self._policy.renew, ends=new)

    # --- writing

    def reserve(
        self, key: PartKey, nbytes: int, owner: Owner, *, spare_from: int | None = None
    ) -> Reserved | Declined:
        """Get an empty slot for a part, evicting others if needed (see ``take_evicted``).

        spare_from: a mark of ``touch`` or ``refresh``; parts stamped since are not evicted, so that
        storing a long prefix does not eat its own head. Raises RefusedError for an unknown namespace,
        a part it does not have, or a size that is not the registered one.
        """
        space = self._space(key.namespace)
        if len(key.chunk) != DIGEST_BYTES or not 0 <= key.part < len(space.part_bytes):
            raise RefusedError(f"{show(key)}: no such part, the namespace has {len(space.part_bytes)}")
        if nbytes != space.part_bytes[key.part]:
            raise RefusedError(f"{show(key)}: {nbytes} bytes, registered with {space.part_bytes[key.part]}")
        parts = space.chunks.get(key.chunk)
        entry = None if parts is None else parts.get(key.part)
        if entry is not None:
            if entry.unlinked:
                return Declined(DeclineReason.UNLINKED)
            return Declined(DeclineReason.EXISTS if entry.filler is None else DeclineReason.FILLING)
        if not self._slots.fits(nbytes):
            return Declined(DeclineReason.TOO_LARGE)
        offset = self._slots.alloc(nbytes)
        if offset is None:
            for victim in self._room.choose(nbytes, spare_from=spare_from):
                self._evict(self._at[victim])
            offset = self._slots.alloc(nbytes)
        if offset is None:
            self._full += 1
            return Declined(DeclineReason.FULL)
        entry = Entry(key, nbytes=nbytes, offset=offset, run=self._slots.run_of(offset), filler=owner)
        self._insert(space, entry)
        self._holdings(owner).filling[entry] = None
        return Reserved(entry.slot())

    def commit(self, key: PartKey, owner: Owner, checksums: tuple[bytes, ...]) -> None:
        """Publish a part whose bytes are complete. If it was unlinked meanwhile, it is gone instead."""
        self._publish(key, owner, checksums)

    def commit_pinned(self, key: PartKey, owner: Owner, checksums: tuple[bytes, ...]) -> Slot:
        """As ``commit``, and keep one pin for the owner, with no moment in between."""
        entry = self._filled(key, owner)
        self._pin(entry, owner)
        self._publish(key, owner, checksums)
        return entry.slot()

    def abandon(self, key: PartKey, owner: Owner) -> None:
        """Give a reserved slot back unpublished. No transfer may touch it any more."""
        self._abandon(self._filled(key, owner), owner)

    def retire(self, key: PartKey, owner: Owner) -> int:
        """Take the key off a reserved slot: the part may be reserved anew, elsewhere.

        Returns the slot's offset: it stays out of use until ``reclaim`` or ``release_owner``.
        """
        entry = self._filled(key, owner)
        self._unname(entry)
        entry.unlinked = True
        return entry.offset

    def reclaim(self, offset: int, owner: Owner) -> None:
        """Give a retired slot back. No transfer may touch it any more."""
        entry = self._at.get(offset)
        if entry is None or entry.filler != owner:
            raise BrokenError(f"owner {owner} has no retired slot at {offset}")
        self._abandon(entry, owner)

    def unlink(self, key: PartKey) -> None:
        """Make a part invisible at once; its memory returns when its last pin or its filling ends."""
        entry = self._find(key)
        if entry is None or entry.unlinked:
            return
        if entry.filler is None and not entry.pins:
            self._remove(entry)
            return
        entry.unlinked = True
        if entry.filler is None:
            self._ready -= 1
            self._unlinked += 1
            self._policy.gone(entry)
            if self._changes is not None:
                self._changes.note(key)

    def drop(self, namespace: bytes | None = None, *, before: int | None = None) -> int:
        """Remove every unpinned READY part (of one namespace). Returns the bytes of memory freed.

        before: a ``mark``; what was stamped since stays.
        """
        spaces = self._namespaces.values() if namespace is None else [self._space(namespace)]
        used = self._slots.used_bytes
        for space in spaces:
            for parts in list(space.chunks.values()):
                for entry in list(parts.values()):
                    if entry.readable and not entry.pins and (before is None or entry.stamp < before):
                        self._remove(entry)
                        self._dropped += 1
        return used - self._slots.used_bytes

    def release_owner(self, owner: Owner) -> None:
        """End everything an owner holds: its pins, and its reservations, which are abandoned."""
        holdings = self._owners.pop(owner, None)
        if holdings is None:
            return
        for entry, count in holdings.pins.items():
            self._unpin(entry, count)
        for entry in holdings.filling:
            self._abandon(entry, owner)

    def take_evicted(self) -> list[PartKey]:
        """The parts evicted since the last call (the latest MAX_EVICTED_UNREPORTED of them)."""
        evicted, self._evicted = self._evicted, deque(maxlen=MAX_EVICTED_UNREPORTED)
        return list(evicted)

    def watch(self) -> Changes:
        """From now on what becomes whole or stops being so is noted there; it must be taken from there."""
        self._changes = Changes(self._namespaces)
        return self._changes

    def statistics(self) -> CatalogueStatistics:
        """A snapshot, in constant time."""
        return CatalogueStatistics(
            pool_bytes=self._slots.arena_bytes,
            used_bytes=self._slots.used_bytes,
            free_bytes=self._slots.arena_bytes - self._slots.used_bytes,
            pinned_bytes=self._pinned_bytes,
            filling_bytes=self._filling_bytes,
            new_bytes=self._policy.new_bytes,
            reused_bytes=self._policy.reused_bytes,
            namespaces=len(self._namespaces),
            chunks=self._chunks,
            ready_parts=self._ready,
            filling_parts=self._filling,
            unlinked_parts=self._unlinked,
            pins=self._pins,
            committed_parts=self._committed,
            abandoned_parts=self._abandoned,
            evicted_parts=self._evictions,
            evicted_bytes=self._evicted_bytes,
            dropped_parts=self._dropped,
            full_refusals=self._full,
            evictions_unreported=self._unreported,
        )

    def check(self) -> None:
        """Raise BrokenError when an invariant does not hold. Slow; for tests."""
        entries = list(self._at.values())
        self._slots.check()
        self._policy.check([entry for entry in entries if entry.readable])
        check_books(entries, self._owners, self._namespaces, statistics=self.statistics())

    # --- private

    def _space(self, namespace: bytes) -> Namespace:
        space = self._namespaces.get(namespace)
        if space is None:
            raise RefusedError(f"namespace {namespace.hex()} is not registered; attach first")
        return space

    def _find(self, key: PartKey) -> Entry | None:
        space = self._namespaces.get(key.namespace)
        parts = None if space is None else space.chunks.get(key.chunk)
        return None if parts is None else parts.get(key.part)

    def _holdings(self, owner: Owner) -> Holdings:
        return self._owners.setdefault(owner, Holdings())

    def _forget_idle(self, owner: Owner) -> None:
        holdings = self._owners[owner]
        if not holdings.pins and not holdings.filling:
            del self._owners[owner]

    def _stamp(
        self,
        namespace: bytes,
        chunks: Sequence[bytes],
        stamp: Callable[[Entry, int], int],
        *,
        ends: int = 0,
    ) -> int:
        mark = self._policy.mark
        level = 0
        for entry in self._space(namespace).needed(chunks, ends=ends):
            if entry.readable:
                level = stamp(entry, level)  # a head is at least as well kept as its tail
        return mark

    def _pin(self, entry: Entry, owner: Owner) -> None:
        pins = self._holdings(owner).pins
        pins[entry] = pins.get(entry, 0) + 1
        self._pins += 1
        entry.pins += 1
        if entry.pins == 1:
            entry.run.held += entry.filler is None
            self._pinned_bytes += entry.run.slot_bytes

    def _unpin(self, entry: Entry, count: int) -> None:
        self._pins -= count
        entry.pins -= count
        if entry.pins:
            return
        entry.run.held -= 1
        self._pinned_bytes -= entry.run.slot_bytes
        if entry.unlinked:
            self._unlinked -= 1
            self._free(entry)
        else:
            self._policy.unpinned(entry)

    def _insert(self, space: Namespace, entry: Entry) -> None:
        parts = space.chunks.get(entry.key.chunk)
        if parts is None:
            parts = space.chunks[entry.key.chunk] = {}
            self._chunks += 1
        parts[entry.key.part] = entry
        self._at[entry.offset] = entry
        entry.run.held += 1
        self._filling += 1
        self._filling_bytes += entry.run.slot_bytes
        self._policy.filling(entry)

    def _filled(self, key: PartKey, owner: Owner) -> Entry:
        entry = self._find(key)
        if entry is None or entry.filler != owner:
            raise BrokenError(f"owner {owner} is not filling {show(key)}; its reservation has ended")
        return entry

    def _end_filling(self, entry: Entry, owner: Owner) -> None:
        holdings = self._owners.get(owner)
        if holdings is not None:  # else release_owner took them all
            del holdings.filling[entry]
            self._forget_idle(owner)
        entry.filler = None
        self._filling -= 1
        self._filling_bytes -= entry.run.slot_bytes
        if not entry.pins:
            entry.run.held -= 1

    def _publish(self, key: PartKey, owner: Owner, checksums: tuple[bytes, ...]) -> None:
        entry = self._filled(key, owner)
        self._end_filling(entry, owner)
        entry.checksums = checksums
        self._committed += 1
        if not entry.unlinked:
            self._ready += 1
            self._policy.ready(entry)
            if self._changes is not None:
                self._changes.note(key)
            return
        self._policy.gone(entry)
        if entry.pins:
            self._unlinked += 1
        else:
            self._free(entry)

    def _abandon(self, entry: Entry, owner: Owner) -> None:
        self._end_filling(entry, owner)
        self._abandoned += 1
        self._policy.gone(entry)
        self._free(entry)

    def _remove(self, entry: Entry) -> None:
        """Take an unpinned READY entry out."""
        self._ready -= 1
        if self._changes is not None:
            self._changes.note(entry.key)
        self._policy.gone(entry)
        self._free(entry)

    def _free(self, entry: Entry) -> None:
        self._unname(entry)
        del self._at[entry.offset]
        self._slots.free(entry.offset)

    def _unname(self, entry: Entry) -> None:
        """Its key leads to it no more; that of a retired one leads elsewhere or nowhere already."""
        chunks = self._namespaces[entry.key.namespace].chunks
        parts = chunks.get(entry.key.chunk, _NOTHING)
        if parts.get(entry.key.part) is not entry:
            return
        del parts[entry.key.part]
        if not parts:
            del chunks[entry.key.chunk]
            self._chunks -= 1

    def _evict(self, entry: Entry) -> None:
        self._evictions += 1
        self._evicted_bytes += entry.run.slot_bytes
        self._unreported += len(self._evicted) == MAX_EVICTED_UNREPORTED
        self._evicted.append(entry.key)
        self._policy.evicted(entry)
        self._remove(entry)
