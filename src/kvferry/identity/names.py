"""What stored things are called: a part is named by namespace, chunk digest and part index."""

from typing import NamedTuple

NAMESPACE_BYTES = 16
DOMAIN_TAG_BYTES = 4  # the namespace begins with its trust domain's tag
DIGEST_BYTES = 32
MAX_PARTS = 4096
MAX_PART_BYTES = 1 << 30


class PartKey(NamedTuple):
    """The name of one part.

    namespace: 16 bytes, the namespace fingerprint.
    chunk: 32 bytes, the keyed chain digest of the prefix that ends with this chunk.
    part: index of the part inside its chunk, group-major: ``group * shards + shard``.
    """

    namespace: bytes
    chunk: bytes
    part: int


class PartRef(NamedTuple):
    """A part together with its size in bytes, which fixes how it is striped."""

    key: PartKey
    nbytes: int
