"""Prompts are prefilled by workers of a pool of their own, then answered by the others.

    request ──► prefill worker: the same, one token ──kv_transfer_params──► decode worker: the request

As vLLM's connectors want it: ``do_remote_decode`` goes to the first, and what it answers with to the second.
kvferry's own connector answers with nothing, for the second finds the prefix in the shared tiers. Whatever
goes wrong before costs a recompute: the request goes on without.
"""

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvferry.errors import RefusedError
from kvferry.router.contract import Ended
from kvferry.router.fields import edited
from kvferry.router.http.desk import Order
from kvferry.router.http.errand import Errand, Outcome
from kvferry.router.http.guard import Guard
from kvferry.router.http.proxy import Proxy
from kvferry.router.reception import PREFILL_SUFFIX, Reception
from kvferry.router.roster import PREFILL_POOL

PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages"))
MIN_CHARACTERS = 4096  # of a prompt: shorter ones are quicker where they are answered
DEADLINE_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
_FIELD = "kv_transfer_params"
_ONE_TOKEN = {
    "max_tokens": b"1",
    "stream": b"false",
    _FIELD: msgspec.json.encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    ),
}
_NOT_WITH_ONE = ("max_completion_tokens", "min_tokens", "stream_options", "n", "best_of")


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_ANSWER = msgspec.json.Decoder(_Answer)


class Prefill:
    """Before each request with a long prompt, where workers are in the pool ``prefill``."""

    def __init__(self, proxy: Proxy, reception: Reception) -> None:
        self._proxy = proxy
        self._reception = reception

    def before(self, order: Order, then: Callable[[Order], None]) -> Errand | None:
        """What goes on first, to be cut if the request is. None: nothing, and ``then`` is not called."""
        asked, proxy = order.asked, self._proxy
        if order.request.path not in PATHS or not asked.keys or asked.keys[-1].length < MIN_CHARACTERS:
            return None
        among = [url for url in self._reception.able(order, PREFILL_POOL) if proxy.has_room(url)]
        if not among:
            return None
        try:
            first = replace(order, body=edited(order.body, _ONE_TOKEN, drop=_NOT_WITH_ONE))
        except RefusedError:
            return None  # the worker says it better
        request_id = f"{asked.request_id}{PREFILL_SUFFIX}"
        flight = self._reception.guide(PREFILL_POOL).begin(
            replace(asked, request_id=request_id, max_tokens=1), among=among, now=proxy.now()
        )

        def done(outcome: Outcome) -> None:
            proxy.count("prefilled" if outcome.how is Ended.DONE else f"prefill_{outcome.how.value}")
            then(_with_answer(order, outcome))

        return Errand(
            first,
            Guard(flight, proxy.link(flight.worker)),
            self._reception,
            request_id=request_id,
            deadline_s=DEADLINE_S,
            now=proxy.now,
            done=done,
            keep_bytes=MAX_ANSWER_BYTES,
        )


def _with_answer(order: Order, outcome: Outcome) -> Order:
    """The request for the second worker."""
    if outcome.how is not Ended.DONE or not outcome.body:
        return order
    try:
        params = _ANSWER.decode(outcome.body).kv_transfer_params
        if not isinstance(msgspec.json.decode(params), dict):
            return order
        return replace(order, body=edited(order.body, {_FIELD: bytes(params)}))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RefusedError):
        return order
