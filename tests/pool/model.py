"""Names and sizes the pool's tests share."""

from collections.abc import Sequence

from kvferry.identity.names import PartKey
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Declined, DeclineReason, Reserved, Slot
from kvferry.pool.slots import SlotAllocator

MIB = 1 << 20
SPACE = b"n" * 16
OTHER = b"o" * 16


def chunk(prompt: int, index: int) -> bytes:
    """The digest of a made-up prompt's chunk."""
    return prompt.to_bytes(16, "big") + index.to_bytes(16, "big")


def chunks(prompt: int, count: int) -> list[bytes]:
    return [chunk(prompt, index) for index in range(count)]


def key(prompt: int, index: int, part: int = 0, *, namespace: bytes = SPACE) -> PartKey:
    return PartKey(namespace, chunk(prompt, index), part)


def catalogue(
    pool_bytes: int, *, part_bytes: tuple[int, ...] = (MIB,), slab_bytes: int | None = None
) -> Catalogue:
    made = Catalogue(SlotAllocator(pool_bytes, slab_bytes))
    made.register(SPACE, part_bytes, "default")
    return made


def reserved(answer: Reserved | Declined) -> Slot:
    assert isinstance(answer, Reserved), answer
    return answer.slot


def declined(answer: Reserved | Declined) -> DeclineReason:
    assert isinstance(answer, Declined), answer
    return answer.reason


def put(made: Catalogue, prompt: int, indexes: range, *, nbytes: int = MIB, owner: int = 1) -> None:
    """Store one-part chunks as the node does: put in order, reserve, commit head first, put in order."""
    prefix = chunks(prompt, indexes.stop)
    mark = made.refresh(SPACE, prefix)
    for index in indexes:
        answer = made.reserve(key(prompt, index), nbytes, owner, spare_from=mark)
        if isinstance(answer, Declined) and answer.reason is DeclineReason.FULL:
            break  # as the node: a tail without its head is worth nothing
        if isinstance(answer, Reserved):
            made.commit(key(prompt, index), owner, (b"c" * 16,))
    made.refresh(SPACE, prefix)


def run(made: Catalogue, space: bytes, wanted: Sequence[bytes]) -> int:
    """How many of the first chunks have all their parts."""
    return next((gap.position for gap in made.gaps(space, wanted)), len(wanted))
