"""What a soak found, for people and as a document."""

from typing import Any

import kvferry
from kvferry.bench.soak.judging import Finding
from kvferry.bench.soak.run import Outcome
from kvferry.demo import page
from kvferry.demo.page import Column

_COLUMNS = (Column("what"), Column("n", numeric=True))


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """In words."""
    tally = outcome.tally
    share = tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0
    found: list[tuple[str, int | str]] = [
        ("seconds of traffic", f"{outcome.seconds:.0f}"),
        *((f"requests {how}", n) for how, n in sorted(tally.requests.items())),
        ("tokens answered", tally.tokens),
        ("prompt tokens not computed", f"{share:.0%}"),
        *((f"answers judged: {finding.value}", tally.findings[finding]) for finding in Finding),
        *((name.replace("_", " "), n) for name, n in sorted(outcome.counts.items())),
        *((event.value, n) for event, n in outcome.events.items()),
        ("parts of chunks stored", outcome.audit.chunks),
        ("loaded blocks compared in the engines' memory", outcome.audit.blocks),
        ("of them wrong", len(outcome.audit.wrong)),
        ("not given back", len(outcome.left)),
        ("problems in all", len(outcome.problems)),
    ]
    return [(what, f"{n:,}" if isinstance(n, int) else n) for what, n in found]


def terminal(outcome: Outcome) -> str:
    """The table."""
    return page.text_table(_COLUMNS, rows(outcome))


def document(outcome: Outcome, setting: dict[str, Any]) -> dict[str, Any]:
    """For ``--json``."""
    tally = outcome.tally
    return {
        "kvferry": kvferry.__version__,
        "setting": setting,
        "seconds": outcome.seconds,
        "requests": dict(tally.requests),
        "tokens": tally.tokens,
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "judged": {finding.value: tally.findings[finding] for finding in Finding},
        "counts": outcome.counts,
        "events": {event.value: n for event, n in outcome.events.items()},
        "stored_parts": outcome.audit.chunks,
        "compared_blocks": outcome.audit.blocks,
        "problems": outcome.problems,
    }
