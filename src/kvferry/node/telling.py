"""What a node tells the keepers: what the tier has now, by turns of the loop, and what was used."""

from collections.abc import Sequence

from kvferry.node.recency import RecencyRefresh
from kvferry.node.state import Namespace, NodeState
from kvferry.node.worth import Worth
from kvferry.node.writeback import Unsaved


class Telling:
    """Loop thread only. Of a node without keepers nothing is gathered or remembered."""

    def __init__(self, state: NodeState) -> None:
        self._keepers = state.keepers
        self._clock = state.loop.clock
        self._worth = Worth()
        self._recency = RecencyRefresh()
        self._stored: list[Unsaved] = []

    def found(self, space: Namespace, prompt: Sequence[bytes], known: int) -> None:
        """A lookup found so many of the prompt's chunks somewhere, the engine's own cache included.

        As often as recency in the tier, and as many at a time.
        """
        if self._keepers is None:
            return
        self._worth.found(space.namespace, prompt, known)
        due = self._recency.due(space.namespace, prompt[:known], self._clock())
        if due:
            refs = space.refs(prompt[:known], of=set(due)) if space.trailing else space.refs(due)
            self._keepers.used(list(refs))

    def likely(self, namespace: bytes, prompt: Sequence[bytes]) -> bool:
        """Whether what an engine stores of this prompt will be wanted again."""
        return self._keepers is not None and self._worth.likely(namespace, prompt)

    def stored(self, unsaved: Unsaved) -> None:
        """The tier has this part. If it was used before, it was not there to be copied then: it is likely."""
        if self._keepers is None:
            return
        key = unsaved.ref.key
        used = self._recency.knows(key.namespace, key.chunk)
        self._stored.append(unsaved._replace(likely=True) if used else unsaved)

    def after_turn(self) -> None:
        """Tell what was stored since the last turn."""
        if self._keepers is None or not self._stored:
            return
        stored, self._stored = self._stored, []
        self._keepers.stored(
            [unsaved.ref for unsaved in stored],
            positions=[unsaved.position for unsaved in stored],
            likely=[unsaved.likely for unsaved in stored],
        )
