"""The bookkeeping of operations: an operation has parts, a part has stripes, a stripe is one job.

    TOUCH ──absent──► SET          a store asks first
    GET ──corrupt──► UNLINK        a damaged value is removed before its part is reported
    GET, TOUCH ──absent──► the same under an older key's name (docs/spec/valkey-keys.md); UNLINK in any case

A part is reported once, when the last of its jobs has ended: until then some thread may still be using
its memory.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import Stripe, stripe_plan
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.acl import KEY_PREFIX
from kvferry.tiers.valkey.protection import ValueName
from kvferry.tiers.valkey.slots import key_slot

_log = logging.getLogger(__name__)

PLAIN_SUFFIXES = (b"",)
REMOVAL_S = 1.0
"""How long removing a damaged stripe may delay the report of its part."""


class Verb(enum.Enum):
    """What a job sends next."""

    GET = "get"
    SET = "set"
    TOUCH = "touch"
    UNLINK = "unlink"


class Cause(enum.Enum):
    """Why a part was not served: the names of the failure counters."""

    NONE = "none"
    LATE = "late"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    STALLED = "stalled"
    DROPPED = "dropped"
    BREAKER_OPEN = "breaker_open"
    QUEUE_FULL = "queue_full"
    CORRUPT_HEADER = "corrupt_header"
    CORRUPT_CHECKSUM = "corrupt_checksum"
    CORRUPT_TYPE = "corrupt_type"
    CORRUPT_SOURCE = "corrupt_source"  # host memory no longer held what had been committed
    OUT_OF_MEMORY = "out_of_memory"
    NOT_ALLOWED = "not_allowed"
    UNAVAILABLE = "unavailable"
    READ_ONLY = "read_only"
    REDIRECTS = "redirects"
    SERVER_ERROR = "server_error"
    DEFECT = "defect"


class Verdict(enum.IntEnum):
    """How one stripe ended. The largest of its stripes is a part's outcome."""

    OK = 0
    SKIPPED = 1  # its part was lost already; never the largest
    FAILED = 2
    REFUSED = 3
    LATE = 4
    MISS = 5
    CORRUPT = 6


_OUTCOMES = {
    Verdict.OK: Outcome.OK,
    Verdict.SKIPPED: Outcome.FAILED,
    Verdict.FAILED: Outcome.FAILED,
    Verdict.REFUSED: Outcome.REFUSED,
    Verdict.LATE: Outcome.LATE,
    Verdict.MISS: Outcome.MISS,
    Verdict.CORRUPT: Outcome.CORRUPT,
}


class Written(NamedTuple):
    """A value that was stored. version: index of its key's suffix."""

    stripe: Stripe
    version: int


def stripe_key(key: PartKey, stripe: int, suffix: bytes = b"") -> bytes:
    """The name of a stripe's value in Valkey (docs/spec/valkey-keys.md). Without braces: no hash tag."""
    return b"%b%d%b" % (_part_prefix(key), stripe, suffix)


def _part_prefix(key: PartKey) -> bytes:
    return f"{KEY_PREFIX}{key.namespace.hex()}:{key.chunk.hex()}:{key.part}:".encode()


class Operation:
    """A running fetch, store or probe: what its jobs share. Also the ``Transfer`` handed to the caller."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.cancelled = False
        self.lock = threading.Lock()

    def cancel(self) -> None:
        """Jobs that wait end as soon as they are looked at; one being received may still complete."""
        self.cancelled = True


class Part:
    """One part of an operation; ``report`` is called once, after the last job has ended."""

    __slots__ = (
        "_remaining",
        "cause",
        "checksums",
        "found",
        "index",
        "operation",
        "prefix",
        "rank",
        "ref",
        "report",
        "suffixes",
        "verdict",
        "written",
    )

    def __init__(
        self,
        operation: Operation,
        index: int,
        ref: PartRef,
        *,
        jobs: int,
        report: Callable[["Part"], None],
        suffixes: Sequence[bytes] = PLAIN_SUFFIXES,
        rank: int = 0,
    ) -> None:
        """jobs: how many will end before the part is reported. suffixes: of the keys, see ``Protection``.

        rank: how many chunks come before its own, in the prompt or at least in the call.
        """
        self.operation = operation
        self.index = index
        self.ref = ref
        self.prefix = _part_prefix(ref.key)
        self.suffixes = suffixes
        self.rank = rank
        self.report = report
        self.verdict = Verdict.OK
        self.cause = Cause.NONE
        self.checksums: list[bytes] = [b""] * len(stripe_plan(ref.nbytes))
        self.found = False  # a removal met at least one value
        self.written: list[Written] = []  # by this operation; stripes that were there already are not
        self._remaining = jobs

    @property
    def outcome(self) -> Outcome:
        """The outcome to report."""
        return _OUTCOMES[self.verdict]

    @property
    def lost(self) -> bool:
        """Whether it is already known that the part will not be OK."""
        return self.verdict is not Verdict.OK

    def job_ended(self, job: "Job", verdict: Verdict, cause: Cause, checksum: bytes) -> None:
        """Count one stripe; report the part if it was the last."""
        with self.operation.lock:
            if verdict > self.verdict:
                self.verdict, self.cause = verdict, cause
            self.checksums[job.stripe.index] = checksum
            if verdict is Verdict.OK and job.verb is Verb.SET:
                self.written.append(Written(job.stripe, job.version))
            self._remaining -= 1
            last = self._remaining == 0
        if last:
            self._tell()

    def _tell(self) -> None:
        """A caller's defect costs its own part: whoever ends this job has others to end after it."""
        try:
            self.report(self)
        except Exception:  # noqa: BLE001 - foreign code on a driver's thread
            _log.exception("a callback failed for part %r", self.ref.key)


class Job:
    """One stripe's command. Held by exactly one queue or thread at a time; ends exactly once."""

    __slots__ = (
        "_ended",
        "asking",
        "attempts",
        "checksum",
        "deadline",
        "decided",
        "key",
        "older",
        "part",
        "payload",
        "read_only",
        "redirects",
        "slot",
        "storing",
        "stripe",
        "verb",
        "version",
        "written_as",
    )

    def __init__(
        self,
        part: Part,
        stripe: Stripe,
        verb: Verb,
        *,
        payload: memoryview | None,
        checksum: bytes = b"",
        written_as: int = 0,
    ) -> None:
        """checksum: of the payload to store; empty: whoever sends it computes that.

        written_as: index of the suffix under which it is stored.
        """
        self.part = part
        self.stripe = stripe
        self.verb = verb
        self.payload = payload
        self.checksum = checksum
        self.written_as = written_as
        self.storing = verb is Verb.TOUCH and payload is not None
        self.older = len(part.suffixes) - 1  # names not asked for yet
        self._name(0)
        self.deadline = part.operation.deadline
        self.decided: tuple[Verdict, Cause] | None = None
        self.attempts = 0
        self.redirects = 0
        self.asking = False
        self.read_only = False  # the server takes no writes now: only TOUCH tells what is there
        self._ended = False

    def _name(self, version: int) -> None:
        self.version = version
        self.key = b"%b%d%b" % (self.part.prefix, self.stripe.index, self.part.suffixes[version])
        self.slot = key_slot(self.key)

    def look_older(self) -> bool:
        """Done with this name: go on with that of the next older key, if there is one."""
        if not self.older:
            return False
        self.older -= 1
        self._name(self.version + 1)
        return True

    def become_set(self) -> None:
        """The stripe is absent under every name: write it under its own."""
        self.verb = Verb.SET
        self._name(self.written_as)

    def look_only_for(self, version: int) -> None:
        """Under that name and no other."""
        self._name(version)
        self.older = 0

    @property
    def asks(self) -> bool:
        """Whether it only wants to know what is stored."""
        return self.verb is Verb.TOUCH and not self.storing

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer wants the result."""
        return self.part.operation.cancelled

    @property
    def payload_bytes(self) -> int:
        """Bytes this job moves."""
        return self.stripe.nbytes if self.verb in (Verb.GET, Verb.SET) else 0

    @property
    def name(self) -> ValueName:
        """What the stored value must say."""
        return ValueName(self.part.ref.key, self.part.ref.nbytes, self.stripe)

    def unwanted(self, now: float) -> tuple[Verdict, Cause] | None:
        """How a job that has not been sent should end without being sent, or None if it should be sent."""
        if self.cancelled:
            return Verdict.LATE, Cause.CANCELLED
        if now >= self.deadline:
            return Verdict.LATE, Cause.LATE
        if self.part.lost and self.verb in (Verb.GET, Verb.SET):
            return Verdict.SKIPPED, Cause.NONE
        return None

    def remove_value(self, cause: Cause) -> None:
        """The value is damaged: turn into its removal, after which the job ends as CORRUPT."""
        self.verb = Verb.UNLINK
        self.older = 0
        self.decided = (Verdict.CORRUPT, cause)
        self.deadline = time.monotonic() + REMOVAL_S
        self.attempts = 0

    def end(self, verdict: Verdict, cause: Cause = Cause.NONE, *, checksum: bytes = b"") -> None:
        """End the job: its memory is not touched by the tier afterwards."""
        if self._ended:
            return
        self._ended = True
        if self.payload is not None:
            self.payload.release()
            self.payload = None
        if self.decided is not None:
            verdict, cause = self.decided
        self.part.job_ended(self, verdict, cause, checksum)


def fetch_jobs(part: Part, into: memoryview) -> list[Job]:
    """A GET for each stripe of ``part``."""
    return [
        Job(part, s, Verb.GET, payload=into[s.offset : s.offset + s.nbytes])
        for s in stripe_plan(part.ref.nbytes)
    ]


def store_jobs(
    part: Part, data: memoryview, checksums: Sequence[bytes], *, version: Callable[[bytes], int]
) -> list[Job]:
    """For each stripe of ``part`` a question whether it is there, which becomes a SET if it is not.

    version: of ``Protection``.
    """
    plan = stripe_plan(part.ref.nbytes)
    if checksums and len(checksums) != len(plan):
        raise BrokenError(f"{len(checksums)} checksums for a part of {len(plan)} stripes")
    sums = checksums or [b""] * len(plan)
    return [
        Job(
            part,
            s,
            Verb.TOUCH,
            payload=data[s.offset : s.offset + s.nbytes],
            checksum=sums[s.index],
            written_as=version(sums[s.index]),
        )
        for s in plan
    ]


def small_jobs(part: Part, verb: Verb) -> list[Job]:
    """A TOUCH or UNLINK for each stripe of ``part``, last stripe first."""
    return [Job(part, s, verb, payload=None) for s in reversed(stripe_plan(part.ref.nbytes))]


def undo_jobs(part: Part, written: Sequence[Written]) -> list[Job]:
    """An UNLINK for each value in ``written``: what others stored of the same part stays."""
    jobs = [Job(part, each.stripe, Verb.UNLINK, payload=None) for each in written]
    for job, each in zip(jobs, written, strict=True):
        job.look_only_for(each.version)
    return jobs
