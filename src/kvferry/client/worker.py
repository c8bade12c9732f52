"""The worker side of an engine: reads parts out of the pool and puts new ones in."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.client.messages import LoadEnd, LoadTicket, NamespaceInfo, Pending, ReadyPart, ReservedSlot


class LoadStream:
    """The parts of one load for one rank, in chunk order."""

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        """The next part, waiting at most timeout_s (0: only what is there). LoadEnd is final."""
        raise NotImplementedError

    def copied(self, index: int) -> None:
        """That chunk's part was copied and its checksums matched: its slot may be reused."""
        raise NotImplementedError

    def corrupt(self, index: int) -> None:
        """The copy's checksums did not match: the part is removed everywhere, the stream ends there."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening. Idempotent."""
        raise NotImplementedError


class WorkerClient:
    """One per rank. A background thread reads; it reconnects by itself."""

    def __init__(
        self,
        *,
        socket_path: Path | str,
        engine: str,
        rank: int,
        namespace: NamespaceInfo,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def load(self, ticket: LoadTicket) -> LoadStream:
        """Start receiving. Never blocks, never raises for a lost node: the stream ends with a reason."""
        raise NotImplementedError

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        """Slots for new parts. prefix: digests before them, from the prompt's start.

        Returns one entry per wanted digest; all FULL when the node does not answer in time.
        """
        raise NotImplementedError

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> None:
        """Publish (digest, checksums per stripe) of slots that were reserved and are now filled."""
        raise NotImplementedError

    def abandon(self, part: int, digests: Sequence[bytes]) -> None:
        """Give reserved slots back."""
        raise NotImplementedError

    def close(self) -> None:
        """Idempotent; joins the thread."""
        raise NotImplementedError
