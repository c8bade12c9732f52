"""The messages between keepers and those who ask them: nodes and admins (``framing`` puts them on a socket).

Fields are bounded and unknown ones refused. The first message of a peer is ``Hello``; ``Hello`` and
``Refusal`` keep their shape in every protocol version, so that two versions can always tell each other
what is wrong. Everything is about parts by name and size; no KV passes here.
"""

import enum
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.frames import FRAME_LIMIT_BYTES
from kvferry.identity.header import KEY_ID_BYTES
from kvferry.identity.names import (
    DIGEST_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    NAMESPACE_BYTES,
    PartKey,
    PartRef,
)
from kvferry.identity.sealing import MAX_KEYS
from kvferry.tiers.contract import Outcome

PROTOCOL = 1
MAX_FRAME_BYTES = FRAME_LIMIT_BYTES
MAX_HELLO_BYTES = 16 << 10  # of the first frame: nobody knows yet whose it is
MAX_TOKEN = 4096
MAX_REFS = 16384  # in one frame; about 50 bytes each
MAX_TEXT = 512

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Namespace = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Digests = Annotated[bytes, Meta(max_length=DIGEST_BYTES * MAX_REFS)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Index = Annotated[int, Meta(ge=0, lt=MAX_REFS)]
PartNumber = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
PartSize = Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Age = Annotated[float, Meta(ge=0, le=1e9)]
Flags = Annotated[bytes, Meta(max_length=MAX_REFS)]


class Role(enum.StrEnum):
    """What a connection is for. Of a node the keys are compared with the keeper's."""

    NODE = "node"
    ADMIN = "admin"


class Where(enum.IntEnum):
    """Where a keeper has a part: the quickest of its tiers."""

    ABSENT = 0
    DISK = 1
    OBJECTS = 2
    UNKNOWN = 3  # not found, and a tier, or the keeper, did not answer


class DropTier(enum.StrEnum):
    """From which tier to drop."""

    VALKEY = "valkey"
    DISK = "disk"
    OBJECTS = "objects"


OUTCOMES = (
    Outcome.OK,
    Outcome.MISS,
    Outcome.CORRUPT,
    Outcome.REFUSED,
    Outcome.LATE,
    Outcome.FAILED,
    Outcome.OVER_QUOTA,
)
"""An outcome travels as its place in here: one byte."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)  # msgspec makes a refusal of it


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class Parts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """References to parts of one namespace: one digest (32 bytes), number and size each."""

    namespace: Namespace
    digests: Digests
    parts: Annotated[tuple[PartNumber, ...], Meta(max_length=MAX_REFS)]
    sizes: Annotated[tuple[PartSize, ...], Meta(max_length=MAX_REFS)]

    def __post_init__(self) -> None:
        """Raises ValueError unless all are of one length."""
        _require(
            len(self.digests) == DIGEST_BYTES * len(self.parts) == DIGEST_BYTES * len(self.sizes),
            "digests, parts and sizes are not of one length",
        )

    def __len__(self) -> int:
        return len(self.parts)

    @classmethod
    def of(cls, refs: Sequence[PartRef]) -> "list[Parts]":
        """As few of these as it takes; the order of each namespace's references is kept."""
        return [parts for parts, _ in cls.split(refs)]

    @classmethod
    def split(cls, refs: Sequence[PartRef]) -> "list[tuple[Parts, list[int]]]":
        """The same, each with the places its references had in ``refs``."""
        spaces: dict[bytes, list[int]] = {}
        for at, ref in enumerate(refs):
            spaces.setdefault(ref.key.namespace, []).append(at)
        found: list[tuple[Parts, list[int]]] = []
        for namespace, places in spaces.items():
            for first in range(0, len(places), MAX_REFS):
                some = places[first : first + MAX_REFS]
                found.append((cls._made(namespace, [refs[at] for at in some]), some))
        return found

    @classmethod
    def _made(cls, namespace: bytes, refs: Sequence[PartRef]) -> "Parts":
        return cls(
            namespace=namespace,
            digests=b"".join(ref.key.chunk for ref in refs),
            parts=tuple(ref.key.part for ref in refs),
            sizes=tuple(ref.nbytes for ref in refs),
        )

    def refs(self) -> list[PartRef]:
        """The references, in order."""
        digests = (self.digests[at : at + DIGEST_BYTES] for at in range(0, len(self.digests), DIGEST_BYTES))
        return [
            PartRef(PartKey(self.namespace, chunk, part), nbytes)
            for chunk, part, nbytes in zip(digests, self.parts, self.sizes, strict=True)
        ]


# ---- to a keeper -----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every connection. key_ids: of what a node stores, the current key first."""

    protocol: int
    version: Text
    token: Annotated[str, Meta(max_length=MAX_TOKEN)] = ""
    node: Text = ""
    role: Role = Role.NODE
    key_ids: Annotated[bytes, Meta(max_length=KEY_ID_BYTES * MAX_KEYS)] = b""

    def __post_init__(self) -> None:
        """Raises ValueError unless key_ids are whole."""
        _require(len(self.key_ids) % KEY_ID_BYTES == 0, "key ids are cut off")

    def __repr__(self) -> str:
        """Without the token."""
        return f"Hello({self.role.value} {self.node!r}, {self.version!r})"


class Stored(Message, frozen=True):
    """These parts are in Valkey now. positions: chunks of the prompt before each.

    likely: one byte per part, 1 where the prompt says that it will be wanted again.
    """

    parts: Parts
    positions: Annotated[tuple[Count, ...], Meta(max_length=MAX_REFS)]
    likely: Flags

    def __post_init__(self) -> None:
        """Raises ValueError unless all are of one length."""
        _require(len(self.parts) == len(self.positions) == len(self.likely), "not one position and byte each")


class Used(Message, frozen=True):
    """These parts were loaded, from whichever tier."""

    parts: Parts


class Locate(Message, frozen=True):
    """Where are these parts? Answered by ``Located`` within deadline_s, or not at all."""

    ticket: Count
    parts: Parts
    deadline_s: Seconds


class Stage(Message, frozen=True):
    """Bring these parts into Valkey, in this order. ``Staged`` answers, until every part has one."""

    ticket: Count
    parts: Parts
    deadline_s: Seconds


class Cancel(Message, frozen=True):
    """What was not staged yet is not wanted any more."""

    ticket: Count


class Remove(Message, frozen=True):
    """Delete these parts in every tier: their bytes are wrong."""

    parts: Parts


class Ping(Message, frozen=True):
    """Is the keeper alive?"""


class StatusQuery(Message, frozen=True):
    """Ask for the keeper's status; ``Document`` answers."""

    ticket: Count


class Drop(Message, frozen=True):
    """Forget what a tier holds; ``Document`` answers. namespace: empty means all.

    older_than_s: only what was neither stored nor used since; 0: whatever its age.
    parts: of these only; no age or namespace with them.
    alone: the other tiers keep theirs, and it may come back from there. Else nothing is copied from one tier
    to another until ``DropEnded``, or for minutes, so that a drop of all tiers, one after another, leaves
    nothing.
    """

    ticket: Count
    tier: DropTier
    namespace: Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)] = b""
    older_than_s: Age = 0.0
    parts: Parts | None = None
    alone: bool = False


class DropEnded(Message, frozen=True):
    """All tiers were dropped from, at all keepers: what is stored from now on is new. Not answered."""

    namespace: Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)] = b""


class MostReused(Message, frozen=True):
    """Which parts were used most, of the last so many seconds? ``Reused`` answers, until one is the last."""

    ticket: Count
    within_s: Age
    max_bytes: Count
    namespace: Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)] = b""


# ---- from a keeper ---------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Accepted. name: the keeper's own among keepers."""

    protocol: int
    version: Text
    name: Text = ""


class Refusal(Message, frozen=True):
    """The keeper declines this connection and closes it. message: for people, one line."""

    message: str
    protocol: int = PROTOCOL
    version: str = ""


class Located(Message, frozen=True):
    """Answer to Locate. where: one byte (``Where``) per part."""

    ticket: Count
    where: Flags

    def __post_init__(self) -> None:
        """Raises ValueError unless every byte means something."""
        _require(all(byte <= max(Where) for byte in self.where), "a place that is none")


class Staged(Message, frozen=True):
    """So it ended for some of the parts of a Stage. outcomes: one byte (``OUTCOMES``) per index."""

    ticket: Count
    indexes: Annotated[tuple[Index, ...], Meta(max_length=MAX_REFS)]
    outcomes: Flags

    def __post_init__(self) -> None:
        """Raises ValueError unless there is one outcome per index, and each means something."""
        _require(len(self.indexes) == len(self.outcomes), "not one outcome per index")
        _require(all(byte < len(OUTCOMES) for byte in self.outcomes), "an outcome that is none")


class Pong(Message, frozen=True):
    """Answer to Ping."""


class Document(Message, frozen=True):
    """Answer to an admin query: a JSON document, or an error."""

    ticket: Count
    json: bytes = b""
    error: str = ""


class Reused(Message, frozen=True):
    """Answer to MostReused, most reused first; more follow unless it is the last."""

    ticket: Count
    parts: Parts | None
    last: bool


ToKeeper = (
    Hello
    | Stored
    | Used
    | Locate
    | Stage
    | Cancel
    | Remove
    | Ping
    | StatusQuery
    | Drop
    | DropEnded
    | MostReused
)
FromKeeper = Welcome | Refusal | Located | Staged | Pong | Document | Reused
