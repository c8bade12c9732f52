"""What it means for a loaded prefix to be right, and how the demo checks it.

Bytes: the engine's workers digest every KV block in their memory (``probe``). A block counts as equal
when another replica, which computed that prefix itself, holds a block with the same 128-bit digest over
all layers. The replica under test had its memory overwritten with zeros before, so an equal block can
only have come from a load. Nothing of the connector or the node takes part in this comparison.

Answers: greedy, and compared with the answer an own prefix hit gave to the same question at the same
boundary: the text, and every token's log probability.
"""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.demo.ask import Replica, Reply


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """equal of wanted blocks that were to be loaded are bit for bit those another replica computed."""

    wanted: int
    equal: int

    @property
    def passed(self) -> bool:
        """Whether all that was to be loaded is equal."""
        return self.equal >= self.wanted


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """against: which answer it was compared with. largest_difference: of the log probabilities."""

    against: str
    same_text: bool
    largest_difference: float

    @property
    def passed(self) -> bool:
        """Whether the texts are equal."""
        return self.same_text


def block_digests(replica: Replica) -> frozenset[str]:
    """Digests of the KV blocks in a replica's memory that are not all zeros, over all its ranks."""
    return frozenset(
        digest for rank in replica.worker_call("kvferry_block_digests") for digest in rank["digests"]
    )


def forget_everything(replica: Replica) -> None:
    """Reset the replica's own prefix cache and overwrite its KV memory with zeros."""
    replica.reset_prefix_cache()
    replica.worker_call("kvferry_scrub")


def check_blocks(held: Collection[str], computed: Collection[str], *, wanted: int) -> BlockCheck:
    """held, computed: digests of the two replicas' memories. wanted: blocks that have to be in both."""
    return BlockCheck(wanted, len(frozenset(held) & frozenset(computed)))


def check_answer(reply: Reply, reference: Reply, *, against: str) -> AnswerCheck:
    """Compare an answer with the one it has to equal."""
    differences = [abs(a - b) for a, b in zip(reply.logprobs, reference.logprobs, strict=False)]
    return AnswerCheck(against, reply.text == reference.text, max(differences, default=0.0))
