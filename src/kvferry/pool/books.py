"""The catalogue's invariants, checked against its own books. Slow; for tests and the fault checker."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvferry.errors import BrokenError
from kvferry.pool.entries import CatalogueStatistics, Entry, Holdings, Namespace, Owner


def check_books(
    entries: Sequence[Entry],
    owners: Mapping[Owner, Holdings],
    namespaces: Mapping[bytes, Namespace],
    *,
    statistics: CatalogueStatistics,
) -> None:
    """Raise BrokenError when entries overlap, or do not add up to what owners hold and what is counted."""
    spans = sorted((entry.offset, entry.offset + entry.run.slot_bytes) for entry in entries)
    if any(left[1] > right[0] for left, right in pairwise(spans)):
        raise BrokenError("two parts overlap in memory")
    pins: Counter[Entry] = Counter()
    fillers: dict[Entry, Owner] = {}
    for owner, holdings in owners.items():
        if not holdings.pins and not holdings.filling:
            raise BrokenError(f"owner {owner} holds nothing and was not forgotten")
        pins.update(holdings.pins)
        fillers.update(dict.fromkeys(holdings.filling, owner))
    runs = {entry.run for entry in entries}
    held = Counter(entry.run for entry in entries if entry.pins or entry.filler is not None)
    reused = Counter(e.run for e in entries if _counted(e) and e.level)
    pairs = {
        "pins": (dict(pins), {entry: entry.pins for entry in entries if entry.pins}),
        "fillers": (fillers, {entry: entry.filler for entry in entries if entry.filler is not None}),
        "held slots": ([held[run] for run in runs], [run.held for run in runs]),
        "reused slots": ([reused[run] for run in runs], [run.reused for run in runs]),
        "pin count": (sum(pins.values()), statistics.pins),
        "used bytes": (_slot_bytes(entries), statistics.used_bytes),
        "pinned bytes": (_slot_bytes([entry for entry in entries if entry.pins]), statistics.pinned_bytes),
        "filling bytes": (_slot_bytes(list(fillers)), statistics.filling_bytes),
        "policy bytes": (
            _slot_bytes([entry for entry in entries if _counted(entry)]),
            statistics.new_bytes + statistics.reused_bytes,
        ),
        "ready parts": (sum(entry.readable for entry in entries), statistics.ready_parts),
        "filling parts": (len(fillers), statistics.filling_parts),
        "unlinked parts": (len(entries) - sum(map(_counted, entries)), statistics.unlinked_parts),
    }
    for what, (there, kept) in pairs.items():
        if there != kept:
            raise BrokenError(f"{what}: the entries say {there}, the books {kept}")
    _check_names(entries, namespaces)


def _check_names(entries: Sequence[Entry], namespaces: Mapping[bytes, Namespace]) -> None:
    """Raise BrokenError unless every entry is found by its key, but for the retired ones."""
    named = [
        entry for space in namespaces.values() for parts in space.chunks.values() for entry in parts.values()
    ]
    retired = [entry for entry in entries if entry.unlinked and entry.filler is not None]
    known, there = {id(entry) for entry in named}, {id(entry) for entry in entries}
    if not known <= there or not there - known <= {id(entry) for entry in retired}:
        raise BrokenError("the entries by key and by offset differ")


def _counted(entry: Entry) -> bool:
    return entry.readable or entry.filler is not None


def _slot_bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.run.slot_bytes for entry in entries)
