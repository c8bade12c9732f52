"""What breaks prefixes is found with its first differing place, and what merely differs is not."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.traces.breaks import MAX_HEADS, Breaks, Cause
from kvferry.traces.openai import parts_of
from kvferry.traces.request import Request

RULES = "Answer in plain words and name your sources. " * 20


def watched(*bodies: dict[str, object]) -> Breaks:
    breaks = Breaks()
    for body in bodies:
        breaks.add(Request(None, 1, None, b"", parts=tuple(parts_of(body))))
    return breaks


def chat(system: str, user: str = "hello", tools: Sequence[str] = ()) -> dict[str, object]:
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "tools": [{"type": "function", "function": {"name": name, "description": RULES}} for name in tools],
    }


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ("It is 2026-11-30 07:01:12.", "It is 2026-11-30 07:04:55.", Cause.TIME),
        ("Session 3f2a9c1e-77aa-4b1c-9d2e.", "Session 91bb0c3d-12ab-4f00-8a7c.", Cause.IDENTIFIER),
        ("You have 12 credits.", "You have 11 credits.", Cause.NUMBER),
        ("You help Anna.", "You help Bert.", Cause.TEXT),
    ],
)
def test_a_difference_before_equal_instructions_is_a_break(one: str, other: str, cause: Cause) -> None:
    breaks = watched(chat(one + RULES), chat(other + RULES), chat(one + RULES))
    (found,) = breaks.found.values()
    assert (found.part, found.cause, found.requests) == ("system message 0", cause, 1)
    assert found.lost_bytes >= len(RULES)
    assert found.example.earlier != found.example.later


def test_reordered_tools_are_named_as_such() -> None:
    breaks = watched(chat(RULES, tools=["search", "fetch"]), chat(RULES, tools=["fetch", "search"]))
    (found,) = breaks.found.values()
    assert (found.part, found.cause) == ("tools", Cause.ORDER)


@pytest.mark.parametrize(
    "bodies",
    [
        [chat(RULES, "one"), chat(RULES, "two")],
        [chat(RULES), chat("You write short poems about the sea and nothing else. " * 9)],
        [chat(RULES), chat(RULES + "And be brief.")],
        [{"prompt": "one " + RULES}, {"prompt": "two " + RULES}],
    ],
)
def test_other_prompts_other_instructions_and_longer_ones_are_no_break(
    bodies: list[dict[str, object]],
) -> None:
    assert not watched(*bodies).found


def test_memory_is_bounded() -> None:
    breaks = watched(*(chat(f"Hour {number}. {RULES}") for number in range(3 * MAX_HEADS)))
    assert sum(len(heads) for heads in breaks._families.values()) == MAX_HEADS


def test_the_command_shows_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(
        "".join(json.dumps(chat(f"It is 07:{minute}:00. {RULES}")) + "\n" for minute in range(10, 20))
    )
    assert main(["analyze", str(path)]) == 0
    text = capsys.readouterr().out
    assert "a date or time in system message 0, 9 requests" in text
    assert "07:11:00" in text
