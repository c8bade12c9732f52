"""Sessions of coding agents, as kv-cache-tester (WEKA) publishes them: one JSON object per session.

A session has ``block_size``, ``hash_id_scope`` ("local": identifiers mean something within the session only)
and ``requests``, each with ``t`` (seconds from the session's start), ``in``, ``out`` and ``hash_ids``, or
``hash_ids_rle``: ``[[first, count], ...]``. A request of type "subagent" holds requests of its own, timed
from its own start. Requests are read in the order of their times.
"""

from array import array
from collections.abc import Iterable, Iterator
from operator import attrgetter

import msgspec

from kvferry.traces import blocks
from kvferry.traces.formats import Clock, Opening, decoded
from kvferry.traces.request import MAX_TOKENS, MalformedError, Request

_LOCAL_BITS = 32
_SCOPE_BITS = 62  # a scope and an identifier make a key of 63 bits
_MAX_DEPTH = 8


class _Turn(msgspec.Struct):
    t: float = 0.0
    type: str = ""
    input_tokens: int | None = msgspec.field(name="in", default=None)
    output_tokens: int | None = msgspec.field(name="out", default=None)
    hash_ids: list[int | str] | None = None
    hash_ids_rle: list[tuple[int, int]] | None = None
    requests: "list[_Turn] | None" = None


class _Session(msgspec.Struct):
    requests: list[_Turn]
    block_size: int
    id: str | int = ""
    hash_id_scope: str = "local"


class AgentSessions:
    """kv-cache-tester sessions."""

    format = "kv-cache-tester"
    clock = Clock.SESSION
    note = ""

    def __init__(self, block_tokens: int, file: str) -> None:
        self.block_tokens = block_tokens
        self._file = file
        self._decoder = msgspec.json.Decoder(_Session, strict=False)
        self._sessions = 0

    @classmethod
    def of(cls, opening: Opening) -> "AgentSessions | None":
        """A reader, if the first objects are sessions."""
        for record in opening.objects:
            size = record.get("block_size")
            if isinstance(record.get("requests"), list) and isinstance(size, int) and size > 0:
                return cls(size, str(opening.path))
        return None

    def requests(self, line: bytes) -> Iterable[Request]:
        """A session's requests. Raises MalformedError."""
        session = decoded(line, self._decoder)
        if session.block_size != self.block_tokens:
            raise MalformedError("block_size is not that of the sessions before")
        self._sessions += 1
        place = f"{self._file} session {self._sessions}"
        scope = blocks.seed_of(place) >> (64 - _SCOPE_BITS) if session.hash_id_scope == "local" else 0
        name = str(session.id) or place
        found = list(_turns(session.requests, start_s=0.0, depth=0))
        made = [self._request(turn, at_s, name, scope) for at_s, turn in found]
        return sorted(made, key=attrgetter("time_s"))

    def _request(self, turn: _Turn, at_s: float, session: str, scope: int) -> Request:
        if turn.input_tokens is None or turn.input_tokens < 1:
            raise MalformedError("a request of the session has no input tokens")
        most = -(-min(turn.input_tokens, MAX_TOKENS) // self.block_tokens)
        keys = _keys(turn, scope, most)
        if keys is not None and len(keys) // 8 > most:
            raise MalformedError("a request of the session has more blocks than input tokens")
        return Request(
            time_s=at_s,
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            blocks=keys,
            session=session,
        )


def _turns(requests: Iterable[_Turn], *, start_s: float, depth: int) -> Iterator[tuple[float, _Turn]]:
    """Requests with their times from the session's start."""
    if depth > _MAX_DEPTH:
        raise MalformedError(f"subagents are nested more than {_MAX_DEPTH} deep")
    for turn in requests:
        if turn.requests is None:
            yield start_s + turn.t, turn
        else:
            yield from _turns(turn.requests, start_s=start_s + turn.t, depth=depth + 1)


def _keys(turn: _Turn, base: int, most: int) -> bytes | None:
    """Block keys, told apart by ``base`` (0: not) from other sessions'. Of runs, at most ``most`` blocks."""
    if turn.hash_ids_rle is not None:
        keys = array("q")
        for first, count in turn.hash_ids_rle:
            if not 0 <= first <= first + count < 1 << _LOCAL_BITS or len(keys) + count > most:
                raise MalformedError("hash_ids_rle is out of bounds")
            keys.extend(range(base + first, base + first + count))
        return keys.tobytes()
    if turn.hash_ids is None:
        return None
    if not base:
        return blocks.of_ids(turn.hash_ids)
    if all(isinstance(name, int) and 0 <= name < 1 << _LOCAL_BITS for name in turn.hash_ids):
        return blocks.of_ids([base + int(name) for name in turn.hash_ids])
    return blocks.of_ids([f"{base} {name}" for name in turn.hash_ids])
