"""The latest events of a feed, numbered, as frames: what a router that was away for a moment lacks. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import BrokenError
from kvferry.feed.framing import encode
from kvferry.feed.wire import MAX_EVENTS, AnyEvent, EngineUp, Events, Gone, Held, Prompt, Result, Space
from kvferry.identity.names import DIGEST_BYTES

MAX_BYTES = 32 << 20
MAX_FRAME_DIGESTS = 1 << 15
"""In one frame, with one event more than reaches it: three quarters of what a frame may have."""
MAX_FRAME_TEXT_BYTES = 1 << 19
CHARACTER_BYTES = 4
"""At most."""
EVENT_BYTES = 300
BATCH_BYTES = 500


@dataclass(slots=True)
class _Batch:
    """frame: made when it is first sent."""

    first: int
    events: tuple[AnyEvent, ...]
    nbytes: int
    frame: bytes = b""


class Log:
    """next: the number of the event to come. oldest: of the earliest that is still known."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.next = 1
        self.oldest = 1
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._order: deque[_Batch] = deque()
        self._by_first: dict[int, _Batch] = {}

    def append(self, events: Sequence[AnyEvent]) -> None:
        """Give them the next numbers; the oldest make room."""
        for few in _frames(events):
            batch = _Batch(self.next, few, BATCH_BYTES + sum(map(_bytes, few)))
            self.next += len(few)
            self._order.append(batch)
            self._by_first[batch.first] = batch
            self._nbytes += batch.nbytes
        while self._nbytes > self._max_bytes and self._order:
            old = self._order.popleft()
            del self._by_first[old.first]
            self._nbytes -= old.nbytes
            self.oldest = old.first + len(old.events)

    def has(self, number: int) -> bool:
        """Whether who lacks the events from this one on can have them."""
        return self.oldest <= number <= self.next

    def frame(self, number: int) -> tuple[bytes, int]:
        """Events from that one on, and the number after them. Raises BrokenError for what is not there."""
        batch = self._by_first.get(number)
        if batch is not None:
            if not batch.frame:
                batch.frame = encode(Events(batch.first, batch.events))
            return batch.frame, number + len(batch.events)
        for batch in self._order:  # from within one: once per router that comes back
            if batch.first < number < batch.first + len(batch.events):
                rest = batch.events[number - batch.first :]
                return encode(Events(number, rest)), number + len(rest)
        raise BrokenError(f"no event {number}: there are {self.oldest} to {self.next - 1}")


def _frames(events: Sequence[AnyEvent]) -> Iterator[tuple[AnyEvent, ...]]:
    """As many together as a frame takes."""
    few: list[AnyEvent] = []
    digests = text_bytes = 0
    for event in events:
        few.append(event)
        digests += _digests(event)
        text_bytes += _text_bytes(event)
        if len(few) == MAX_EVENTS or digests >= MAX_FRAME_DIGESTS or text_bytes >= MAX_FRAME_TEXT_BYTES:
            yield tuple(few)
            few, digests, text_bytes = [], 0, 0
    if few:
        yield tuple(few)


def _digests(event: AnyEvent) -> int:
    return len(event.digests) // DIGEST_BYTES if isinstance(event, Held | Gone | Prompt) else 0


def _text_bytes(event: AnyEvent) -> int:
    match event:
        case Prompt(request_id=text) | EngineUp(name=text) | Space(label=text):
            return CHARACTER_BYTES * len(text)
        case Result(request_id=text, reason=reason):
            return CHARACTER_BYTES * (len(text) + len(reason))
        case _:
            return 0


def _bytes(event: AnyEvent) -> int:
    """Of memory, with the frame that it becomes."""
    return EVENT_BYTES + 2 * (DIGEST_BYTES * _digests(event) + _text_bytes(event))
