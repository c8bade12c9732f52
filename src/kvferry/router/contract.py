"""What the proxy and the choice of workers say to each other. Pure; times are monotonic seconds.

proxy: read ──Asked──► Guide.begin ──Flight──► sent to flight.worker
       first byte of the answer ─────────► flight.first_byte
       each piece of a streamed answer ──► flight.token
       whatever ends it, exactly once ───► flight.end, which gives its load back
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec


class Ended(enum.Enum):
    """How a request ended at its worker."""

    DONE = "done"
    REFUSED = "refused"  # 4xx: never the worker's fault
    ABORTED = "aborted"  # the client left
    FAILED = "failed"  # 5xx, connection lost, or no byte in time


class Key(NamedTuple):
    """A prefix of a prompt up to a boundary. name: of all text so far; length: its characters."""

    name: bytes
    length: int


class Asked(msgspec.Struct, frozen=True):
    """One request as a choice sees it.

    request_id: what its worker is told (``X-Request-Id``). keys: of its prefixes, shortest first; empty: it
    has no prompt. salt: in the keys already. session: of the policy that wants one. max_tokens: 0 while
    unknown. streamed: its first byte tells that its prefill is over; else all of the answer comes at once.
    opening: of a conversation, in all its turns; empty where none is known.
    """

    request_id: str
    model: str
    keys: tuple[Key, ...]
    salt: str = ""
    session: str = ""
    max_tokens: int = 0
    streamed: bool = True
    opening: str = ""


class Usage(msgspec.Struct, frozen=True):
    """From an answer's ``usage``. cached_tokens: None where the worker does not say."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


class Flight(Protocol):
    """A request at a worker: the one owner of its load. To be ended exactly once."""

    @property
    def worker(self) -> str:
        """URL of the worker it is for."""
        ...

    def sent(self) -> None:
        """It is on its way: what the choice left for later is done now, or else with the next step."""
        ...

    def first_byte(self, now: float) -> None:
        """The answer begins: its prefill is over."""
        ...

    def token(self, now: float) -> None:
        """A piece of a streamed answer came."""
        ...

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """Its load is returned. A second call raises BrokenError."""
        ...


class Guide(Protocol):
    """Decides; one per model pool. Policies are implementations of it."""

    def begin(self, asked: Asked, *, among: Sequence[str], now: float) -> Flight:
        """Choose one of these and count it. among: not empty; healthy, not tried yet for this request."""
        ...

    def worker_added(self, worker: str) -> None:
        """It may be among the candidates from now on; twice is once."""
        ...

    def worker_lost(self, worker: str) -> None:
        """It is removed, or may have restarted: what it held itself is unknown now."""
        ...

    def explain(self, request_id: str) -> Mapping[str, object] | None:
        """Why a recent request went where it went."""
        ...

    def statistics(self) -> Mapping[str, object]:
        """Counts for ``/metrics`` and status: by worker, waiting prefill tokens, requests, hits expected."""
        ...
