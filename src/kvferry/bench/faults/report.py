"""The figures of ``kvferry bench faults``: medians, against their bounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvferry
from kvferry.bench.faults.trial import MAX_LOST_S, Trial
from kvferry.bench.spread import spread
from kvferry.demo import page
from kvferry.demo.page import Column

_COLUMNS = (
    Column("fault"),
    Column("when"),
    Column("n", numeric=True),
    Column("cold", numeric=True),
    Column("deadline", numeric=True),
    Column("TTFT", numeric=True),
    Column("bound", numeric=True),
    Column("loaded", numeric=True),
    Column("usual ms", numeric=True),
    Column("later ms", numeric=True),
    Column("on loads", numeric=True),
    Column("reuse back", numeric=True),
    Column("called"),
    Column("met"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One fault at one moment. Seconds; medians.

    lost_s: the worst of each trial's later requests; usual_s: of those before the fault. spent_s: what that
    later request with the most paid for loads that worked.
    """

    fault: str
    moment: str
    n: int
    cold_s: float
    deadline_s: float
    ttft_s: float
    bound_s: float
    loaded_blocks: float
    wanted_blocks: int
    usual_s: float
    lost_s: float
    spent_s: float
    back_s: float | None
    reasons: tuple[str, ...]
    wrong: int

    @property
    def met(self) -> bool:
        """Whether both bounds hold."""
        return not self.wrong and self.ttft_s <= self.bound_s and self.lost_s <= MAX_LOST_S

    def cells(self) -> tuple[str, ...]:
        """Of the table; what is over its bound is marked."""
        return (
            self.fault,
            self.moment,
            str(self.n),
            f"{self.cold_s:.2f} s",
            f"{self.deadline_s:.2f} s" if self.deadline_s else "-",
            f"{self.ttft_s:.2f} s" + _mark(self.ttft_s > self.bound_s),
            f"{self.bound_s:.2f} s",
            f"{self.loaded_blocks:.0f}/{self.wanted_blocks}",
            f"{self.usual_s * 1e3:.1f}",
            f"{self.lost_s * 1e3:.1f}" + _mark(self.lost_s > MAX_LOST_S),
            f"{self.spent_s * 1e3:.1f}",
            "never" if self.back_s is None else f"{self.back_s:.1f} s",
            " ".join(self.reasons) or "-",
            "WRONG" if self.wrong else "yes" if self.met else "NO",
        )


def _mark(over: bool) -> str:
    return " !" if over else ""


def rows(trials: Sequence[Trial]) -> list[Row]:
    """In the order of their first trial."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.fault, trial.moment), []).append(trial)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Trial]) -> Row:
    first = group[0]
    back = [trial.back_s for trial in group if trial.back_s is not None]
    return Row(
        fault=first.fault,
        moment=first.moment,
        n=len(group),
        cold_s=_median([trial.cold_s for trial in group]),
        deadline_s=_median([trial.deadline_s for trial in group]),
        ttft_s=_median([trial.ttft_s for trial in group]),
        bound_s=_median([trial.bound_s for trial in group]),
        loaded_blocks=_median([float(trial.loaded_blocks) for trial in group]),
        wanted_blocks=first.wanted_blocks,
        usual_s=_median([max((paid.lost_s for paid in trial.usual), default=0.0) for trial in group]),
        lost_s=_median([max((paid.lost_s for paid in trial.after), default=0.0) for trial in group]),
        spent_s=_median([max((paid.spent_s for paid in trial.after), default=0.0) for trial in group]),
        back_s=_median(back) if len(back) == len(group) else None,
        reasons=tuple(sorted({reason for trial in group for reason in trial.reasons})),
        wrong=sum(1 for trial in group if trial.problems),
    )


def _median(values: Sequence[float]) -> float:
    found = spread(values)
    return found.median if found is not None else 0.0


def problems(trials: Sequence[Trial]) -> list[str]:
    """Wrong answers, and trials that did not try what they should."""
    return [f"{trial.fault}, {trial.moment}: {problem}" for trial in trials for problem in trial.problems]


def terminal(trials: Sequence[Trial]) -> str:
    """The table."""
    return page.text_table(_COLUMNS, [row.cells() for row in rows(trials)])


def document(trials: Sequence[Trial], setting: dict[str, Any]) -> dict[str, Any]:
    """For ``--json``: the figures and every trial."""
    return {
        "kvferry": kvferry.__version__,
        "setting": setting,
        "figures": [asdict(row) | {"met": row.met} for row in rows(trials)],
        "problems": problems(trials),
        "trials": [trial.document() for trial in trials],
    }
