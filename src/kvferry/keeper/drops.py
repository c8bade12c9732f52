"""What is being deleted now, and shortly before: none of it may come back from another tier meanwhile. Pure.

A fleet's drop goes tier by tier. Without this a part that one tier has lost already could be copied there
again from a tier that still has it.
"""

import math

GRACE_S = 3.0
"""Between two tiers of one drop at most."""


class Drops:
    """Namespaces that are being dropped; None stands for all. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._running: dict[bytes | None, int] = {}
        self._until: dict[bytes | None, float] = {}

    def begin(self, namespace: bytes | None) -> None:
        """A drop starts. One of old parts only is none of this: what is used again may come back."""
        self._running[namespace] = self._running.get(namespace, 0) + 1

    def end(self, namespace: bytes | None, now: float) -> None:
        """It is done."""
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]
        self._until[namespace] = now + GRACE_S
        self._until = {space: until for space, until in self._until.items() if until > now}

    def covers(self, namespace: bytes, now: float) -> bool:
        """Whether parts of it are being deleted."""
        return any(
            space in self._running or self._until.get(space, -math.inf) > now for space in (namespace, None)
        )
