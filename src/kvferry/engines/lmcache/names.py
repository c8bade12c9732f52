"""What LMCache's objects are called in the tier. ``docs/spec/lmcache-keys.md`` is the specification.

LMCache names an object by model, rank, group, salt and the hash of its chunk. That leaves out what two
servers may differ in without knowing: the tensors' shapes and element types, and what a serde made of them.
Both enter the namespace, so bytes of one kind are never found by a server that expects another.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import RefusedError
from kvferry.identity.domain import DomainKey, domain_tag
from kvferry.identity.names import DOMAIN_TAG_BYTES, MAX_PART_BYTES, NAMESPACE_BYTES, PartKey, PartRef

ENCODING_VERSION = 1
MAX_SPACES = 4096
"""Namespaces remembered; one is a rank, a group and a layout of a model."""
_SPACE_PERSON = b"kvferry-lmc-ns"
_OBJECT_PERSON = b"kvferry-lmc-obj"


class ObjectName(Protocol):
    """LMCache's ``ObjectKey``."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one object: shapes, and a type such as ``torch.bfloat16`` for each. nbytes: of all."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[str], item_bytes: Sequence[int]) -> Layout:
    """item_bytes: size of one element of each type. Raises RefusedError for a size no part can have."""
    plain = tuple(tuple(int(n) for n in shape) for shape in shapes)
    nbytes = sum(math.prod(shape) * size for shape, size in zip(plain, item_bytes, strict=True))
    if not 1 <= nbytes <= MAX_PART_BYTES:
        raise RefusedError(f"an object of {nbytes} bytes: between 1 and {MAX_PART_BYTES} are stored")
    return Layout(plain, tuple(dtypes), nbytes)


class Names:
    """Names objects of one trust domain. Used by any thread."""

    def __init__(self, domain: str, key: DomainKey, *, engine_format: str, weights: str, serde: str) -> None:
        """engine_format: LMCache's minor version. weights: what the model's name does not say, or empty.

        serde: what is done to objects before they are stored; if there is any, layouts do not enter, since
        LMCache asks for objects by the layout they have without it.
        """
        self._tag = domain_tag(domain, key.key_id)
        self._key = key
        self._about = (engine_format, weights, serde)
        self._by_layout = not serde
        self._spaces: dict[tuple[str, int, int, Layout | None], bytes] = {}

    def ref(self, name: ObjectName, layout: Layout) -> PartRef:
        """The part that holds an object of that layout."""
        return PartRef(self._part_key(name, layout if self._by_layout else None), layout.nbytes)

    def head(self, name: ObjectName, layout: Layout | None) -> PartRef | None:
        """A part to ask for whether the object is there; None where that needs a layout nobody has told.

        With a serde the size is not known, so this asks for the first stripe alone, whose name is the same
        for every size.
        """
        if not self._by_layout:
            return PartRef(self._part_key(name, None), 1)
        return self.ref(name, layout) if layout is not None else None

    def _part_key(self, name: ObjectName, layout: Layout | None) -> PartKey:
        where = (name.model_name, name.kv_rank, name.object_group_id, layout)
        space = self._spaces.get(where)
        if space is None:
            space = self._space(name, layout)
            if len(self._spaces) >= MAX_SPACES:
                self._spaces.clear()
            self._spaces[where] = space
        salt = name.cache_salt.encode("utf-8", "surrogatepass")
        chunk = self._key.hasher(_OBJECT_PERSON)
        chunk.update(b"%b%b%b" % (struct.pack("<I", len(salt)), salt, name.chunk_hash))
        return PartKey(space, chunk.digest(), 0)

    def _space(self, name: ObjectName, layout: Layout | None) -> bytes:
        out = bytearray(b"kvferry lmcache\0" + struct.pack("<I", ENCODING_VERSION))
        for text in (*self._about, name.model_name):
            content = text.encode("utf-8", "surrogatepass")
            out += struct.pack("<I", len(content)) + content
        out += struct.pack("<QQ", name.kv_rank, name.object_group_id)
        tensors = () if layout is None else tuple(zip(layout.shapes, layout.dtypes, strict=True))
        out += struct.pack("<I", len(tensors))
        for shape, dtype in tensors:
            kind = dtype.encode()
            out += struct.pack("<I", len(kind)) + kind
            out += struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        size = NAMESPACE_BYTES - DOMAIN_TAG_BYTES
        return self._tag + hashlib.blake2b(out, digest_size=size, person=_SPACE_PERSON).digest()
