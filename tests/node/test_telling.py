"""What keepers are told of parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from kvferry.identity.names import PartKey, PartRef
from kvferry.node.state import Namespace, NodeState
from kvferry.node.telling import Telling
from kvferry.node.writeback import Unsaved

SPACE = Namespace(namespace=b"n" * 16, part_bytes=(4096,), chunk_tokens=16, domain="d", label="m")
CHUNKS = [bytes([number]) * 32 for number in range(4)]


@dataclass
class _Keepers:
    """Remembers what it hears."""

    told: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    used_chunks: list[bytes] = field(default_factory=list[bytes])

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        del positions
        self.told |= {ref.key.chunk: wanted for ref, wanted in zip(refs, likely, strict=True)}

    def used(self, refs: Sequence[PartRef]) -> None:
        self.used_chunks += [ref.key.chunk for ref in refs]


def test_what_was_used_before_the_tier_had_it_is_likely_when_it_has() -> None:
    keepers = _Keepers()
    state: Any = SimpleNamespace(keepers=keepers, loop=SimpleNamespace(clock=lambda: 1.0))
    telling = Telling(cast(NodeState, state))
    telling.found(SPACE, CHUNKS, 2)  # from memory: a herd does not wait for the write to the tier
    for position, chunk in enumerate(CHUNKS):
        telling.stored(Unsaved(PartRef(PartKey(SPACE.namespace, chunk, 0), 4096), 0, (), position))
    telling.after_turn()
    assert keepers.used_chunks == CHUNKS[:2]
    assert keepers.told == dict(zip(CHUNKS, (True, True, False, False), strict=True))
