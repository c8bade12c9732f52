"""Requests on their way, until a node tells their chunks: worker, and names of prefixes. Pure."""

import re
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from kvferry.router.contract import Key
from kvferry.router.knowledge.seen import Mark

MAX_SENT = 1 << 14
MAX_SENT_NAMES = 1 << 17  # of all of them

_BEFORE = re.compile(r"^(?:chatcmpl-|cmpl-|resp_|embd-)")
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_NUMBER = re.compile(r"-(\d+)$")


class Sent(msgspec.Struct, frozen=True):
    """One of them."""

    worker: str
    model: str
    keys: tuple[Key, ...]
    mark: Mark
    engine_tokens: int = 0  # expected in the worker's own cache


class SentRequests:
    """By the id that the worker was told. The oldest are forgotten."""

    def __init__(self, limit: int = MAX_SENT, limit_names: int = MAX_SENT_NAMES) -> None:
        self._limit = limit
        self._limit_names = limit_names
        self._requests: OrderedDict[str, Sent] = OrderedDict()
        self._names = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, sent: Sent) -> None:
        """It is on its way; the same id again is the same request at another worker."""
        self.pop(request_id)
        self._requests[request_id] = sent
        self._names += len(sent.keys)
        while self._requests and (len(self._requests) > self._limit or self._names > self._limit_names):
            self._names -= len(self._requests.popitem(last=False)[1].keys)

    def pop(self, request_id: str) -> Sent | None:
        """Exactly this id."""
        sent = self._requests.pop(request_id, None)
        if sent is not None:
            self._names -= len(sent.keys)
        return sent

    def told(self, engine_id: str) -> Sent | None:
        """The request that an engine calls so; only the first of several prompts is meant."""
        for request_id, prompt in inner_ids(engine_id):
            if request_id in self._requests:
                return self.pop(request_id) if prompt == 0 else None
        return None


def inner_ids(engine_id: str) -> Iterator[tuple[str, int]]:
    """What the engine may have been told, which may look wrapped itself; and the number of its prompt.

    vLLM wraps an id: ``cmpl-<id>-<prompt>-<random>``, ``chatcmpl-<id>-<random>``.
    """
    for whole in (engine_id, _BEFORE.sub("", engine_id)):
        yield whole, 0
        shorter = _RANDOM.sub("", whole)
        if shorter != whole:
            yield shorter, 0
        match = _NUMBER.search(shorter)
        if match is not None:
            yield shorter[: match.start()], int(match[1])
