"""A recent request's chunks and parts, as its node knows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import RefusedError
from kvferry.identity.boundaries import needed_spans
from kvferry.identity.names import PartKey, PartRef

if TYPE_CHECKING:
    from kvferry.client.admin import AdminClient


@dataclass(frozen=True, slots=True)
class Prompt:
    """part_bytes: by part number, 0 for none. trailing: see ``identity.boundaries``."""

    request_id: str
    namespace: bytes
    chunk_tokens: int
    chunks: tuple[bytes, ...]
    part_bytes: tuple[int, ...]
    trailing: tuple[int, ...]

    def _ref(self, chunk: bytes, part: int) -> PartRef:
        return PartRef(PartKey(self.namespace, chunk, part), self.part_bytes[part])

    @property
    def _parts(self) -> list[int]:
        return [part for part, nbytes in enumerate(self.part_bytes) if nbytes]

    def all_refs(self) -> list[PartRef]:
        """Every part that its chunks may have."""
        return [self._ref(chunk, part) for chunk in self.chunks for part in self._parts]

    def needed_refs(self) -> list[PartRef]:
        """What loading all of it takes, its head first."""
        return list(self._needed())

    def _needed(self) -> Iterator[PartRef]:
        spans = needed_spans(len(self.chunks), self._parts, self.trailing)
        return (
            self._ref(self.chunks[position], part)
            for span in spans
            for position in span.chunks
            for part in span.parts
        )


def prompt_of(node: "AdminClient", request: str) -> Prompt:
    """Raises RefusedError where the node does not know it, or more than one such."""
    answer = node.prompt(request)
    try:
        return Prompt(
            str(answer["request_id"]),
            bytes.fromhex(answer["namespace"]),
            int(answer["chunk_tokens"]),
            tuple(bytes.fromhex(chunk) for chunk in answer["chunks"]),
            tuple(int(nbytes) for nbytes in answer["part_bytes"]),
            tuple(int(number) for number in answer["trailing"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"the node's answer about request {request!r} does not fit ({error})") from error
