"""A product that waits: for tests that are not about its deadlines, on a machine that is slow or busy.

As shipped, kvferry gives up after 50 to 500 ms, since the engine could compute meanwhile, and does not load
what it measured to be slow. A test that wants to see a load has no use for either. What ends by such a
deadline still does, after seconds. Run as a module it is the ``kvferry`` command with a patient node.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

from kvferry.client import breaker, connection, copying, scheduler
from kvferry.costs import Decision, Limits, Prospect, decide, decision
from kvferry.costs.prefill import PrefillModel
from kvferry.engines.vllm import facts, lookups, reach, requests, transfers
from kvferry.node import estimate
from kvferry.tiers.valkey import scout
from kvferry.tiers.valkey.settings import ValkeySettings

LOOKUP_S = 5.0  # a test in which a node or Valkey stands still takes so long
STALL_S = 5.0
LOAD_S = 60.0  # or the node's cap on deadlines
CALL_S = 60.0  # for what always comes

_ENGINE: tuple[tuple[Any, str, float], ...] = (
    (scheduler, "MAX_LOOKUP_WAIT_S", LOOKUP_S),
    (scheduler, "UNMEASURED_LOOKUP_WAIT_S", LOOKUP_S),
    (scheduler, "LOOKUP_WAIT_SHARE", 1e9),
    (scheduler, "GRACE_S", 1.0),
    (breaker, "PATIENCE_S", STALL_S),
    (connection, "HANDSHAKE_S", CALL_S),
    (copying, "RESERVE_S", CALL_S),
    (lookups, "LOOKUP_MAX_S", 2 * LOOKUP_S),
    (transfers, "RESERVE_TIMEOUT_S", LOOKUP_S),
    (reach, "FIRST_CONNECT_S", LOOKUP_S),
    (facts, "INTRODUCTION_WAIT_S", CALL_S),
    (requests, "NAMING_WAIT_S", CALL_S),
)
_NODE: tuple[tuple[Any, str, Any], ...] = (
    (decision, "STALL_FLOOR_S", STALL_S),
    (estimate, "STALL_CAP_S", STALL_S),
    (scout, "PROBE_S", LOOKUP_S),
    (scout, "IDLE_PROBE_S", LOOKUP_S),
    (scout, "REFRESH_S", LOOKUP_S),
)


def _load_all(prospect: Prospect, *, prefill: PrefillModel | None, rates: object, limits: Limits) -> Decision:
    """As if nothing were known of the tiers' speed, and with time."""
    del rates
    limits = Limits(cap_s=limits.cap_s, floor_s=min(LOAD_S, limits.cap_s))
    return decide(prospect, prefill=prefill, rates={}, limits=limits)


@contextmanager
def patient_engine() -> Iterator[None]:
    """Engines, and clients, that are made meanwhile in this process wait for their node."""
    with ExitStack() as stack:
        for module, name, value in _ENGINE:
            stack.enter_context(patch.object(module, name, value))
        yield


@contextmanager
def patient_node() -> Iterator[None]:
    """Nodes in this process load whatever is found, and give it time."""
    with ExitStack() as stack:
        for module, name, value in _NODE:
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(estimate, "decide", _load_all))
        stack.enter_context(valkey_defaults(connect_s=CALL_S, stall_s=STALL_S))
        yield


def valkey_defaults(**values: float) -> AbstractContextManager[None]:
    """``ValkeySettings`` that are made meanwhile have these, unless told otherwise."""
    names = [field.name for field in fields(ValkeySettings)]
    usual = ValkeySettings.__init__.__defaults__ or ()
    changed = dict(zip(names[-len(usual) :], usual, strict=True)) | values
    return patch.object(ValkeySettings.__init__, "__defaults__", tuple(changed.values()))


if __name__ == "__main__":
    from kvferry.cli.main import run

    with patient_node():
        run()
