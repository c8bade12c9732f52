"""``kvferry size`` and ``kvferry concurrency`` as people and programs see them."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.cli.table import COLUMNS
from kvferry.models.catalogue import entries

NAMES = [entry.name for entry in entries()]
WEIGHTS = {entry.name: f"{entry.parameters or 1e9:.0f}" for entry in entries()}


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert len(captured.err.splitlines()) == 1
    return captured.err


@pytest.mark.parametrize("name", NAMES)
def test_every_model_fits_the_columns(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for argv in (
        ("size", name, "--explain", "--layers", "--kv-dtype", "fp8_per_token_head"),
        ("concurrency", name, "--gpu=h100", "--gpu-memory=3TB", f"--weights={WEIGHTS[name]}", "--explain",
         "--lengths=4K:1,1M:1", "--gpus=1048576", "--kv-dtype=fp8_per_token_head"),
    ):  # fmt: skip
        assert max(map(len, shown(capsys, *argv).splitlines())) <= COLUMNS


def test_the_lists_fit_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("size", "--list"), ("concurrency", "--list-gpus")):
        text = shown(capsys, *argv)
        assert max(map(len, text.splitlines())) <= COLUMNS
        assert json.loads(shown(capsys, *argv, "--json"))


def test_the_explanation_adds_up_to_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, "size", "gpt-oss-120b", "--context", "128K", "--json"))
    (request,) = document["requests"]
    assert document["explanation"][-1].endswith(f"{request['kv_bytes']:,} B")
    assert request["kv_bytes"] == 4_836_556_800


def test_layers_of_the_document_add_up_to_its_totals(capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        found = json.loads(shown(capsys, "size", name, "--json"))
        kept = [layer for layer in found["layers"] if layer["span"] == "full"]
        total = sum(layer["bytes_per_entry"] / layer["tokens_per_entry"] for layer in kept)
        assert total == found["bytes_per_token_full_layers"]
        state = sum(layer["state_bytes"] for layer in found["layers"])
        assert state == found["fixed_state_bytes_per_sequence"]


def test_a_context_reads_as_tokens_or_in_powers_of_1024(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("size", "qwen3-8b", "--json", "--context", "28000", "--context", "1.5K", "--context", "1M")
    document = json.loads(shown(capsys, *argv))
    assert [request["tokens"] for request in document["requests"]] == [28_000, 1536, 1 << 20]
    assert any("1,048,576 are more than that" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("size",), "--list"),
        (("size", "qwen3-8b", "--context", "12x"), "28000 or 128K"),
        (("size", "qwen3-8b", "--context", "99999999G"), "outside 1 to 1,073,741,824 tokens"),
        (("size", "qwen3-8b", "--context", "9" * 24), "outside 1 to 1,073,741,824 tokens"),
        (("size", "qwen3-8b", "--context", "9" * 400), "outside 1 to 1,073,741,824 tokens"),
        (("size", "qwen3-8b", "--context", "0.5"), "outside 1 to 1,073,741,824 tokens"),
        (("size", "qwen3-8b", "--tp", "0"), "--tp: 0 is outside 1 to 1024"),
        (("size", "qwen3-8b", "--tp", "9" * 24), "is outside 1 to 1024"),
        (("size", "qwen3-8b", "--pp", "0"), "--pp: 0 is outside 1 to 1024"),
        (("size", "qwen3-8b", "--block-tokens", "0"), "--block-tokens: 0 is outside"),
        (("size", "qwen3-8b", "--batched-tokens", "x"), "--batched-tokens: 'x' is not a whole number"),
        (("size", "qwen3-8b", "--set", "num_key_value_heads=3"), "the second has to divide the first"),
        (("size", "deepseek-v4-pro", "--pp", "62"), "--pp is 62 for 61 layers"),
        (("size", "qwen3-8b", "--kv-dtype", "bf17"), "there are bf16"),
        (("size", "qwen3-8b", "--tp", "3"), "another --tp"),
        (("size", "qwen3-8b", "--set", "x"), "FIELD=VALUE"),
        (("size", "qwen3-8b", "--set", "model_type=none"), "not known"),
        (("size", "qwen3-8b", "--set", "num_key_value_heads=null"), "no num_key_value_heads"),
        (("concurrency", "qwen3-8b"), "--gpu"),
        (("concurrency", "qwen3-8b", "--gpu", "h10"), "did you mean h100"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--tp", "2", "--gpus", "3"), "multiple of 2"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--gpus", "0"), "--gpus: 0 is outside 1 to"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--gpus", ""), "--gpus: '' is not a whole number"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--gpus-file", ""), "--gpus-file: ''"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--gpu-memory", "0"), "--gpu-memory is 0"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--gpu-memory", "3GB"), "overhead alone takes"),
        (
            ("concurrency", "qwen3-8b", "--gpu=h100", "--weights=8GB", "--weights-dtype=fp8"),
            "--weights and --weights-dtype both say",
        ),
        (("size", "qwen3-8b", "--context", "1,5K"), "decimals take a point"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--weights", ""), "--weights: '' is not a size"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--lengths", ""), "'' is no number of tokens"),
        (
            ("concurrency", "qwen3-8b", "--gpu", "h100", "--lengths", "4K:1e308,8K:1e308"),
            "at most 1,000,000,",
        ),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--lengths", "4K:nan"), "not above 0"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--utilization", "90"), "at most 1"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--lengths", "4K:0"), "not above 0"),
        (("concurrency", "qwen3-8b", "--gpu", "h100", "--lengths", "4K:x"), "no number"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line_that_helps(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, *argv)


def test_requests_in_flight_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("concurrency", "llama-3.3-70b", "--gpu", "h100", "--tp", "4", "--gpus", "16", "--json")
    document = json.loads(shown(capsys, *argv, "--weights-dtype", "fp8", "--context", "32K"))
    assert document["replicas"] == 4
    by_dtype = {row["kv_dtype"]: row for row in document["requests_in_flight"]}
    assert by_dtype["bf16"]["per_replica"] == 19
    assert by_dtype["bf16"]["fleet"] == 76
    assert by_dtype["fp8"]["per_replica"] == 38
    assert document["kv_budget_bytes_per_replica"] == 4 * document["kv_budget_bytes_per_gpu"]


def test_lengths_can_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("4096\n4096\n32768\n")
    argv = ("concurrency", "qwen3-8b", "--gpu", "h100", "--json", "--lengths")
    from_file = json.loads(shown(capsys, *argv, str(file)))["mixed_requests_in_flight"]
    assert from_file == json.loads(shown(capsys, *argv, "4K:2,32K"))["mixed_requests_in_flight"]


def test_the_page_shows_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of docs/size.md that is not cut."""
    page = (Path(__file__).parents[2] / "docs" / "size.md").read_text()
    blocks = [
        textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.MULTILINE)
    ]
    shells = [shell for block in blocks for shell in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)]
    compared = 0
    for shell in shells:
        command, _, text = shell.partition("\n")
        if command.startswith("$ kvferry ") and "\n...\n" not in shell:
            assert shown(capsys, *command.split()[2:]).strip() == text.strip()
            compared += 1
        elif command.startswith("$ kvferry "):
            whole = shown(capsys, *command.split()[2:])
            assert text.partition("...\n")[2].strip() in whole
            compared += 1
    assert compared == 3


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from kvferry.cli.main import main; main(['size', 'qwen3-8b']);"
        "main(['concurrency', 'qwen3-8b', '--gpu', 'h100']);"
        "bad = {'torch', 'vllm', 'transformers', 'numpy', 'prometheus_client', 'asyncio'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("deepseek-v3.2", "fp8", "fp8_ds_mla, which kvferry plan counts"),
        ("gemma-3-27b", "fp8", "windows in 16 bits, as kvferry plan counts"),
        ("deepseek-v3", "fp8", ""),
        ("llama-3.1-8b", "fp8", ""),
        ("gemma-3-27b", "bf16", ""),
    ],
)
def test_where_fp8_is_another_layout_in_engines_it_is_said(
    name: str, dtype: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = json.loads(shown(capsys, "size", name, "--kv-dtype", dtype, "--json"))["notes"]
    assert any("kvferry plan counts" in note for note in notes) == bool(said)
    assert any(said in note for note in notes) or not said
