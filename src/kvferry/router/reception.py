"""Reads requests, says who may be asked, and lets the guide of their pool choose: the proxy's ``Desk``.

request ──trust──► salt ──reading──► keys, model ──roster──► candidates ──guide──► worker
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from kvferry.identity.names import DIGEST_BYTES
from kvferry.router.contract import Asked, Flight, Guide
from kvferry.router.flight import CostFlight
from kvferry.router.health import Change, Failure, Health, blames
from kvferry.router.http.desk import Order, Request
from kvferry.router.http.refusals import TurnedAwayError
from kvferry.router.models import unknown_model
from kvferry.router.reading import Reader, Reading
from kvferry.router.roster import DEFAULT_POOL, Roster, Served
from kvferry.router.trust import StrangerError, Trust

# What an engine may compute twice: nobody sees the first time, and nothing is kept of it.
_REPEATABLE = frozenset(
    "/v1/" + name
    for name in ("completions", "chat/completions", "embeddings", "score", "rerank", "messages", "responses")
) | frozenset(("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank"))
_NOTHING = Reading(model="")
# Bodies that no worker reads as JSON.
_MEDIA = (b"multipart/", b"audio/", b"image/", b"video/", b"application/octet-stream")


def _is_media(request: Request) -> bool:
    return (request.field(b"content-type") or b"").lower().startswith(_MEDIA)


class Reception:
    """``read`` on any thread, the rest on the loop."""

    def __init__(
        self,
        *,
        roster: Roster,
        trust: Trust,
        make_guide: Callable[[], Guide],
        seed: int,
        apart_bytes: int,
        changed: Callable[[str, Change], None],
        prefetch: Callable[[str, bytes, Sequence[bytes]], object],
    ) -> None:
        """seed: of the keys. apart_bytes: bodies from here on are read beside the loop.

        changed: what a request led to for its worker's state. prefetch: tells a node what will be wanted.
        """
        self.roster = roster
        self.trust = trust
        self._make_guide = make_guide
        self._guides: dict[str, Guide] = {}
        self._apart_bytes = apart_bytes
        self._reader = Reader(seed)
        self._reader_apart = Reader(seed)  # of the other thread
        self._changed = changed
        self._prefetch = prefetch

    @property
    def guides(self) -> Mapping[str, Guide]:
        """By pool."""
        return self._guides

    def guide(self, pool: str) -> Guide:
        """That of the pool."""
        found = self._guides.get(pool)
        if found is None:
            found = self._guides[pool] = self._make_guide()
        return found

    def read(self, request: Request) -> Order:
        """See ``Desk``."""
        path = request.path
        try:
            caller = self.trust.caller(request.fields)
            body, salt, reading = request.body, "", _NOTHING
            if body and request.method == b"POST" and not _is_media(request):
                salt, body = self.trust.settled(caller, body)
                reader = self._reader if len(request.body) < self._apart_bytes else self._reader_apart
                reading = reader.read(path, body, salt, ignore_own_salt=True)
        except StrangerError as error:
            raise TurnedAwayError(401, str(error)) from error
        asked = Asked(
            request.request_id,
            reading.model,
            reading.keys,
            salt=salt,
            session=reading.session,
            max_tokens=reading.max_tokens,
        )
        repeatable = request.method in (b"GET", b"HEAD", b"OPTIONS") or path in _REPEATABLE
        return Order(request, asked, body, request.fields, repeatable, pool=DEFAULT_POOL)

    def candidates(self, order: Order, tried: Collection[str]) -> Sequence[str]:
        """See ``Desk``."""
        model = order.asked.model
        found = self.roster.candidates(order.pool, model, tried=tried)
        if not found and model and not tried and self.roster.served(order.pool, model) is Served.NO:
            known = (name.name for worker in self.roster for name in worker.models or ())
            raise TurnedAwayError(404, unknown_model(model, known))
        return found

    def begin(self, order: Order, *, among: Sequence[str], now: float) -> Flight:
        """See ``Desk``."""
        flight = self.guide(order.pool).begin(order.asked, among=among, now=now)
        wish = flight.wish if isinstance(flight, CostFlight) else None
        if wish is not None:
            starts = range(0, len(wish.digests), DIGEST_BYTES)
            self._prefetch(wish.node, wish.namespace, [wish.digests[at : at + DIGEST_BYTES] for at in starts])
        return flight

    def answered(self, worker: str, status: int, now: float) -> None:
        """See ``Desk``."""
        if blames(status):
            self.failed(worker, Failure.ERROR, now)
        elif status < 400:
            self.note(worker, Health.succeeded)

    def failed(self, worker: str, what: Failure, now: float) -> None:
        """See ``Desk``."""
        self.note(worker, lambda health: health.failed(what, now))

    def note(self, url: str, event: Callable[[Health], Change]) -> None:
        """Something showed a worker's health: from a request, or a probe."""
        change = self.roster.note(url, event)
        if change is None:
            return
        worker = self.roster.get(url)
        if change.lost and worker is not None:
            guide = self.guide(worker.pool)
            guide.worker_lost(url)
            guide.worker_added(url)
        if change.before is not change.after or change.lost:
            self._changed(url, change)

    def forget(self, url: str) -> None:
        """A worker has left, whichever pool it was in."""
        for guide in self._guides.values():
            guide.worker_lost(url)

    def explain(self, request_id: str) -> Mapping[str, object] | None:
        """Why a recent request went where it went."""
        return next(
            (told for guide in self._guides.values() if (told := guide.explain(request_id)) is not None), None
        )
