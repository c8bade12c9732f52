"""Why each recent request hit or missed: a bounded ring of records, one per request."""

import re
from collections import OrderedDict
from dataclasses import asdict, dataclass, field

from kvferry.node.wire import Reason, Report

MAX_RECORDS = 4096
MAX_MATCHES = 16

# vLLM wraps the id that a client sees: "cmpl-<id>-<prompt>-<random>", "chatcmpl-<id>-<random>".
_WRAPPED = re.compile(r"^(?:chatcmpl-|cmpl-|resp_)?(?P<id>.+?)(?:-\d+)?(?:-[0-9a-f]{8})?$")


@dataclass(slots=True)
class Record:
    """Times in seconds; ``at_s`` is monotonic. Chunk numbers count from the prompt's start."""

    request_id: str
    at_s: float
    engine: str = ""
    namespace: str = ""  # hexadecimal
    model: str = ""
    chunk_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    engine_chunks: int = 0
    reused_chunks: dict[str, int] = field(default_factory=dict[str, int])
    reused_bytes: dict[str, int] = field(default_factory=dict[str, int])
    first_missing_chunk: int | None = None
    missing_part: int | None = None  # a part number; why the boundary is not a later one
    missing_trailing: int | None = None  # 0: it is needed of every chunk; n: of the last n before a boundary
    reason: str = ""
    lookup_s: float = 0.0
    load_estimate_s: float = 0.0  # 0 while unknown
    recompute_estimate_s: float = 0.0  # 0 while unknown
    choice: str = ""
    deadline_s: float = 0.0
    load_s: float = 0.0
    load_reason: str = ""
    failed_chunk: int | None = None
    lookups: int = 0
    report: dict[str, object] = field(default_factory=dict[str, object])


def visible_id(request_id: str) -> str:
    """The id without what the engine put round it."""
    match = _WRAPPED.match(request_id)
    return match["id"] if match else request_id


class ExplainRing:
    """The newest ``MAX_RECORDS`` requests."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def record(self, request_id: str, now: float) -> Record:
        """The request's record, made when there is none."""
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = Record(request_id, now)
            while len(self._records) > self._limit:
                self._records.popitem(last=False)
        self._records.move_to_end(request_id)
        return record

    def ended(self, request_id: str, *, load_s: float, reason: Reason, failed_chunk: int | None) -> None:
        """A load of this request is over."""
        record = self._records.get(request_id)
        if record is not None:
            record.load_s = load_s
            record.load_reason = reason.value
            record.failed_chunk = failed_chunk

    def report(self, report: Report, now: float) -> None:
        """What the engine saw."""
        record = self.record(report.request_id, now)
        record.report = {name: getattr(report, name) for name in report.__struct_fields__}

    def find(self, wanted: str) -> list[dict[str, object]]:
        """Newest first: an exact id, else a prefix of one, with or without the engine's wrapping."""
        exact = self._records.get(wanted)
        if exact is not None:
            return [asdict(exact)]
        inner = visible_id(wanted)
        found: list[dict[str, object]] = []
        for record in reversed(self._records.values()):
            if record.request_id.startswith(wanted) or visible_id(record.request_id).startswith(inner):
                found.append(asdict(record))
                if len(found) == MAX_MATCHES:
                    break
        return found
