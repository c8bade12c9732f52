"""What --explain says of an analysis adds up, is what the document has, and fits the terminal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.cli.table import COLUMNS

CONVERSATIONS = str(Path(__file__).with_name("conversations.jsonl"))
SHARE = re.compile(r"([\d,]+) / ([\d,]+) = ([\d.]+)%")


def explained(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """The document, and its explanation as one text."""
    assert main(["analyze", *argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found, "\n".join(found["explanation"])


def test_every_share_is_its_part_of_its_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = explained(capsys, CONVERSATIONS, "--model", "llama-3.1-8b")
    shares = [
        (int(part.replace(",", "")), int(whole.replace(",", "")), float(percent))
        for part, whole, percent in SHARE.findall(text)
    ]
    assert len(shares) >= 8
    for part, whole, percent in shares:
        assert 100 * part / whole == pytest.approx(percent, abs=0.051)


def test_it_has_the_numbers_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = explained(capsys, CONVERSATIONS, "--model", "llama-3.1-8b")
    reuse, traffic = found["reuse"], found["traffic"]
    row = reuse["by_capacity"][-1]
    for number in (
        traffic["requests"], traffic["input_tokens"], traffic["last_half"]["input_tokens"],
        reuse["distinct_blocks"], reuse["distinct_tokens"], reuse["hit_rate"]["whole_trace_tokens"],
        reuse["hit_rate"]["last_half_tokens"], row["blocks"], row["lru"]["last_half_tokens"],
        reuse["gaps"]["reused_tokens"], reuse["conversations"]["number"], found["kv_bytes_per_token"],
        reuse["distinct_tokens"] * found["kv_bytes_per_token"], reuse["slices"][-1]["hit_tokens"],
    ):  # fmt: skip
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", text), number


def test_tokens_behind_each_rate_are_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = explained(capsys, CONVERSATIONS)
    rates, traffic = found["reuse"]["hit_rate"], found["traffic"]
    assert rates["whole_trace"] == rates["whole_trace_tokens"] / traffic["input_tokens"]
    assert rates["last_half"] == rates["last_half_tokens"] / traffic["last_half"]["input_tokens"]


@pytest.mark.parametrize("extra", [(), ("--model", "llama-3.1-8b"), ("--kv-bytes-per-token", "1000")])
def test_it_fits_the_columns(capsys: pytest.CaptureFixture[str], extra: tuple[str, ...]) -> None:
    assert main(["analyze", CONVERSATIONS, "--explain", *extra]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= COLUMNS


def test_lengths_alone_are_explained_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-30 00:00:00,10,2\n")
    _, text = explained(capsys, str(path))
    assert "the format has lengths only" in text
