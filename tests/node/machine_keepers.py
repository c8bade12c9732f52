"""Keepers that do nothing by themselves: what they are asked waits until the machine says how it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.node.machine_tier import Call, ScriptedTier, Value

from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.client import KeepersStatistics
from kvferry.keeper.wire import Where
from kvferry.tiers.contract import Outcome


@dataclass(slots=True, eq=False)
class Locate:
    """answered: what was said, once it was said."""

    refs: Sequence[PartRef]
    done: Callable[[Sequence[Where]], None]
    answered: Sequence[Where] | None = None


@dataclass(slots=True, eq=False)
class Stage:
    """One part on its way into the tier."""

    ref: PartRef
    index: int
    call: Call
    done: Callable[[int, Outcome], None]


@dataclass(slots=True)
class ScriptedKeepers:
    """Implements ``node.keepers.Keepers``. values: what lies below the tier; it survives the node.

    told: what this node process called stored, with its position and whether it is likely.
    """

    tier: ScriptedTier
    values: dict[PartKey, tuple[Value, Where]] = field(default_factory=dict[PartKey, tuple[Value, Where]])
    up: bool = True
    locates: list[Locate] = field(default_factory=list[Locate])
    asked: list[Locate] = field(default_factory=list[Locate])  # since the model looked
    stages: list[Stage] = field(default_factory=list[Stage])
    told: list[tuple[PartRef, int, bool]] = field(default_factory=list[tuple[PartRef, int, bool]])
    used_parts: int = 0

    # ---- what the node calls

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """See ``Keepers``."""
        del deadline
        assert refs
        locate = Locate(refs, done)
        self.locates.append(locate)
        self.asked.append(locate)
        if not self.up:
            self.answer(locate, Where.UNKNOWN)

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Call:
        """See ``Keepers``."""
        del deadline
        call = Call()
        for index, ref in enumerate(refs):
            if self.up:
                self.stages.append(Stage(ref, index, call, done))
            else:
                done(index, Outcome.REFUSED)
        return call

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """See ``Keepers``."""
        assert len(refs) == len(positions) == len(likely) > 0
        self.told += zip(refs, positions, likely, strict=True)

    def used(self, refs: Sequence[PartRef]) -> None:
        """See ``Keepers``."""
        assert refs
        self.used_parts += len(refs)

    def remove(self, refs: Sequence[PartRef]) -> None:
        """See ``Keepers``."""
        for ref in refs:
            self.values.pop(ref.key, None)

    def statistics(self) -> KeepersStatistics:
        """See ``Keepers``."""
        return KeepersStatistics(keepers=(), dropped_parts=0, defects=0)

    def close(self) -> None:
        """See ``Keepers``."""
        self.end_all(Outcome.LATE)

    # ---- the machine's side

    def forget(self) -> None:
        """The node that asked is gone."""
        for asks in (self.told, self.asked, self.locates, self.stages, self.tier.fetches):
            asks.clear()

    @property
    def staging(self) -> int:
        """Parts that somebody waits for."""
        return sum(not stage.call.cancelled for stage in self.stages)

    def answer(self, locate: Locate, everywhere: Where | None = None, odd_at: int | None = None) -> None:
        """Truthfully, unless all is to be ``everywhere``, or one part unknown."""
        self.locates.remove(locate)
        where = [everywhere or self._where(ref.key) for ref in locate.refs]
        if odd_at is not None:
            odd = locate.refs[odd_at % len(where)]
            where = [
                Where.UNKNOWN if ref == odd else seen for ref, seen in zip(locate.refs, where, strict=True)
            ]
        locate.answered = where
        locate.done(where)

    def finish(self, stage: Stage, ending: Outcome | None, *, lost: bool = False, often: int = 1) -> None:
        """None: it lies in the tier now, unless it is lost again at once. often: how often that is said."""
        self.stages.remove(stage)
        if ending is None:
            ending = Outcome.OK
            if stage.ref.key not in self.values:
                ending = Outcome.OK if stage.ref.key in self.tier.values else Outcome.MISS
            elif not lost:
                self.tier.values.setdefault(stage.ref.key, self.values[stage.ref.key][0])
        for _ in range(often):
            stage.done(stage.index, ending)

    def sink(self, key: PartKey, where: Where) -> None:
        """What the tier has of that name, if it is right, is below it only."""
        value = self.tier.values[key]
        if value.key == key:
            self.values[key] = (self.tier.values.pop(key), where)

    def end_all(self, ending: Outcome | None) -> None:
        """Everything that waits."""
        for locate in list(self.locates):
            self.answer(locate, None if ending is None else Where.UNKNOWN)
        for stage in list(self.stages):
            self.finish(stage, ending)

    def _where(self, key: PartKey) -> Where:
        return self.values[key][1] if key in self.values else Where.ABSENT
