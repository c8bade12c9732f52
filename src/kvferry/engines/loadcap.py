"""How much of a prompt its request lets be loaded: ``max_load_tokens`` in ``kv_transfer_params``.

Name and meaning are those of vLLM's own offloading connector: at most so many tokens come from outside the
engine, beyond what its own cache has; 0 is none, and what is no such number is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELD = "max_load_tokens"
_SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class LoadCap:
    """tokens: None for no cap. problem: why what was given is not one; empty when nothing is wrong."""

    tokens: int | None = None
    problem: str = ""

    @property
    def note(self) -> str:
        """For the request's record; empty without a cap."""
        return f"{FIELD} {self.tokens}" if self.tokens is not None else self.problem

    def allows(self, tokens: int) -> bool:
        """Whether so many tokens may be loaded."""
        return self.tokens is None or tokens <= self.tokens


NO_CAP = LoadCap()


def load_cap(params: Any) -> LoadCap:
    """Read a request's ``kv_transfer_params``, which come from a client: anything may be in there."""
    if params is None:
        return NO_CAP
    if not isinstance(params, Mapping):
        return LoadCap(None, f"kv_transfer_params is of type {type(params).__name__}, not an object: ignored")
    given = params.get(FIELD)
    if given is None:
        return NO_CAP
    if type(given) is int and given >= 0:
        return LoadCap(given)
    return LoadCap(None, f"{FIELD} is {_shown(given)}, not a whole number of tokens from 0 up: ignored")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, bool | float):
        return repr(value)
    return "negative" if isinstance(value, int) else f"of type {type(value).__name__}"
