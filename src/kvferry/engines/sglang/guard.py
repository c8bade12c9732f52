"""Keeps what goes wrong here away from SGLang's storage threads: an exception may end one for good."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from kvferry.errors import RefusedError

_log = logging.getLogger("kvferry.sglang")

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Of one backend. Once it is off it answers every call with nothing, until the engine is restarted."""

    def __init__(self) -> None:
        self.errors = 0
        self.refused = 0
        self.off = ""

    def turn_off(self, why: str) -> None:
        """The first reason stays."""
        if not self.off:
            self.off = why
            _log.warning("kvferry: %s: nothing is looked for or stored from now on", why)

    def refuse(self, error: RefusedError) -> None:
        """A call that cannot be served, for what it asks. The first is logged."""
        self.refused += 1
        if self.refused == 1:
            _log.warning("kvferry: %s; such calls count as misses", error)

    def trip(self, method: str) -> None:
        """Log the exception being handled, a defect, and go off."""
        self.errors += 1
        _log.exception("kvferry: %s failed. This is a defect of kvferry, please report it", method)
        self.turn_off(f"after an error in {method}")


class Guarded(Protocol):
    """A backend whose methods are wrapped."""

    guard: Guard

    def may_serve(self) -> bool:
        """Whether what is stored under the names in use is this engine's still."""
        ...


S = TypeVar("S", bound=Guarded)


def guarded(
    otherwise: Callable[..., Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Wrap a method: nothing escapes it; where it has no answer, ``otherwise(self, *args)`` is it."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.may_serve():
                try:
                    return method(self, *args, **kwargs)
                except RefusedError as error:
                    self.guard.refuse(error)
                except Exception:  # noqa: BLE001 - the top of every call from the engine
                    self.guard.trip(method.__name__)
            answer: R = otherwise(self, *args, **kwargs)
            return answer

        return cast("Callable[Concatenate[S, P], R]", run)

    return wrap
