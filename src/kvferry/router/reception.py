"""Reads requests, says who may be asked, and lets the guide of their pool choose: the proxy's ``Desk``.

request ──trust──► salt ──reading──► keys, model ──roster──► candidates ──guide──► worker
"""

import functools
import ipaddress
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvferry.router.contract import Asked, Flight, Guide
from kvferry.router.control import NOT_FOR_CLIENTS, controls, reads_salt
from kvferry.router.descriptors import Complaint
from kvferry.router.fields import looks_like_object
from kvferry.router.flight import CostFlight
from kvferry.router.health import Change, Failure, Health, State, blames
from kvferry.router.http.desk import Order, Request
from kvferry.router.http.errand import Errand
from kvferry.router.http.head import Fields
from kvferry.router.http.refusals import TurnedAwayError
from kvferry.router.models import merged, unknown_model
from kvferry.router.pilots import MeasuredFlight, Pilots
from kvferry.router.reading import Reader, Reading
from kvferry.router.roster import DEFAULT_POOL, PREFILL_POOL, Roster, Served
from kvferry.router.trust import KEY_FIELDS, TRANSFER, StrangerError, Trust

_TRANSFER = TRANSFER.encode()

# What an engine may compute twice: nobody sees the first time, and nothing is kept of it.
_REPEATABLE = frozenset(
    "/v1/" + name
    for name in ("completions", "chat/completions", "embeddings", "score", "rerank", "messages", "responses")
) | frozenset(("/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank"))
PREFILL_SUFFIX = "-prefill"  # of a request's id, where it is prefilled
_NOTHING = Reading(model="")
# Bodies that no worker reads as JSON.
_ABOUT_BODY = frozenset((b"content-type", b"content-encoding"))
_CHARSET = re.compile(rb"charset\s*=\s*\"?([^\s;\"]*)")
_UTF8 = (b"utf-8", b"utf8", b"us-ascii")
_NO_SALT = (
    "engines read no cache_salt here (a form, WebSocket, Cohere's API ...), so KV cannot be kept apart from "
    "that of other callers; whoever runs the router can let it pass: unsalted in the trust file"
)
_MEDIA = (b"multipart/", b"audio/", b"image/", b"video/", b"application/octet-stream")


def _is_media(request: Request) -> bool:
    """Whether no worker finds JSON in its body. Raises TurnedAwayError where it cannot be told."""
    said: dict[bytes, list[bytes]] = {}
    for name, value in request.fields:
        if (key := name.lower()) in _ABOUT_BODY:
            said.setdefault(key, []).append(value.lower())
    if said.get(b"content-encoding", [b"identity"]) != [b"identity"]:
        raise TurnedAwayError(415, "bodies are taken as they are, without Content-Encoding")
    kinds = said.get(b"content-type", [b""])
    if len(kinds) > 1:
        raise TurnedAwayError(400, "more than one Content-Type")
    charset = _CHARSET.search(kinds[0])
    if charset is not None and charset[1] not in _UTF8:
        raise TurnedAwayError(415, "text is taken in UTF-8 alone")
    return kinds[0].startswith(_MEDIA) and not looks_like_object(request.body)


@functools.lru_cache(maxsize=4096)
def network(peer: str) -> str:
    """Whose address it is: of IPv6, a host has 2^64."""
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


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
        prefetch: Callable[[str, bytes, bytes], object],
        pilots: Pilots | None = None,
        worker_key: str = "",
        control: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seed: of the keys. apart_bytes: bodies from here on are read beside the loop.

        changed: what a request led to for its worker's state. prefetch: tells a node what will be wanted.
        worker_key: the API key that workers get in place of the callers' own; empty: those. control: clients
        may control engines.
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
        self._pilots = pilots if pilots is not None else Pilots()
        self._worker_key = f"Bearer {worker_key}".encode() if worker_key else b""
        self._clock = clock
        self._no_descriptors = Complaint()
        self.control = control
        self.copy: Callable[[Order], None] | None = None  # to the mirror's pool
        self.prefill: Callable[[Order, Callable[[Order], None]], Errand | None] | None = None
        self.given: Callable[[str, Order], None] | None = None  # a request was given to a worker
        self.look_again: Callable[[str], None] | None = None  # for models of a pool

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
        path, came = request.path, self._clock()
        if request.asks_health:
            return self._health(request)
        if not self.control and controls(request.target):
            raise TurnedAwayError(403, NOT_FOR_CLIENTS)
        try:
            caller = self.trust.caller(request.fields)
            body, salt, reading = request.body, "", _NOTHING
            if body and not _is_media(request):
                reader = self._reader if len(request.body) < self._apart_bytes else self._reader_apart
                opened = reader.open(path, body, without=_TRANSFER)
                salt, body = self.trust.settled(caller, body, plain=opened is not None)
                with_opening = self._pilots.active
                if opened is not None:
                    reading = reader.named(opened, salt, with_opening=with_opening)
                else:
                    reading = reader.whole(path, body, salt, ignore_own_salt=True, with_opening=with_opening)
        except StrangerError as error:
            raise TurnedAwayError(401, str(error)) from error
        parted = self.trust.parted(salt or caller.salt) and bool(request.upgrade or body)
        if parted and (request.upgrade or body is request.body):
            raise TurnedAwayError(403, _NO_SALT)
        asked = Asked(
            request.request_id,
            reading.model,
            reading.keys,
            salt=salt,
            session=reading.session,
            max_tokens=reading.max_tokens,
            streamed=reading.stream,
            opening=reading.opening,
        )
        return Order(
            request,
            asked,
            body,
            self._fields(request.fields),
            request.method in (b"GET", b"HEAD", b"OPTIONS") or path in _REPEATABLE,
            pool=self._pilots.pool(asked, DEFAULT_POOL) if reading.keys else DEFAULT_POOL,
            stream=reading.stream,
            came=came,
            parted=parted and not reads_salt(request.target, ""),
            reply=self._models() if path == "/v1/models" and request.method == b"GET" else None,
            caller=f"group {caller.group}" if caller.listed else network(request.peer),
        )

    def able(self, order: Order, pool: str, *, tried: Collection[str] = ()) -> Sequence[str]:
        """Who of this pool may have it now: whoever may be asked and, where that counts, reads its salt."""
        workers = self.roster.candidates(pool, order.asked.model, tried=tried)
        if not order.parted:
            return workers
        target = order.request.target
        reads = {kind: reads_salt(target, kind) for kind in set(map(self._engine, workers))}
        return workers if all(reads.values()) else [url for url in workers if reads[self._engine(url)]]

    def _may_read(self, order: Order, pool: str) -> bool:
        """Whether some worker reads that salt, or may turn out to: it has not said yet what it is."""
        model, target = order.asked.model, order.request.target
        there = [
            worker
            for worker in self.roster
            if worker.pool == pool and not worker.leaving and worker.may_serve(model)
        ]
        return not there or any(
            worker.models is None or worker.state is State.DOWN or reads_salt(target, worker.engine)
            for worker in there
        )

    def _engine(self, url: str) -> str:
        worker = self.roster.get(url)
        return worker.engine if worker is not None else ""

    def _fields(self, fields: Fields) -> Fields:
        """For a worker."""
        if not self._worker_key:
            return fields
        kept = [field for field in fields if field[0].lower() not in KEY_FIELDS]
        kept.append((b"Authorization", self._worker_key))
        return kept

    def _health(self, request: Request) -> Order:
        """Of the router itself, for whoever balances loads over several; no key is asked for.

        Raises TurnedAwayError where no worker may be asked.
        """
        if not self.roster.candidates(DEFAULT_POOL, ""):
            raise TurnedAwayError(503, "no worker is available")
        asked = Asked(request.request_id, "", ())
        return Order(request, asked, b"", request.fields, repeatable=True, reply=b'{"status":"ok"}')

    def _models(self) -> bytes | None:
        """Of all workers that clients reach; None while nobody has said any."""
        known = [
            worker.models
            for worker in self.roster
            if worker.models is not None and worker.pool == DEFAULT_POOL and not worker.leaving
        ]
        return merged(known) if known else None

    def before(self, order: Order, then: Callable[[Order], None]) -> Errand | None:
        """See ``Desk``."""
        return self.prefill(order, then) if self.prefill is not None else None

    def candidates(self, order: Order, tried: Collection[str]) -> Sequence[str]:
        """See ``Desk``."""
        model, pool = order.asked.model, order.pool
        found = self.able(order, pool, tried=tried)
        if not found and pool != DEFAULT_POOL:  # a pilot's pool may fail: its requests do not
            pool = DEFAULT_POOL
            found = self.able(order, pool, tried=tried)
        if not found and order.parted and not tried and not self._may_read(order, pool):
            raise TurnedAwayError(403, _NO_SALT)
        if not found and model and not tried and self.roster.served(pool, model) is Served.NO:
            if self.look_again is not None:
                self.look_again(pool)
            known = (
                name.name for worker in self.roster if worker.pool == pool for name in worker.models or ()
            )
            raise TurnedAwayError(404, unknown_model(model, known))
        return found

    def begin(self, order: Order, *, among: Sequence[str], now: float) -> Flight:
        """See ``Desk``."""
        worker = self.roster.get(among[0])
        pool = worker.pool if worker is not None else order.pool
        flight = self.guide(pool).begin(order.asked, among=among, now=now)
        if self.given is not None:
            self.given(flight.worker, order)
        wish = flight.wish if isinstance(flight, CostFlight) else None
        if wish is not None:
            self._prefetch(wish.node, wish.namespace, wish.digests)
        return self._measured(flight, order, pool) if self._pilots.active and order.asked.keys else flight

    def _measured(self, flight: Flight, order: Order, pool: str) -> Flight:
        kinds = ["split"] if self._pilots.split is not None else []
        kinds += ["original"] if self._mirrored(order) else []
        for kind in kinds:
            told = self._pilots.of(kind, pool)
            told.saw(order.asked)
            flight = MeasuredFlight(flight, told, came=order.came, stream=order.stream)
        return flight

    def sent(self, order: Order) -> None:
        """See ``Desk``."""
        if self.copy is not None and order.repeatable and self._mirrored(order):
            self.copy(order)

    def _mirrored(self, order: Order) -> bool:
        """What a pilot's pool gets is not copied: the usual pool is what a mirror is compared with."""
        return order.pool == DEFAULT_POOL and self._pilots.mirrored(order.asked)

    def answered(self, worker: str, status: int, now: float) -> None:
        """See ``Desk``."""
        if blames(status):
            self.failed(worker, Failure.ERROR, now)
        elif status < 400:
            self.note(worker, Health.succeeded)

    def failed(self, worker: str, what: Failure, now: float) -> None:
        """See ``Desk``."""
        if what is Failure.UNTRIED:
            self._no_descriptors.tell()
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
        """Why a recent request went where it went. prefill: the same, where it was prefilled by others."""
        answered = (guide for pool, guide in self._guides.items() if pool != PREFILL_POOL)
        told = next((told for guide in answered if (told := guide.explain(request_id)) is not None), None)
        before = self._guides.get(PREFILL_POOL)
        if before is None:
            return told
        name = request_id if told is None else f"{told.get('request_id')}{PREFILL_SUFFIX}"
        prefill = before.explain(name)
        if told is None or prefill is None or prefill.get("request_id") != name:
            return told if told is not None else prefill
        return {**told, "prefill": prefill}
