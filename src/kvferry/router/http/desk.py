"""What the proxy asks of the rest of the router, about each request. ``app`` answers."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvferry.router.contract import Asked, Flight
from kvferry.router.health import Failure
from kvferry.router.http.head import Fields

if TYPE_CHECKING:
    from kvferry.router.http.errand import Errand


class Request(msgspec.Struct, frozen=True):
    """As it was read. target: path and query. fields: without those of one hop. peer: client's address.

    upgrade: what it asks to speak from then on, if another protocol.
    """

    method: bytes
    target: bytes
    fields: Fields
    body: bytes
    request_id: str
    peer: str
    upgrade: bytes = b""

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def asks_health(self) -> bool:
        """Whether it is a question after the router's own health."""
        return self.method in (b"GET", b"HEAD") and self.path == "/health"

    def field(self, name: bytes) -> bytes | None:
        """The first field of that name, which is in small letters."""
        return next((value for key, value in self.fields if key.lower() == name), None)


class Order(msgspec.Struct, frozen=True):
    """What is to be done. body: for the worker. fields: for the worker.

    repeatable: whether it may be sent once more where no byte of an answer came. pool: whose workers.
    stream: whether its answer comes in pieces. came: when it was read. reply: a JSON document, where the
    router answers itself. parted: only for workers that read its salt, which not all do. caller: whose it is,
    for turns in the queue: API keys cost nothing to make up, so one that no trust file lists counts as its
    address.
    """

    request: Request
    asked: Asked
    body: bytes
    fields: Fields
    repeatable: bool
    pool: str = ""
    stream: bool = False
    came: float = 0.0
    reply: bytes | None = None
    parted: bool = False
    caller: str = ""

    @property
    def wants(self) -> tuple[str, str, str]:
        """The same for all that the same workers may have: pool, model and, where it counts, path."""
        return self.pool, self.asked.model, self.request.path if self.parted else ""


class Desk(Protocol):
    """Reads and chooses."""

    def read(self, request: Request) -> Order:
        """On any thread: large ones are read beside the loop. Raises RefusedError: the client's fault."""
        ...

    def before(self, order: Order, then: Callable[[Order], None]) -> "Errand | None":
        """What is to go on before it, if anything: ``then`` gets the order to go on with."""
        ...

    def candidates(self, order: Order, tried: Collection[str]) -> Sequence[str]:
        """Who may be sent it now, but for those tried. Raises TurnedAwayError where nobody ever may."""
        ...

    def begin(self, order: Order, *, among: Sequence[str], now: float) -> Flight:
        """Choose and count it: see ``contract.Guide``."""
        ...

    def sent(self, order: Order) -> None:
        """It is on its way for the first time."""
        ...

    def answered(self, worker: str, status: int, now: float) -> None:
        """An answer begins: for the worker's health."""
        ...

    def failed(self, worker: str, what: Failure, now: float) -> None:
        """There was none, or it broke off: for the worker's health."""
        ...
