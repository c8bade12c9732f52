"""The threads that move bytes: each owns one connection and keeps a pipeline of jobs on it.

Replies come in the order of the commands, so the jobs in flight are a queue, and only its head is being
received. When the connection is lost or given up, the jobs behind the head go back to the router.
"""

import logging
import threading
import time
from collections import deque

from kvferry.breaker import FAILURE, SILENCE
from kvferry.errors import CorruptError, KvferryError, MisconfiguredError
from kvferry.identity.header import HEADER_BYTES
from kvferry.tiers.valkey.connection import Connection, set_command
from kvferry.tiers.valkey.jobs import Cause, Job, Verb, Verdict
from kvferry.tiers.valkey.lanes import Home, Lane, LaneQueue
from kvferry.tiers.valkey.lifetimes import Lifetimes
from kvferry.tiers.valkey.login import whose
from kvferry.tiers.valkey.protection import Received
from kvferry.tiers.valkey.resp import ErrorKind, ProtocolError, Reply, ServerError, command
from kvferry.tiers.valkey.stream import DroppedError, ExpiredError, StalledError, UnreachableError

MAX_ATTEMPTS = 2
"""A job is sent at most twice: once more after a connection was lost."""
MAX_REDIRECTS = 5
SMALL_BATCH = 256
SILENT_S = 0.2
HESITANT_S = 0.03
"""Without a byte for so long when the deadline came. A busy server may be hesitant; three times is enough."""
_ASKING = command(b"ASKING")
_TAKES_NO_WRITES = ("MISCONF", "NOREPLICAS")
_log = logging.getLogger(__name__)


class Mover(threading.Thread):
    """Serves one lane of one shard until the lane closes."""

    def __init__(self, shard: Home, lane: Lane, queue: LaneQueue, number: int) -> None:
        super().__init__(name=f"kvferry-valkey-{shard.address}-{lane.value}-{number}", daemon=True)
        self._shard = shard
        self._queue = queue
        self._depth = SMALL_BATCH if lane is Lane.SMALL else shard.settings.pipeline_depth
        # Small reads are refilled by halves, several commands to a system call; the rest as room comes.
        self._refill = max(self._depth // 2, 1) if lane is Lane.FETCH else 1
        self._connection: Connection | None = None
        self._generation = 0
        self._inflight: deque[Job] = deque()
        self.inflight_bytes = 0
        self._closing = False

    @property
    def is_busy(self) -> bool:
        """Whether commands were sent that have no answer yet."""
        return bool(self._inflight)

    def run(self) -> None:
        """Serve until closed. A defect costs the jobs in flight, not the thread."""
        while True:
            try:
                if not self._turn():
                    break
            except Exception:  # noqa: BLE001 - the top of a driver thread
                _log.exception("defect in %s; its jobs in flight failed", self.name)
                self._disconnect()
                for job in self._take_inflight():
                    job.end(Verdict.FAILED, Cause.DEFECT)
        self._disconnect()

    def abort(self) -> None:
        """From another thread: give up waiting."""
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def _turn(self) -> bool:
        """Fill the pipeline, then take one reply off it. False when there is nothing left to do."""
        jobs: list[Job] | None = []
        room = self._depth - len(self._inflight)
        if room >= self._refill:
            room_bytes = self._shard.settings.pipeline_bytes - self.inflight_bytes
            jobs = self._queue.take(room, room_bytes, wait=not self._inflight)
        if jobs is None:  # closed
            self._give_up()
            return False
        try:
            if jobs:
                self._send(jobs)
            if self._inflight:
                self._receive(self._inflight[0])
        except (DroppedError, StalledError, ExpiredError) as error:
            self._lost(error)
        except CorruptError as error:
            self._damaged(error)
        except MisconfiguredError as error:
            self._unwelcome(error)
        return True

    def _send(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        wanted: list[Job] = []
        for job in jobs:
            ending = job.unwanted(now)
            if ending is None:
                wanted.append(job)
            else:
                job.end(*ending)
        if not wanted:
            return
        was_idle = not self._inflight
        self._inflight.extend(wanted)
        self.inflight_bytes += sum(job.payload_bytes for job in wanted)
        connection = self._connected(wanted[0]) if was_idle else self._connection
        if connection is None:
            raise DroppedError("not connected")
        if was_idle:
            connection.rest()
        if wanted[0].verb is Verb.SET:
            for job in wanted:
                if not self._send_value(connection, job):
                    self._inflight.remove(job)
                    self.inflight_bytes -= job.payload_bytes
                    job.end(Verdict.REFUSED, Cause.CORRUPT_SOURCE)
        else:
            lifetimes = self._shard.lifetimes
            connection.send_commands(b"".join([_encode(job, lifetimes) for job in wanted]), wanted[0])

    def _connected(self, job: Job) -> Connection:
        """The connection; a new one if another of the shard was lost since this one was made."""
        if self._connection is not None and self._generation == self._shard.generation:
            return self._connection
        self._disconnect()
        self._generation = self._shard.generation
        shard = self._shard
        self._connection = Connection.open(
            shard.address, shard.settings, tls=shard.tls, deadline=job.deadline
        )
        if self._closing:
            raise DroppedError("the tier is closing")
        return self._connection

    def _send_value(self, connection: Connection, job: Job) -> bool:
        """False, and nothing is sent, if the pool no longer holds what was committed."""
        if job.payload is None:
            raise DroppedError("a SET without a payload")
        value = connection.protected(job.name, payload=job.payload, checksum=job.checksum)
        if not value.intact:
            return False
        lifetimes = self._shard.lifetimes
        life_ms = lifetimes.stored_ms(job.part.rank) if lifetimes is not None else None
        start = set_command(job.key, HEADER_BYTES + job.stripe.nbytes, life_ms=life_ms)
        connection.send_value(_ASKING + start if job.asking else start, value, job)
        return True

    def _receive(self, job: Job) -> None:
        connection = self._connection
        if connection is None:
            raise DroppedError("not connected")
        if job.asking:
            connection.reply(job)
        if job.verb is Verb.GET and job.payload is not None:
            found = connection.value(job.name, job.payload, job, version=job.version)
            self._answered(job)
            self._conclude_get(job, found)
        else:
            reply = connection.reply(job)
            self._expect_kind(job, reply)
            self._answered(job)
            self._conclude_small(job, reply)

    def _answered(self, job: Job) -> None:
        self._inflight.popleft()
        self.inflight_bytes -= job.payload_bytes
        job.asking = False
        self._shard.heard_at = time.monotonic()
        if self._shard.suspected:
            self._shard.succeeded()

    def _conclude_get(self, job: Job, found: Received | ServerError | None) -> None:
        if isinstance(found, ServerError):
            self._refused(job, found)
        elif found is None:
            if job.look_older():
                self._shard.routes.dispatch(job)
            else:
                job.end(Verdict.MISS)
        elif found.intact:
            job.end(Verdict.OK, checksum=found.checksum)
        else:
            job.remove_value(Cause.CORRUPT_CHECKSUM)
            self._shard.routes.dispatch(job)

    def _conclude_small(self, job: Job, reply: Reply) -> None:
        if isinstance(reply, ServerError):
            self._refused(job, reply)
            return
        if job.verb is Verb.UNLINK and reply != 0:
            job.part.found = True
        if (reply == 0 or job.verb is Verb.UNLINK) and job.look_older():
            self._shard.routes.dispatch(job)
        elif job.verb is Verb.TOUCH and reply == 0 and job.storing:
            job.become_set()
            self._shard.routes.dispatch(job)
        elif job.verb is Verb.TOUCH and reply == 0:
            job.end(Verdict.MISS)
        else:
            job.end(Verdict.OK)

    @staticmethod
    def _expect_kind(job: Job, reply: Reply) -> None:
        """SET says OK, TOUCH, PEXPIRE and UNLINK count. Anything else was meant for another command."""
        fits = reply == b"OK" if job.verb is Verb.SET else isinstance(reply, int)
        if not fits and not isinstance(reply, ServerError):
            raise ProtocolError(f"unexpected reply {reply!r} to {job.verb.name}")

    def _refused(self, job: Job, error: ServerError) -> None:
        """An error reply: a whole reply, so the connection stays in use."""
        self._shard.last_error = str(error)
        kind = error.kind
        if kind in (ErrorKind.MOVED, ErrorKind.ASK):
            job.redirects += 1
            if job.redirects > MAX_REDIRECTS:
                job.end(Verdict.FAILED, Cause.REDIRECTS)
            else:
                self._shard.routes.redirect(job, error)
        elif kind is ErrorKind.READ_ONLY:
            self._try_again(job, Cause.READ_ONLY)
        elif kind is ErrorKind.WRONG_TYPE:
            job.remove_value(Cause.CORRUPT_TYPE)
            self._shard.routes.dispatch(job)
        elif error.code in _TAKES_NO_WRITES and job.verb is Verb.TOUCH and not job.read_only:
            job.read_only = True
            self._shard.routes.dispatch(job)
        elif kind is ErrorKind.OUT_OF_MEMORY:
            job.end(Verdict.REFUSED, Cause.OUT_OF_MEMORY)
        elif kind is ErrorKind.NOT_ALLOWED:
            user = whose(self._shard.settings.url)
            self._shard.denied(
                f"{job.verb.name} by {user}: {error}; kvferry flags valkey prints what permits it"
            )
            job.end(Verdict.REFUSED, Cause.NOT_ALLOWED)
        else:
            job.end(
                Verdict.FAILED, Cause.UNAVAILABLE if kind is ErrorKind.UNAVAILABLE else Cause.SERVER_ERROR
            )

    def _try_again(self, job: Job, cause: Cause) -> None:
        job.attempts += 1
        if job.attempts >= MAX_ATTEMPTS:
            job.end(Verdict.FAILED, cause)
        else:
            self._shard.routes.retry(job)

    def _lost(self, error: KvferryError) -> None:
        """The connection failed or was given up: its other replies cannot be told apart any more."""
        still_s = self._connection.still_s if self._connection is not None else 0.0
        self._disconnect()
        jobs = self._take_inflight()
        if self._closing:
            self._hand_back(jobs)
            return
        if isinstance(error, ExpiredError):
            self._shard.fell_silent(_weight(error.still_s), str(error))
            self._expired(jobs)
            return
        stalled = isinstance(error, StalledError)
        weight = SILENCE if stalled or isinstance(error, UnreachableError) else FAILURE
        self._shard.failed(weight, f"{error} (still for {still_s:.2f} s)" if stalled else str(error))
        for job in jobs:
            self._try_again(job, Cause.STALLED if stalled else Cause.DROPPED)

    def _expired(self, jobs: list[Job]) -> None:
        """Someone's time was over: not always the head's, which may have waited behind a long send."""
        now = time.monotonic()
        for job in jobs:
            ending = job.unwanted(now)
            if ending is None:
                self._shard.routes.retry(job)
            else:
                job.end(*ending)

    def _damaged(self, error: CorruptError) -> None:
        """The head's value is not what its key says; its bytes were left unread, so the connection goes."""
        self._disconnect()
        jobs = self._take_inflight()
        self._shard.last_error = str(error)
        head = jobs.pop(0)
        head.remove_value(Cause.CORRUPT_HEADER)
        self._shard.routes.dispatch(head)
        for job in jobs:
            self._shard.routes.dispatch(job)

    def _unwelcome(self, error: MisconfiguredError) -> None:
        """The server refuses this connection (password, certificate): waiting will not help these jobs."""
        self._disconnect()
        self._shard.denied(str(error))
        self._shard.failed(SILENCE, str(error))
        for job in self._take_inflight():
            job.end(Verdict.REFUSED, Cause.NOT_ALLOWED)

    def _give_up(self) -> None:
        self._disconnect()
        self._hand_back(self._take_inflight())

    def _hand_back(self, jobs: list[Job]) -> None:
        """This shard closes: with the tier, or because it left the Cluster's map."""
        for job in jobs:
            self._shard.routes.retry(job)

    def _take_inflight(self) -> list[Job]:
        jobs = list(self._inflight)
        self._inflight.clear()
        self.inflight_bytes = 0
        return jobs

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _weight(still_s: float) -> int:
    """What an expired wait says about the server: a slow transfer nothing, a short silence little."""
    return SILENCE if still_s >= SILENT_S else FAILURE if still_s >= HESITANT_S else 0


def _encode(job: Job, lifetimes: Lifetimes | None) -> bytes:
    """Where expiries rank values, a use is told by a new one."""
    if job.verb is Verb.TOUCH and lifetimes is not None and not job.read_only:
        words = command(b"PEXPIRE", job.key, b"%d" % lifetimes.used_ms(job.part.rank))
    else:
        words = command(job.verb.value.upper().encode(), job.key)
    return _ASKING + words if job.asking else words
