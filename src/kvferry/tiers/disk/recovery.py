"""The records of a segment, found again after any end of the process."""

from collections.abc import Callable

from kvferry.identity.names import PartRef
from kvferry.tiers.disk.format import (
    FIRST_RECORD,
    Mark,
    Preamble,
    next_link,
    read_preamble,
    read_segment,
    record_bytes,
)
from kvferry.tiers.disk.places import Scanned

Read = Callable[[int], memoryview]
"""offset -> the block there, less of it where the file ends."""


def scan(number: int, read: Read, *, segment_bytes: int) -> Scanned | None:
    """Only heads are read. None for a segment that is not in use. Ends before the first record that is not
    whole in its head, or not linked to what is before it."""
    head = read_segment(read(0))
    if head is None or head.segment_bytes != segment_bytes:
        return None
    records: list[tuple[Preamble, int]] = []
    link, offset = head.seed, FIRST_RECORD
    while offset < segment_bytes:
        preamble = read_preamble(read(offset))
        if preamble is None or preamble.generation != head.generation:
            break
        expected = next_link(link, generation=head.generation, offset=offset, ref=preamble.ref)
        end = offset + record_bytes(preamble.ref.nbytes)
        if preamble.link != expected or end > segment_bytes:
            break
        records.append((preamble, offset))
        link, offset = expected, end
    return Scanned(number, head, records, offset, link)


def without_torn(scanned: Scanned, is_whole: Callable[[PartRef, int], bool], *, under_way: int) -> Scanned:
    """Of a segment written last: its last ``under_way`` records may have a head and not all their bytes.

    Such a record is void: what follows it may be whole, and so may what was stored of its part before.
    """
    start = max(0, len(scanned.records) - under_way)
    checked = [
        (preamble if preamble.mark or is_whole(preamble.ref, at) else preamble._replace(mark=Mark.VOID), at)
        for preamble, at in scanned.records[start:]
    ]
    return scanned._replace(records=scanned.records[:start] + checked)
