"""One estimator of prefill, load and queue, shared by the node, the router and the simulator. Pure.

Seconds everywhere; the clock is passed in. See docs/decisions/estimator.md.
"""

from kvferry.costs.decision import Decision, DecisionReason, Limits, Prospect, decide
from kvferry.costs.lengths import Length, TierRun
from kvferry.costs.prefill import PrefillFit, PrefillModel
from kvferry.costs.rates import RateEstimate, TierRate, TransferTicket

__all__ = [
    "Decision",
    "DecisionReason",
    "Length",
    "Limits",
    "PrefillFit",
    "PrefillModel",
    "Prospect",
    "RateEstimate",
    "TierRate",
    "TierRun",
    "TransferTicket",
    "decide",
]
