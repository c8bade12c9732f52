"""Whether a shared tier is worth it, and which measurement would change that."""

from dataclasses import dataclass
from enum import Enum

from kvferry.advise.price import Answer, Deal, No, answer


class Not(Enum):
    """Reasons beside those of the price."""

    COMPRESSED = "this model compresses its KV, which no connector of ours takes"
    SEVERAL_HOSTS = "an engine over several hosts is not served by our connectors"
    NETWORK = "more would be read from it than the hosts' network takes in"
    SLOWER = "loading a prefix from it takes longer than computing it again"
    NOTHING_RETURNS = "nothing comes back but what requests share, which stays in engines' own memory"
    TOO_SMALL = (
        "even with it, prompts and answers take more than the fleet has: more GPUs first, then ask again"
    )


MEASURE = {
    No.SINGLE: "a second replica, or restarts and scale-downs after which users come back: count how often "
    "prefixes are asked for that another process computed",
    No.FITS: "how long users stay away: `kvferry analyze LOG` says how much of the reuse is older than what "
    "a host keeps; hours, or restarts with users waiting, change this",
    No.LOW_REUSE: "the hit rate on your own log, at the capacity of your hosts and without limit: "
    "`kvferry analyze LOG --model MODEL`; 5 points between the two change this",
    No.NO_PREFILL: "the prefill rate of your model on your GPU with prompts of your length "
    "(--prefill-tokens-s), and the input tokens that are new: GPUs, not a cache, bring those",
    No.COSTS_MORE: "your own prices (--gpu-usd-hour, --ram-usd) and the hit rate from which it pays: "
    "`kvferry price` with them",
    Not.COMPRESSED: "none: wait for a connector that takes it",
    Not.SEVERAL_HOSTS: "none: use fewer ranks (--tp), smaller weights or larger GPUs",
    Not.NETWORK: "bandwidth from cache servers to a GPU host (`kvferry bench tiers`): more of it, or more "
    "hosts for the same requests",
    Not.SLOWER: "bandwidth from cache servers to a GPU host, and prefill of a prompt of your length: "
    "`kvferry bench tiers`, and an engine's own benchmark (--prefill-tokens-s)",
    Not.TOO_SMALL: "requests a second that a replica serves at your lengths (an engine's own benchmark, "
    "--prefill-tokens-s): more of them, or --gpus, change this",
    Not.NOTHING_RETURNS: "`kvferry analyze LOG`: prompts that share more than their instructions",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """reasons: why not; none where the shared tier is advised. deal, money: what it was counted from, and the
    answer; money is None where no price of the GPU is known."""

    reasons: tuple[No | Not, ...]
    deal: Deal
    money: Answer | None

    @property
    def shared(self) -> bool:
        """Whether to set one up."""
        return not self.reasons


# Of one cause, what follows: a tier that nothing is read from costs more than it brings, and so on.
_USELESS = (No.LOW_REUSE, No.COSTS_MORE, Not.SLOWER, Not.NETWORK)
FOLLOWS: dict[No | Not, tuple[No | Not, ...]] = {
    Not.NOTHING_RETURNS: (No.SINGLE, No.FITS, *_USELESS),
    No.SINGLE: (No.FITS, *_USELESS),
    No.FITS: _USELESS,
    No.LOW_REUSE: (No.COSTS_MORE, Not.SLOWER),
    No.NO_PREFILL: (Not.TOO_SMALL,),
}


def judge(
    deal: Deal, *, priced: bool, against: tuple[Not, ...], prefill_share: float, busy: float
) -> Verdict:
    """Every cause against it, without what follows from another.

    priced: whether the GPU's price is known. against: what was found beside the price. prefill_share: of the
    GPUs' time, what the prompts' new tokens take even with the tier; busy: what answers take is in it.
    """
    found = answer(deal)
    reasons: list[No | Not] = [*against]
    reasons += [reason for reason in found.reasons if priced or reason is not No.COSTS_MORE]
    # The deal knows the rate of what is saved; of what is left, the times of the plan are nearer.
    reasons = [reason for reason in reasons if reason is not No.NO_PREFILL]
    if prefill_share > 1:
        reasons.append(No.NO_PREFILL)
    if busy >= 1:
        reasons.append(Not.TOO_SMALL)
    after = {follows for reason in reasons for follows in FOLLOWS.get(reason, ())}
    kept = tuple(reason for reason in reasons if reason not in after)
    return Verdict(kept, deal, found if priced else None)
