"""Why recent requests went where they went: a bounded ring of records, made readable when asked. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

MAX_RECORDS = 4096
MAX_CANDIDATES = 8  # of one request, the cheapest


class Cost(NamedTuple):
    """Of one request at one worker; seconds. total_s is what is compared, the rest what it consists of.

    engine, memory, shared tokens: of the prompt's start, in the engine, at most in its host's memory, at most
    in a shared tier. cached_tokens: what is not to be computed.
    """

    total_s: float
    wait_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    work_s: float
    factor: float
    engine_tokens: int
    memory_tokens: int
    shared_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """What a client waits for the first token."""
        return max(self.wait_s, self.load_s) + self.prefill_s

    def document(self) -> dict[str, object]:
        """For people and programs: milliseconds and tokens."""
        return {
            "cost_ms": _ms(self.total_s),
            "ttft_ms": _ms(self.ttft_s),
            "wait_ms": _ms(self.wait_s),
            "load_ms": _ms(self.load_s),
            "prefill_ms": _ms(self.prefill_s),
            "decode_ms": _ms(self.decode_s),
            "work_ms": _ms(self.work_s),
            "slowness": round(self.factor, 2),
            "engine_tokens": self.engine_tokens,
            "memory_tokens": self.memory_tokens,
            "shared_tokens": self.shared_tokens,
            "cached_tokens": self.cached_tokens,
        }


class Record(msgspec.Struct):
    """One request. reason: why not simply the cheapest, where that is so."""

    request_id: str
    model: str
    worker: str
    reason: str
    workers: int
    prompt_tokens: int
    expected: Cost
    candidates: Sequence[tuple[str, Cost]]
    ttft_s: float | None = None
    cached_tokens: int | None = None
    seen_prompt_tokens: int | None = None
    ended: str = ""

    def document(self) -> dict[str, object]:
        """For people and programs."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "worker": self.worker,
            "reason": self.reason,
            "workers": self.workers,
            "prompt_tokens_expected": self.prompt_tokens,
            "prompt_tokens": self.seen_prompt_tokens,
            "cached_tokens_expected": self.expected.cached_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_ms_expected": _ms(self.expected.ttft_s),
            "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s),
            "ended": self.ended,
            "candidates": [{"worker": worker, **cost.document()} for worker, cost in self.candidates],
        }


class ExplainRing:
    """The newest, by request id; a request that was tried again is known by its last worker."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """A choice was made. Of its candidates the cheapest are kept."""
        record.candidates = sorted(record.candidates, key=_total)[:MAX_CANDIDATES]
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def find(self, wanted: str) -> dict[str, object] | None:
        """By its id, or the newest whose id the wanted one contains or begins."""
        record = self._records.get(wanted)
        if record is None and wanted:
            record = next(
                (known for known in reversed(self._records.values()) if _is_meant(known.request_id, wanted)),
                None,
            )
        return None if record is None else record.document()


def _is_meant(request_id: str, wanted: str) -> bool:
    """Engines put something before and after the id they are told."""
    return request_id.startswith(wanted) or (bool(request_id) and request_id in wanted)


def _total(candidate: tuple[str, Cost]) -> float:
    return candidate[1].total_s


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
