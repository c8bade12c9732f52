"""What gets to the lower tiers: what comes back, and of one-time prompts next to nothing."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keeper.rig import NAMESPACE, Rig, fill, prompt, rigged

from kvferry.identity.names import PartRef
from kvferry.node.worth import Worth
from kvferry.testing.expectations import eventually

SMALL = 64


class Traffic:
    """A node in front of a keeper: Valkey holds everything that was ever stored."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._worth = Worth()
        self._stored: set[PartRef] = set()

    def ask(self, refs: Sequence[PartRef]) -> None:
        """A prompt arrives: what is known is loaded, the rest computed and stored."""
        chunks = [ref.key.chunk for ref in refs]
        known = next((at for at, ref in enumerate(refs) if ref not in self._stored), len(refs))
        self._worth.found(NAMESPACE, chunks, known)
        if known:
            self._rig.keeper.used(refs[:known])
        if known == len(refs):
            return
        new = refs[known:]
        fill(self._rig.valkey, new)
        self._stored |= set(new)
        likely = self._worth.likely(NAMESPACE, chunks)
        self._rig.keeper.stored(
            new, positions=[known + at for at in range(len(new))], likely=[likely] * len(new)
        )

    def settled(self) -> None:
        """All that was told has been dealt with."""
        last = prompt("last", 1, nbytes=SMALL)
        fill(self._rig.valkey, last)
        self._rig.keeper.used(last)
        eventually(lambda: last[0].key in self._rig.objects.parts, "the last copy")
        self._rig.idle()


visits = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=25)


@given(visits)
@settings(max_examples=15, deadline=None)
def test_one_time_prompts_leave_the_lower_tiers_nearly_untouched(asked: list[tuple[int, int]]) -> None:
    """Some begin with one of a few shared heads, some with nothing shared. Only the heads are worth a place.

    The first to go on from a head may be a conversation, for all that is known then.
    """
    with rigged() as rig:
        traffic = Traffic(rig)
        once: dict[PartRef, int] = {}
        for number, (head, length) in enumerate(asked):
            shared = prompt(f"head{head}", 4, nbytes=SMALL) if head else []
            alone = prompt(f"once{number}", length, nbytes=SMALL)
            once.update(dict.fromkeys(alone, head))
            traffic.ask([*shared, *alone])
        traffic.settled()
        kept = {ref for ref in once if ref.key in rig.disk.parts}
        assert not [ref for ref in kept if once[ref] == 0]
        first = {ref.key.chunk.split(b"-")[0] for ref in kept}
        assert len(first) <= len({head for head, _ in asked if head})
        assert set(rig.objects.parts) <= set(rig.disk.parts)


@given(st.lists(st.integers(1, 4), min_size=3, max_size=6), st.integers(2, 6))
@settings(max_examples=15, deadline=None)
def test_a_conversation_is_kept_as_it_grows_all_but_a_turn_that_was_not_continued(
    growth: list[int], first: int
) -> None:
    with rigged() as rig:
        traffic = Traffic(rig)
        length = first
        for more in growth:
            traffic.ask(prompt("talk", length, nbytes=SMALL))
            length += more
        traffic.settled()
        continued = length - growth[-1] - growth[-2]
        kept = [ref for ref in prompt("talk", length, nbytes=SMALL) if ref.key in rig.disk.parts]
        assert len(kept) >= continued
        assert set(kept[:continued]) == set(prompt("talk", continued, nbytes=SMALL))
