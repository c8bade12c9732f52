"""What follows from the numbers that are known of a workload, and which of them contradict each other.

``known`` holds numbers by the names of ``workload.Numbers``, ``origin`` where each is from: ``GIVEN``, the
name of a trace, or ``preset ...``. Both are filled in place; what follows has its formula as its origin.
"""

import math
from collections.abc import MutableMapping
from typing import NamedTuple

from kvferry.errors import MisconfiguredError

GIVEN = "given"
RESUME_SHARE = 0.2  # of reuse, where users come back after hours and nobody said how many
LONG_GAP_S = 3600.0
AGREE = 0.05  # by which numbers that follow from each other may differ where all were given


class Known(NamedTuple):
    """Numbers, and where each is from."""

    numbers: MutableMapping[str, float]
    origin: MutableMapping[str, str]

    def put(self, name: str, value: float, why: str) -> None:
        """Unless it is known."""
        if name not in self.numbers:
            self.set(name, value, why)

    def set(self, name: str, value: float, why: str) -> None:
        """In place of what was known."""
        self.numbers[name], self.origin[name] = value, why

    def given(self, name: str) -> bool:
        """Whether the user said it."""
        return self.origin.get(name) == GIVEN

    def preset(self, name: str) -> bool:
        """Whether nobody said or measured it."""
        return self.origin.get(name, "").startswith("preset")


def fill(
    numbers: MutableMapping[str, float], origin: MutableMapping[str, str], *, measured: bool, curve: bool
) -> None:
    """Everything that is missing.

    measured: whether a trace was; curve: whether it says what is found at each capacity. Raises
    MisconfiguredError for what is missing or contradicts itself.
    """
    known = Known(numbers, origin)
    _lengths(known)
    _reuse(known)
    _traffic(known, curve=curve)
    _gaps(known, measured=measured)
    if not math.isfinite(sum(numbers.values())):
        raise MisconfiguredError("a number of the workload is not finite")


def _lengths(known: Known) -> None:
    """Of requests; and how many turns a conversation has."""
    numbers = known.numbers
    known.put("context_p99", 2 * numbers["context_p50"], "twice the median: nobody said")
    if numbers["context_p99"] < numbers["context_p50"]:
        if known.given("context_p99"):
            raise MisconfiguredError(
                f"--context-p99 {numbers['context_p99']:g} is less than --context-p50 "
                f"{numbers['context_p50']:g}"
            )
        known.set("context_p99", 2 * numbers["context_p50"], "twice the median that was given")
    known.put("context_mean", numbers["context_p50"], "the median stands for the mean: nobody said")
    _heed_reuse(known)
    middle, output = numbers["context_p50"], numbers["output_tokens"]
    if "reuse" in numbers:
        known.put("new_tokens", max(1.0, middle * (1 - numbers["reuse"])), "median x (1 - reuse)")
    if "new_tokens" in numbers:
        known.put(
            "turns",
            _grown_from_nothing(known),
            "1 + 2 x (median - new) / (new + output): grown from nothing",
        )
    known.put("turns", 1.0, "1: nobody said")
    known.put("new_tokens", middle / numbers["turns"], "median / turns")
    if numbers["new_tokens"] > min(middle, numbers["context_mean"]):
        raise MisconfiguredError(
            f"--new-tokens {numbers['new_tokens']:g} is more than a request has (--context-p50 {middle:g})"
        )
    turns, growth = numbers["turns"], numbers["new_tokens"] + output
    first = max(numbers["new_tokens"], middle - (turns - 1) / 2 * growth) if turns > 1 else middle
    known.put("first_tokens", first, "median - (turns - 1) / 2 x (new + output), at least new")
    grown = min(max(middle, first + (turns - 1) * growth), max(middle, numbers["context_p99"]))
    known.put("grown_tokens", grown, "first + (turns - 1) x (new + output), at most p99")


def _grown_from_nothing(known: Known) -> float:
    """Turns of a conversation that begins with nothing and has its median half way."""
    numbers = known.numbers
    new = numbers["new_tokens"]
    return 1 + 2 * max(0.0, numbers["context_p50"] - new) / (new + numbers["output_tokens"])


def _heed_reuse(known: Known) -> None:
    """A reuse that was given decides over a preset's new tokens and turns; it contradicts what was given."""
    numbers = known.numbers
    if not known.given("reuse"):
        return
    reuse, mean = numbers["reuse"], numbers["context_mean"]
    if reuse > 1 - 1 / mean:
        raise MisconfiguredError(
            f"--reuse {reuse:g}: at least one of a request's {mean:,.0f} tokens is new; give less than 1"
        )
    if "new_tokens" in numbers and reuse > 1 - numbers["new_tokens"] / mean + 1e-9:
        if known.given("new_tokens"):
            raise MisconfiguredError(
                f"--reuse {reuse:g} leaves {mean * (1 - reuse):,.0f} new of {mean:,.0f} tokens at most, and "
                f"--new-tokens is {numbers['new_tokens']:g}; give one of them"
            )
        known.set("new_tokens", max(1.0, mean * (1 - reuse)), "mean x (1 - reuse)")
    if known.given("turns"):
        if reuse <= 0 and numbers["turns"] > 1:
            raise MisconfiguredError(
                f"--reuse {reuse:g} beside --turns {numbers['turns']:g}: a second turn reads the first one "
                "again; give one of them"
            )
        return
    if "new_tokens" in numbers and known.preset("turns") and numbers["turns"] > 1:
        returning = reuse / (1 - numbers["new_tokens"] / mean) if numbers["new_tokens"] < mean else 0.0
        turns = min(1 / max(1e-9, 1 - returning), max(1.0, _grown_from_nothing(known)))
        known.set("turns", turns, "1 / (1 - reuse / (1 - new / mean)): of the requests, those that return")
        if turns <= 1 and not known.given("new_tokens"):
            known.set("new_tokens", numbers["context_p50"], "all of it: nothing is reused")


def _reuse(known: Known) -> None:
    numbers = known.numbers
    middle, turns = numbers["context_p50"], numbers["turns"]
    computed = numbers["first_tokens"] + (turns - 1) * numbers["new_tokens"]
    known.put(
        "reuse",
        max(0.0, 1 - computed / (turns * middle)),
        "1 - (first + (turns - 1) x new) / (turns x median)",
    )


def _traffic(known: Known, *, curve: bool) -> None:
    """Requests a second x gap = conversations at a time: two of them give the third."""
    numbers = known.numbers
    if numbers["turns"] > 1:
        _agree(known)
    if "requests_s" not in numbers:
        if "conversations" not in numbers or numbers.get("gap_s", 0.0) <= 0:
            raise MisconfiguredError(
                "missing: --requests-s, or --conversations and --gap, which give it; how busy is the fleet?"
            )
        known.put("requests_s", numbers["conversations"] / numbers["gap_s"], "conversations / gap")
    requests_s = numbers["requests_s"]
    if requests_s <= 0:
        raise MisconfiguredError("nobody asks for anything: give --requests-s, or more --conversations")
    if numbers["turns"] <= 1:
        for name in ("gap_s", "conversations"):
            known.set(name, 0.0, "0: conversations of one turn")
        return
    if "gap_s" in numbers:
        known.put("conversations", requests_s * numbers["gap_s"], "requests a second x gap")
    known.put("conversations", 0.0, "0: nobody said; what comes back is in the trace")
    if numbers["conversations"] <= 0 and not curve:
        raise MisconfiguredError(
            f"missing: --gap or --conversations: of conversations of {numbers['turns']:,.3g} turns, how many "
            "go on at a time decides how much memory they take"
        )
    known.put("gap_s", numbers["conversations"] / requests_s, "conversations / requests a second")


def _agree(known: Known) -> None:
    """Where all three are known, a preset's gives way first, then a trace's; given ones must agree."""
    numbers = known.numbers
    names = ("conversations", "requests_s", "gap_s")
    if any(name not in numbers for name in names):
        return
    if all(known.given(name) for name in names):
        people, follows = numbers["conversations"], numbers["requests_s"] * numbers["gap_s"]
        if abs(people - follows) > AGREE * max(people, follows):
            raise MisconfiguredError(
                f"--conversations {people:g} at a time, but --requests-s {numbers['requests_s']:g} x --gap "
                f"{numbers['gap_s']:g} s is {follows:,.3g}; give two of them"
            )
        return
    rank = {name: 2 if known.given(name) else 0 if known.preset(name) else 1 for name in names}
    weakest = min(names, key=lambda name: rank[name])  # of equals, the first
    del numbers[weakest], known.origin[weakest]


def _gaps(known: Known, *, measured: bool) -> None:
    """Who comes back after hours: everybody, where the gap between turns is that long."""
    numbers = known.numbers
    hours = numbers["gap_s"] / 3600
    if known.given("resume_h") and known.given("gap_s") and numbers["resume_h"] < hours and hours >= 1:
        raise MisconfiguredError(
            f"--resume-hours {numbers['resume_h']:g} is less than --gap ({hours:,.3g} h); leave it out"
        )
    long = numbers["gap_s"] >= LONG_GAP_S and not measured
    if long:
        known.put("resume_h", hours, "the gap between turns")
        known.put("resume_share", 1.0, "1: the gap between turns is that long")
    known.put("resume_h", 0.0, "0: nobody said")
    if known.given("resume_share") and numbers["resume_share"] > 0 and numbers["resume_h"] <= 0:
        raise MisconfiguredError("--resume-share says nothing without --resume-hours; give both")
    after = RESUME_SHARE if numbers["resume_h"] >= 1 and not measured else 0.0
    known.put(
        "resume_share",
        after,
        f"{RESUME_SHARE:g}: nobody said" if after else "0: none, or in the trace's reuse",
    )
