"""Copies of requests for another pool: answers are measured and thrown away, and nobody waits for them.

A copy is made when the request itself is on its way. It is the same bytes in memory, is sent once, and is not
made where too many are in flight or no worker has room: what clients get never depends on it.
"""

from msgspec.structs import replace

from kvferry.errors import BrokenError
from kvferry.router.http.desk import Order
from kvferry.router.http.errand import Errand, Outcome
from kvferry.router.http.guard import Guard
from kvferry.router.http.proxy import Proxy
from kvferry.router.pilots import MeasuredFlight, Pilots
from kvferry.router.reception import Reception

MAX_COPIES = 64
DEADLINE_S = 600.0


class Copies:
    """Those in flight."""

    def __init__(
        self, proxy: Proxy, reception: Reception, pilots: Pilots, *, limit: int = MAX_COPIES
    ) -> None:
        self._proxy = proxy
        self._reception = reception
        self._pilots = pilots
        self._limit = limit
        self._flying: set[Errand] = set()

    def __len__(self) -> int:
        return len(self._flying)

    def make(self, order: Order) -> None:
        """Of this request, which was sent just now, to the pool of the mirror."""
        share, proxy = self._pilots.mirror, self._proxy
        if share is None:
            raise BrokenError("a copy without a mirror")
        told = self._pilots.of("mirror", share.pool)
        among = [url for url in self._reception.able(order, share.pool) if proxy.has_room(url)]
        if len(self._flying) >= self._limit or not among or not proxy.hold(len(order.body)):
            told.skipped += 1
            return
        now = proxy.now()
        asked = replace(order.asked, request_id=f"{order.asked.request_id}-copy")
        flight = self._reception.guide(share.pool).begin(asked, among=among, now=now)
        told.saw(asked)
        measured = MeasuredFlight(flight, told, came=now, stream=order.stream)

        def done(_: Outcome) -> None:
            proxy.let_go(len(order.body))
            if errand is not None:
                self._flying.discard(errand)

        errand: Errand | None = None
        errand = Errand(
            order,
            Guard(measured, proxy.link(flight.worker)),
            self._reception,
            request_id=asked.request_id,
            deadline_s=DEADLINE_S,
            now=proxy.now,
            done=done,
        )
        self._flying.add(errand)

    def close(self) -> None:
        """All are cut."""
        for errand in list(self._flying):
            errand.cut()
