"""The one owner of what a request takes at its worker."""

from kvferry.errors import BrokenError
from kvferry.router.contract import Ended, Flight, Usage
from kvferry.router.http.link import Link


class Guard:
    """Holds a flight and a place at the worker's link from the choice to the end, which comes once."""

    __slots__ = ("_flight", "_link", "_open")

    def __init__(self, flight: Flight, link: Link) -> None:
        self._flight = flight
        self._link = link
        self._open = True
        link.in_flight += 1

    @property
    def link(self) -> Link:
        """To the worker that was chosen."""
        return self._link

    @property
    def worker(self) -> str:
        """Its URL."""
        return self._link.url

    def sent(self) -> None:
        """See ``Flight``."""
        self._flight.sent()

    def first_byte(self, now: float) -> None:
        """See ``Flight``."""
        self._flight.first_byte(now)

    def token(self, now: float) -> None:
        """See ``Flight``."""
        self._flight.token(now)

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """Gives everything back. Raises BrokenError the second time."""
        if not self._open:
            raise BrokenError("a request ended twice")
        self._open = False
        self._link.in_flight -= 1
        self._flight.end(how, now, usage)
