"""What the tiers below Valkey hold: one question about many parts to both."""

import enum
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from kvferry.identity.names import PartRef
from kvferry.keeper.forms import Form
from kvferry.tiers.contract import LowerTier, Outcome, Tier


class Ask(enum.Enum):
    """Of whom a question is asked."""

    NEAREST = "nearest"  # the slower tier only about what the quicker one has not
    BOTH = "both"
    DISK = "disk"


class Held(NamedTuple):
    """A part's name in each tier that has it. unknown: a tier did not say. unwanted: it is to be in none."""

    disk: PartRef | None = None
    objects: PartRef | None = None
    unknown: bool = False
    unwanted: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether any tier has it."""
        return self.disk is not None or self.objects is not None


NOWHERE = Held()
DELETED = Held(unwanted=True)


class Below:
    """disk, objects: either may be missing. ``look`` may be called from any thread."""

    def __init__(self, *, disk: LowerTier | None, objects: LowerTier | None, form: Form) -> None:
        self.disk = disk
        self.objects = objects
        self.form = form

    def look(
        self,
        refs: Sequence[PartRef],
        *,
        deadline: float,
        done: Callable[[Sequence[Held]], None],
        ask: Ask = Ask.NEAREST,
        named: Container[PartRef] = (),
    ) -> None:
        """What each is called and where it is, told on a tier's thread. Counts as a use of what is there.

        named: those that are called below what they are called here.
        """

        def disk_said(names: Sequence[PartRef | None], unknown: Sequence[bool]) -> None:
            wanted = [at for at, name in enumerate(names) if ask is Ask.BOTH or name is None]
            if ask is Ask.DISK:
                wanted = []

            def objects_said(found: Sequence[PartRef | None], unclear: Sequence[bool]) -> None:
                held = [Held(name, None, doubt) for name, doubt in zip(names, unknown, strict=True)]
                for at, name, doubt in zip(wanted, found, unclear, strict=True):
                    held[at] = Held(names[at], name, unknown[at] or doubt)
                done(held)

            left = [refs[at] for at in wanted]
            self._ask(self.objects, left, deadline=deadline, done=objects_said, named=named)

        self._ask(self.disk, refs, deadline=deadline, done=disk_said, named=named)

    def _ask(
        self,
        tier: Tier | None,
        refs: Sequence[PartRef],
        *,
        deadline: float,
        done: Callable[[Sequence[PartRef | None], Sequence[bool]], None],
        named: Container[PartRef],
    ) -> None:
        if tier is None or not refs:
            done([None] * len(refs), [False] * len(refs))
            return
        names = [(ref,) if ref in named else self.form.names(ref) for ref in refs]

        def said(outcomes: Sequence[Outcome]) -> None:
            found: list[PartRef | None] = []
            unknown: list[bool] = []
            at = 0
            for some in names:
                answers = outcomes[at : at + len(some)]
                at += len(some)
                present = [name for name, answer in zip(some, answers, strict=True) if answer is Outcome.OK]
                found.append(present[0] if present else None)
                unknown.append(not present and any(answer is not Outcome.MISS for answer in answers))
            done(found, unknown)

        tier.probe([name for some in names for name in some], deadline=deadline, done=said)
