"""Reads everything that is left in Valkey and compares it with what should be there.

What a reader would refuse is damage, some of it planted. What a reader would accept must be right.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.bench.chaos.cluster import Member, ValkeyCluster
from kvferry.bench.chaos.contents import PART_BYTES, Contents
from kvferry.errors import CorruptError, KvferryError
from kvferry.identity.header import HEADER_BYTES, pack_header, verify_header
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import checksum, stripe_plan
from kvferry.testing.servers import must

SCAN_COUNT = "500"
SEALED_WORDS = 6  # of a name that ends in the id of a key


@dataclass(slots=True)
class Audit:
    """Values by verdict. sealed: encrypted, not looked into. wrong: what would have passed, in words."""

    right: int = 0
    damaged: int = 0
    sealed: int = 0
    wrong: list[str] = field(default_factory=list[str])


def audit(cluster: ValkeyCluster, contents: Contents) -> Audit:
    """Every value of every primary; raises KvferryError when one of them does not answer."""
    found = Audit()
    for shard in cluster.shards():
        member = cluster.members[shard.primary]
        for key in _keys(member):
            value = must(member.ask("GET", key))
            if isinstance(value, bytes):
                judge(found, key, value, contents)
    return found


def judge(found: Audit, name: bytes, value: bytes, contents: Contents) -> None:
    """One value, by the name under which it was found."""
    words = name.decode(errors="replace").split(":")
    if len(words) == SEALED_WORDS:
        found.sealed += 1
        return
    try:
        _, namespace, chunk, part, stripe_index = words
        key = PartKey(bytes.fromhex(namespace), bytes.fromhex(chunk), int(part))
        plan = stripe_plan(PART_BYTES[key.part])
        stripe = plan[int(stripe_index)]
    except (ValueError, IndexError, KvferryError):
        found.wrong.append(f"a key that nobody writes: {name!r}")
        return
    right = contents.of(key.chunk, key.part)[stripe.offset : stripe.offset + stripe.nbytes]
    part_bytes = PART_BYTES[key.part]
    header = pack_header(
        key, part_bytes=part_bytes, stripe=stripe, stripe_count=len(plan), checksum=checksum(right)
    )
    if value == header + right:
        found.right += 1
        return
    payload = value[HEADER_BYTES:]
    try:
        accepted = verify_header(value[:HEADER_BYTES], key, part_bytes=part_bytes, stripe=stripe)
    except CorruptError:
        found.damaged += 1
        return
    if len(payload) == stripe.nbytes and checksum(payload) == accepted:
        found.wrong.append(f"{name.decode()} holds other bytes under a checksum that matches them")
    else:
        found.damaged += 1


def _keys(member: Member) -> Iterator[bytes]:
    cursor = b"0"
    while True:
        match must(member.ask("SCAN", cursor, "COUNT", SCAN_COUNT)):
            case [bytes(cursor), list(keys)]:
                yield from (key for key in keys if isinstance(key, bytes))
            case _:
                return
        if cursor == b"0":
            return
