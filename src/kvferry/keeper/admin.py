"""What people and their programs ask of keepers, blocking and bounded.

``KeeperAdmin`` is one connection; ``Fleet`` asks all keepers at a time and shares stages as nodes do.
"""

import itertools
import json
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.identity.names import PartRef
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.framing import decode_from_keeper, encode
from kvferry.keeper.rendezvous import ranking, told_apart
from kvferry.keeper.tls import explained
from kvferry.keeper.wire import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    OUTCOMES,
    PROTOCOL,
    Document,
    Drop,
    DropEnded,
    DropTier,
    FromKeeper,
    Hello,
    Message,
    MostReused,
    Parts,
    Reused,
    Role,
    Stage,
    Staged,
    StatusQuery,
    Welcome,
)
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.valkey.resolve import connect

CONNECT_S = 5.0
ANSWER_S = 10.0
DROP_S = 300.0
READ_BYTES = 1 << 16
GRACE_S = 2.0  # a keeper's own deadline comes first
MAX_REUSED_PARTS = 1 << 20

T = TypeVar("T")


class KeeperAdmin:
    """One connection, one question at a time. Raises ClosedError without a keeper, RetryError when it is
    silent, RefusedError when it does not want us."""

    def __init__(self, address: Address, *, access: KeeperAccess) -> None:
        self.address = address
        self._frames = FrameBuffer(limit=MAX_HELLO_BYTES)
        self._tickets = 0
        self._payloads: deque[bytes] = deque()
        give_up = time.monotonic() + CONNECT_S
        try:
            sock = connect(address, give_up)
        except OSError as error:
            raise ClosedError(f"keeper {address}: {error.strerror or error}; is it running there?") from error
        try:
            sock = self._sock = _wrapped(sock, address, access, give_up)  # a wrapped one takes the other over
            hello = Hello(
                protocol=PROTOCOL, version=__version__, token=access.token, node="admin", role=Role.ADMIN
            )
            self._send(hello, give_up)
            welcome = self._receive(give_up)
            if not isinstance(welcome, Welcome):
                raise RefusedError(f"keeper {address} answered hello with {type(welcome).__name__}")
        except BaseException:
            sock.close()
            raise
        self._frames.limit = MAX_FRAME_BYTES
        self.name = welcome.name or str(address)
        self.version = welcome.version

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """The keeper's, as a document."""
        self._tickets += 1
        return self._document(StatusQuery(ticket=self._tickets), ANSWER_S)

    def drop(
        self,
        tier: DropTier,
        *,
        namespace: bytes = b"",
        older_than_s: float = 0.0,
        parts: Parts | None = None,
        alone: bool = False,
    ) -> Dropped:
        """Forget what one of its tiers holds; see ``wire.Drop``."""
        self._tickets += 1
        answer = self._document(
            Drop(
                ticket=self._tickets,
                tier=tier,
                namespace=namespace,
                older_than_s=older_than_s,
                parts=parts,
                alone=alone,
            ),
            DROP_S,
        )
        try:
            return Dropped(
                int(answer["dropped_parts"]), int(answer["dropped_bytes"]), Outcome(answer["outcome"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError(f"keeper {self.address} did not say how much it dropped") from error

    def drop_ended(self, *, namespace: bytes = b"") -> None:
        """After drops of several tiers: see ``wire.DropEnded``. Returns once it was heard."""
        self._send(DropEnded(namespace=namespace), time.monotonic() + ANSWER_S)
        self.status()

    def most_reused(self, within_s: float, max_bytes: int, *, namespace: bytes = b"") -> list[PartRef]:
        """Which parts were used most, most used first."""
        self._tickets += 1
        give_up = time.monotonic() + ANSWER_S
        self._send(
            MostReused(ticket=self._tickets, within_s=within_s, max_bytes=max_bytes, namespace=namespace),
            give_up,
        )
        found: list[PartRef] = []
        while True:
            message = self._receive(give_up)
            if not isinstance(message, Reused) or message.ticket != self._tickets:
                continue
            found += message.parts.refs() if message.parts is not None else ()
            if message.last or len(found) > MAX_REUSED_PARTS:
                return found

    def stage(self, refs: Sequence[PartRef], *, within_s: float) -> list[Outcome]:
        """Have parts brought into Valkey, in this order. One outcome each; LATE where there was none."""
        outcomes = [Outcome.LATE] * len(refs)
        give_up = time.monotonic() + within_s + GRACE_S
        asked: dict[int, list[int]] = {}
        left = 0
        for parts, places in Parts.split(refs):
            self._tickets += 1
            asked[self._tickets] = places
            left += len(places)
            self._send(Stage(ticket=self._tickets, parts=parts, deadline_s=within_s), give_up)
        while left:
            try:
                message = self._receive(give_up)
            except RetryError:
                break
            if not isinstance(message, Staged) or message.ticket not in asked:
                continue
            places = asked[message.ticket]
            for index, code in zip(message.indexes, message.outcomes, strict=True):
                if index < len(places):
                    outcomes[places[index]] = OUTCOMES[code]
                    left -= 1
        return outcomes

    def _document(self, question: Message, timeout_s: float) -> dict[str, Any]:
        give_up = time.monotonic() + timeout_s
        self._send(question, give_up)
        while True:
            message = self._receive(give_up)
            if not isinstance(message, Document) or message.ticket != self._tickets:
                continue
            if message.error:
                raise RefusedError(f"keeper {self.address}: {message.error}")
            try:
                answer = json.loads(message.json)
            except (ValueError, RecursionError) as error:
                raise RefusedError(f"keeper {self.address} answered what is not JSON: {error}") from error
            if not isinstance(answer, dict):
                raise RefusedError(f"keeper {self.address} answered with a {type(answer).__name__}")
            return answer

    def _send(self, message: Message, give_up: float) -> None:
        try:
            self._sock.settimeout(max(0.001, give_up - time.monotonic()))
            self._sock.sendall(encode(message))
        except OSError as error:
            raise ClosedError(f"keeper {explained(self._last_word(error), self.address)}") from error

    def _last_word(self, error: OSError) -> OSError:
        """The keeper has hung up, and may have said why."""
        try:
            self._sock.recv(READ_BYTES)
        except ssl.SSLError as said:
            return said
        except OSError:
            pass
        return error

    def _receive(self, give_up: float) -> FromKeeper:
        """The next message. Raises RetryError when none comes in time."""
        while (left := give_up - time.monotonic()) > 0 and not self._payloads:
            self._sock.settimeout(left)
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                raise ClosedError(f"keeper {explained(error, self.address)}") from error
            if not data:
                raise ClosedError(f"keeper {self.address} closed the connection")
            self._payloads += self._frames.feed(data)
        if left <= 0:  # also of one who says ever more of what nobody asked
            raise RetryError(f"keeper {self.address} did not answer in time; is it stopped?")
        payload = self._payloads.popleft()
        refusal = refusal_text(payload)
        if refusal is not None:
            raise RefusedError(f"keeper {self.address}: {refusal}")
        return decode_from_keeper(payload)


def _wrapped(sock: socket.socket, address: Address, access: KeeperAccess, give_up: float) -> socket.socket:
    """With TLS, where that is asked for."""
    sock.settimeout(max(0.001, give_up - time.monotonic()))
    contexts = access.contexts()
    if contexts is None:
        return sock
    try:
        return contexts().wrap_socket(sock, server_hostname=address.host)
    except OSError as error:
        raise ClosedError(f"keeper {explained(error, address)}") from error


@dataclass(slots=True)
class Stages:
    """What became of a stage. failed: parts by outcome, with what their keepers said where they could not."""

    staged: list[PartRef] = field(default_factory=list[PartRef])
    failed: Counter[str] = field(default_factory=Counter[str])
    absent: list[PartRef] = field(default_factory=list[PartRef])


class Fleet:
    """All keepers, those that answered when it was made. errors: a line for each of the others."""

    def __init__(self, addresses: Sequence[Address], *, access: KeeperAccess) -> None:
        """Raises the first keeper's error where none of them can be asked."""
        self.errors: list[str] = []
        keepers: list[KeeperAdmin] = []
        self._open = ExitStack()
        errors: list[KvferryError] = []
        with ExitStack() as undo:
            for address in dict.fromkeys(addresses):
                try:
                    keeper = undo.enter_context(KeeperAdmin(address, access=access))
                except KvferryError as error:
                    errors.append(error)
                else:
                    keepers.append(keeper)
            if not keepers:
                raise errors[0]
            known = told_apart([(keeper.name, str(keeper.address)) for keeper in keepers])
            self._keepers = dict(zip(known, keepers, strict=True))
            self._threads = undo.enter_context(ThreadPoolExecutor(len(self._keepers)))
            self._open = undo.pop_all()
        self.errors = [str(error) for error in errors]

    def close(self) -> None:
        """Idempotent."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def drop(
        self,
        tier: DropTier,
        *,
        namespace: bytes = b"",
        older_than_s: float = 0.0,
        refs: Sequence[PartRef] = (),
        alone: bool = False,
    ) -> dict[str, Dropped | KvferryError]:
        """By keeper. All are asked: what was another's share once may still be with any of them.

        refs: these only. alone: see ``wire.Drop``.
        """

        def one(keeper: KeeperAdmin) -> Dropped:
            if not refs:
                return keeper.drop(tier, namespace=namespace, older_than_s=older_than_s, alone=alone)
            gone = [keeper.drop(tier, parts=parts) for parts in Parts.of(refs)]
            bad = [each.outcome for each in gone if each.outcome is not Outcome.OK]
            return Dropped(
                sum(each.parts for each in gone),
                sum(each.nbytes for each in gone),
                bad[0] if bad else Outcome.OK,
            )

        return self._each(one)

    def drop_ended(self, *, namespace: bytes = b"") -> dict[str, KvferryError]:
        """After drops of several tiers. Those that did not hear it: a keeper whose connection was lost takes
        the drop for over from then on, before it was perhaps."""
        answers = self._each(lambda keeper: keeper.drop_ended(namespace=namespace))
        return {name: answer for name, answer in answers.items() if isinstance(answer, KvferryError)}

    def most_reused(self, within_s: float, max_bytes: int, *, namespace: bytes = b"") -> list[PartRef]:
        """Of at most so many bytes: each keeper's most reused first, in turn."""
        answers = self._each(lambda keeper: keeper.most_reused(within_s, max_bytes, namespace=namespace))
        found = [answer for answer in answers.values() if not isinstance(answer, KvferryError)]
        self.errors += [str(answer) for answer in answers.values() if isinstance(answer, KvferryError)]
        wanted: dict[PartRef, None] = {}
        total = 0
        for ref in _in_turn(found):
            if ref not in wanted and total + ref.nbytes <= max_bytes:
                wanted[ref] = None
                total += ref.nbytes
        return list(wanted)

    def stage(self, refs: Sequence[PartRef], *, within_s: float) -> Stages:
        """Into Valkey: by each part's own keeper, and by the others what that one does not have."""
        said = Stages()
        names = list(self._keepers)
        asked: dict[PartRef, Iterator[str]] = {ref: iter(ranking(ref.key.chunk, names)) for ref in refs}
        left = list(asked)
        give_up = time.monotonic() + within_s
        while left:
            shares: dict[str, list[PartRef]] = {}
            for ref in left:
                name = next(asked[ref], None)
                if name is None:
                    said.absent.append(ref)
                else:
                    shares.setdefault(name, []).append(ref)
            left = []
            within_s = max(0.1, give_up - time.monotonic())
            running = {
                name: self._threads.submit(self._keepers[name].stage, share, within_s=within_s)
                for name, share in shares.items()
            }
            for name, future in running.items():
                try:
                    outcomes = future.result()
                except KvferryError:
                    outcomes = [Outcome.FAILED] * len(shares[name])
                for ref, outcome in zip(shares[name], outcomes, strict=True):
                    if outcome is Outcome.OK:
                        said.staged.append(ref)
                    elif outcome is Outcome.MISS:
                        left.append(ref)
                    else:
                        said.failed[outcome.value] += 1
        return said

    def tiers(self) -> frozenset[str]:
        """Names of those that any of them has."""
        found: set[str] = set()
        for status in self._each(lambda keeper: keeper.status()).values():
            if isinstance(status, dict):
                with suppress(KeyError, TypeError):
                    found |= {str(tier["name"]) for tier in status["keeper"]["tiers"]}
        return frozenset(found)

    def troubles(self, tier: str) -> dict[str, str]:
        """What is wrong with that tier now, by keeper; of those that know."""
        found: dict[str, str] = {}
        for name, status in self._each(lambda keeper: keeper.status()).items():
            if isinstance(status, dict):
                with suppress(KeyError, TypeError):
                    reasons = [str(one["reason"]) for one in status["troubles"] if one["tier"] == tier]
                    found[name] = "; ".join(reasons)
        return found

    def _each(self, ask: Callable[[KeeperAdmin], T]) -> dict[str, T | KvferryError]:
        """What each says, or why it does not."""

        def answer(keeper: KeeperAdmin) -> T | KvferryError:
            try:
                return ask(keeper)
            except KvferryError as error:
                return error

        running = {name: self._threads.submit(answer, keeper) for name, keeper in self._keepers.items()}
        return {name: future.result() for name, future in running.items()}


def _in_turn(lists: Sequence[Sequence[PartRef]]) -> Iterator[PartRef]:
    for row in itertools.zip_longest(*lists):
        yield from (ref for ref in row if ref is not None)
