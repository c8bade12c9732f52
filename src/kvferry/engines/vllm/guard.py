"""Keeps what goes wrong here away from the engine: one place instead of a try block in every hook."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

_log = logging.getLogger("vllm.kvferry")

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Watches one side of one connector. Once broken it stays so: the engine goes on without a cache."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.errors = 0
        self.broken = False
        self._pid = os.getpid()

    @property
    def open(self) -> bool:
        """Whether hooks may run: nothing broke, and this is the process that made the connector."""
        if not self.broken and os.getpid() != self._pid:
            self.broken = True
            _log.error(
                "kvferry: the engine's %s process was forked after the connector started; a connection "
                "cannot be shared, so this copy runs without the cache",
                self.side,
            )
        return not self.broken

    def trip(self, hook: str) -> None:
        """Count and log the exception being handled, and switch this side off."""
        self.errors += 1
        self.broken = True
        _log.exception(
            "kvferry: %s failed in the %s; this engine goes on without the cache until it is restarted. "
            "This is a defect of kvferry, please report it",
            hook,
            self.side,
        )


class Guarded(Protocol):
    """A connector whose hooks are wrapped. salvage: what must still be done when a side is off."""

    guard: Guard


S = TypeVar("S", bound=Guarded)


def guarded(
    fallback: Callable[..., Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Wrap a hook: nothing escapes it, and ``fallback(self, *args)`` answers when the side is off."""

    def wrap(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.guard.open:
                try:
                    return hook(self, *args, **kwargs)
                except Exception:  # noqa: BLE001 - the top of every call from the engine
                    self.guard.trip(hook.__name__)
            answer: R = fallback(self, *args, **kwargs)
            return answer

        return cast("Callable[Concatenate[S, P], R]", run)

    return wrap
