"""docs/json.md names exactly the fields that the commands print.

For another command: a section ``## kvferry VERB --json`` with a table on that page, and its command lines in
``RUNS``, which together print every field once.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "json.md"
SECTION = re.compile(r"^## kvferry (\w+) --json\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
UNITS = {
    "1/s", "10^12/s", "10^9 bytes", "10^9 bytes/s", "GPUs", "GiB", "USD", "USD/h", "as input", "blocks",
    "bytes", "config", "engines", "h", "lines", "number", "object", "ranks", "ratio", "requests", "s",
    "s or number", "sessions", "share", "text", "tokens", "tokens/s", "true, false",
}  # fmt: skip
LOG = [
    {"timestamp": 1.79e9 + at, "session_id": f"s{at % 2}", "model": "m", "messages": messages,
     "usage": {"prompt_tokens": 900, "completion_tokens": 9}}
    for at, messages in enumerate(
        [{"role": "system", "content": f"It is 2026-11-{day}. " + "Be brief. " * 400},
         *({"role": "user", "content": f"{turn} " * 200} for turn in range(day - 9))]
        for day in (10, 11, 12, 12)
    )
]  # fmt: skip
PRICE = (
    "price --gpu h100 --gpus 8 --requests-s 2 --prompt-tokens 16K --prefill-tokens-s 9000 --own-hit-rate 0.4"
)
RUNS = {
    "size": [
        "size gemma-3n-e4b", "size qwen3.5-27b", "size llama-3.1-8b --context 1M",
    ],
    "concurrency": [
        "concurrency llama-3.3-70b --gpu h100 --tp 4 --lengths 4K:1,8K:2",
        "concurrency llama-3.1-8b --gpu h100 --context 1M",
        "concurrency llama-3.1-8b --gpu b200",
    ],
    "analyze": [
        "analyze {log} --model llama-3.1-8b",
        "analyze {root}/tests/traces/conversations.jsonl",
        "analyze {lengths}",
    ],
    "price": [
        f"{PRICE} --hit-rate 0.85 --model llama-3.3-70b --ram-gib 300",
        f"{PRICE} --hit-rate 0.4 --model llama-3.3-70b --ram-gib 300",
    ],
}  # fmt: skip


def documented(verb: str) -> dict[str, str]:
    """Field to unit."""
    return dict(ROW.findall(dict(SECTION.findall(PAGE.read_text()))[verb]))


def printed(value: object, at: str = "") -> Iterator[tuple[str, bool]]:
    """The paths of a document, each with whether there is a value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from printed(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from printed(inner, f"{at}[]")
    else:
        yield at, value not in (None, [], {})


def pattern(field: str) -> str:
    return "".join(r"[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", field))


@pytest.mark.parametrize("verb", RUNS)
def test_the_page_names_the_fields_that_the_command_prints(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, lengths = tmp_path / "log.jsonl", tmp_path / "azure.csv"
    log.write_text("".join(json.dumps(line) + "\n" for line in [*LOG, {"no": "request"}]))
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-30 00:00:00,10,2\n")
    fields, found = documented(verb), set()
    for line in RUNS[verb]:
        argv = line.format(log=log, root=ROOT, lengths=lengths).split()
        assert main([*argv, "--json"]) == 0
        found |= set(printed(json.loads(capsys.readouterr().out)))
    unnamed = {
        path
        for path, has in found
        if not any(re.fullmatch(pattern(field) + ("" if has else r"([.\[].*)?"), path) for field in fields)
        and (has or not any(re.match(re.escape(path) + r"([.\[]|$)", field) for field in fields))
    }
    assert not unnamed
    never = {
        field
        for field in fields
        if not any(re.match(pattern(field) + r"([.\[]|$)", path) for path, _ in found)
    }
    assert not never


@pytest.mark.parametrize("verb", [verb for verb, _ in SECTION.findall(PAGE.read_text())])
def test_every_section_is_tested_and_every_unit_known(verb: str) -> None:
    assert verb in RUNS
    assert {unit.strip() for unit in documented(verb).values()} <= UNITS
