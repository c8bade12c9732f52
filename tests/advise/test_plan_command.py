"""``kvferry plan``: what it prints in every form, that its lines can be pasted, and what it refuses."""

import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import flags
from kvferry.cli.main import main
from kvferry.cli.table import COLUMNS

ROOT = Path(__file__).parents[2]
RECIPES = {
    "chat": ["llama-3.1-8b", "--gpu=h100", "--workload=chat"],
    "rag": ["llama-3.3-70b", "--gpu=h100", "--workload=rag"],
    "agent": ["llama-3.3-70b", "--gpu=h100", "--workload=agent"],
    "one-shot": ["llama-3.3-70b", "--gpu=h100", "--workload=one-shot"],
    "windows": ["gemma-3-27b", "--gpu=h200", "--workload=agent", "--gpus=16"],
    "own": [
        *("llama-3.1-70b", "--gpu=a100", "--tp=8", "--gpus=16", "--context-p50=20000", "--context-p99=28K"),
        *("--new-tokens=600", "--output-tokens=240", "--turns=20", "--conversations=100", "--gap=30s"),
    ],
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(capsys, *RECIPES[name], *more, "--json"))
    return document


@pytest.mark.parametrize("name", RECIPES)
def test_no_line_is_wider_than_the_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *RECIPES[name], "--explain")
    assert max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize("name", RECIPES)
def test_the_lines_to_paste_are_the_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As bash reads them, with ``printf`` in place of the command; JSON may differ in white space."""
    for command in found(capsys, name)["flags"].values():
        pasted = "\n".join(command["lines"])
        before = pasted.split(" --")[0].split(" meta-llama")[0].split(" google")[0]
        script = "printf '%s\\0'" + pasted[len(before) :]
        ran = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
        read = ran.stdout.removesuffix("\0").split("\0")
        assert [_plain(value) for value in read] == [_plain(value) for value in command["arguments"]]


def _plain(value: str) -> Any:
    return json.loads(value) if value.startswith("{") else value


def test_the_connector_is_configured_as_the_page_about_vllm_and_kvferry_flags_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = found(capsys, "agent")
    vllm, sglang = (document["flags"][name]["arguments"] for name in ("vllm", "sglang"))
    config = json.loads(vllm[vllm.index("--kv-transfer-config") + 1])
    page = (ROOT / "docs" / "engines" / "vllm.md").read_text()
    printed = re.search(r"--kv-transfer-config '(\{.*?\})'", page, re.DOTALL)
    assert printed is not None
    assert config == json.loads(printed[1]) == flags.CONNECTOR
    backend = json.loads(sglang[sglang.index("--hicache-storage-backend-extra-config") + 1])
    assert backend == flags.BACKEND
    assert set(shlex.split(flags.HICACHE)) <= set(sglang)


def test_the_three_recipes_print_the_settings_of_their_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    chat, rag, agent = (
        found(capsys, name)["flags"]["vllm"]["arguments"] for name in ("chat", "rag", "agent")
    )
    for arguments, length, batched in (
        (chat, "16384", "2048"),
        (rag, "131072", "16384"),
        (agent, "131072", "16384"),
    ):
        values = dict(pairwise(arguments))
        assert values["--max-model-len"] == length
        assert values["--max-num-batched-tokens"] == batched
        assert values["--gpu-memory-utilization"] == "0.92"
        assert values["--kv-cache-dtype"] == "fp8"
        assert values.get("--tensor-parallel-size", "1") == ("1" if arguments is chat else "4")
    assert "--kv-transfer-config" not in chat
    offload = json.loads(rag[rag.index("--kv-transfer-config") + 1])
    assert offload["kv_connector"] == "OffloadingConnector"
    assert offload["kv_connector_extra_config"] == {"cpu_bytes_to_use": 200_000_000_000, "block_size": 64}
    assert found(capsys, "agent")["flags"]["node"]["arguments"][:2] == ["--pool", "400GB"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_figure_of_the_answer_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number of the tables is in a line of the explanation, which names where its inputs are from."""
    document = found(capsys, name)
    lines = "\n".join(document["explanation"])
    for field, value in document["workload"].items():
        if isinstance(value, dict):
            assert value["from"], field
            assert f"({value['from']})" in lines
    tier, fleet, price = document["shared_tier"], document["fleet"], document["price"]
    for text in (
        f"{fleet['kv_budget_bytes_per_gpu']:,} B",
        f"{tier['conversation_bytes']:,}",
        f"{tier['peak_bytes'] / 1e9:,.1f} GB",
        f"{tier['planned_bytes'] / 1e9:,.1f} GB",
        f"{tier['read_bytes_per_s'] / 1e9:,.2f} GB/s",
        f"{document['settings']['max_model_len']:,} tokens",
        f"{document['settings']['offload_bytes']:,} B",
        f"${tier['usd_per_month_if_in_another_zone']:,.0f}",
        f"${price['purchases_put_off_usd_per_month']:,.0f}",
        *(f"hit rate {row['hit_rate']:.4f}" for row in document["expected"]),
        *(f"busy {row['busy_share']:.3f}" for row in document["expected"]),
        *(f"{row['ttft_computed_s']:,.3f} s" for row in document["returns"]),
        *(f"{row['ttft_shared_tier_s']:,.3f} s" for row in document["returns"]),
    ):
        assert text in lines, text


def test_markdown_has_the_same_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *RECIPES["agent"], "--markdown")
    plain = run(capsys, *RECIPES["agent"])
    assert text.startswith("# KV cache plan: llama-3.3-70b")
    for line in plain.splitlines():
        if line.startswith(("+ shared tier", "capacity", "net ")):
            cells = [cell for cell in re.split(r" {2,}", line) if cell]
            assert f"| {' | '.join(cells)} |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


class Tags(HTMLParser):
    """Whether tags are closed in their order, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.figures += tag == "svg"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.html"
    document = found(capsys, name, f"--html={file}")
    page = file.read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.figures >= 4
    assert "<script" not in page and "http" not in re.sub(r"https://huggingface.co\S*", "", tags.text)
    assert document["layers"][1]["why"][0].replace("`", "") in tags.text
    for command in document["flags"].values():
        assert "\n".join(command["lines"]) in tags.text


def test_what_a_trace_measured_is_taken_from_its_analysis_and_from_the_log_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        for number in range(400):
            who, turn = number % 40, number // 40
            ids = [who * 1000 + block for block in range(4 + 2 * turn)]
            record = {
                "timestamp": 1000 * number,
                "input_length": 512 * len(ids),
                "output_length": 100,
                "hash_ids": ids,
            }
            file.write(json.dumps(record) + "\n")
    assert main(["analyze", str(trace), "--json"]) == 0
    analysis = tmp_path / "analysis.json"
    analysis.write_text(capsys.readouterr().out)
    machines = ("llama-3.1-8b", "--gpu=h100", "--gpus=4")
    one, two = (json.loads(run(capsys, *machines, f"--trace={file}", "--json")) for file in (trace, analysis))
    for document, file in ((one, trace), (two, analysis)):
        load = document["workload"]
        assert load["context_p50"] == {"value": 512 * 12, "from": f"trace {file.name}"}
        assert load["turns"]["value"] == 10
        assert load["new_tokens"]["value"] == 1024 - 100
        assert load["requests_s"]["value"] == pytest.approx(400 / 399)
    assert one["workload"]["reuse_by_tokens"] == two["workload"]["reuse_by_tokens"]
    assert one["expected"] == two["expected"]
    given = json.loads(run(capsys, *machines, f"--trace={trace}", "--turns=5", "--json"))
    assert given["workload"]["turns"] == {"value": 5, "from": "given"}


BAD = [
    ([], "no model given"),
    ([*RECIPES["rag"], "--json", "--markdown"], "two forms"),
    (["llama-3.3-70b"], "no GPU given"),
    (["llama-3.3-70b", "--gpu=h100"], "missing: --context-p50, --output-tokens"),
    (["lama", "--gpu=h100"], "no model of the catalogue"),
    (["llama-3.3-70b", "--gpu=h1000"], "GPU 'h1000' is not known"),
    ([*RECIPES["rag"], "--gpus=6"], "6 GPUs are no whole replicas of TP"),
    ([*RECIPES["rag"], "--tp=3"], "one must divide the other"),
    ([*RECIPES["rag"], "--tp=1"], "does not fit"),
    ([*RECIPES["rag"], "--reuse=2"], "--reuse '2': give a number from 0 to 1"),
    ([*RECIPES["rag"], "--reuse=nan"], "--reuse 'nan'"),
    ([*RECIPES["rag"], "--gap=soon"], "--gap 'soon' is no time"),
    ([*RECIPES["rag"], "--context-p50=x"], "--context-p50: 'x' is no number of tokens"),
    ([*RECIPES["rag"], "--context-p50=100", "--context-p99=50"], "--context-p99 50 is less"),
    ([*RECIPES["rag"], "--context-p99=900K"], "more than the 131,072"),
    ([*RECIPES["rag"], "--new-tokens=70000"], "--new-tokens 70000 is more"),
    ([*RECIPES["rag"], "--trace=/nowhere/x"], "cannot read /nowhere/x"),
    ([*RECIPES["rag"], "--html=/nowhere/x"], "--html: cannot write /nowhere/x"),
    ([*RECIPES["rag"], "--utilization=1.5"], "--utilization '1.5'"),
    ([*RECIPES["rag"], "--host-memory=much"], "--host-memory: 'much' is not a size"),
    ([*RECIPES["rag"], "--shard-memory=1"], "--shard-memory is 1: give at least"),
    ([*RECIPES["rag"], "--gpus-per-host=0"], "--gpus-per-host"),
    ([*RECIPES["rag"], "--turns=0"], "--turns '0'"),
    ([*RECIPES["rag"], "--conversation=3"], "did you mean --conversations?"),
    (["deepseek-v3", "--gpu=l4", "--workload=chat"], "does not fit on up to 8 of these GPUs"),
    (["glm-5", "--gpu=b200", "--workload=chat"], "the number of weights of glm-5 is not known"),
]


@pytest.mark.parametrize(("arguments", "why"), BAD, ids=[why for _, why in BAD])
def test_bad_input_is_one_line_that_names_it(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert why in err


def test_a_config_of_ones_own_needs_weights_and_for_experts_what_a_token_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "max_position_embeddings": 131_072,
    }
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    machine = (str(file.parent), "--gpu=h100", "--workload=chat")
    assert main(["plan", *machine]) == 2
    assert "--weights" in capsys.readouterr().err
    own = json.loads(run(capsys, *machine, "--weights=16.06GB", "--json"))
    known = found(capsys, "chat")
    assert own["expected"][2]["ttft_mean_s"] == pytest.approx(known["expected"][2]["ttft_mean_s"])
    assert own["flags"]["vllm"]["arguments"][0] == str(file.parent)
    file.write_text(json.dumps({"text_config": {**config, "num_experts": 8}, "model_type": "llava"}))
    mixed = json.loads(run(capsys, *machine, "--weights=16.06GB", "--json"))
    assert mixed["expected"][0]["ttft_mean_s"] is None and mixed["returns"] == []
    assert mixed["shared_tier"]["peak_bytes"] == known["shared_tier"]["peak_bytes"]
    told = json.loads(run(capsys, *machine, "--weights=16.06GB", "--active-parameters=2e9", "--json"))
    assert told["expected"][0]["ttft_mean_s"] < known["expected"][0]["ttft_mean_s"]


def test_a_file_that_is_neither_an_analysis_nor_a_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(['{"a": 1}', "[]", '{"traffic": 1, "reuse": 2}', "\x00\x01", ""]):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        assert main(["plan", *RECIPES["rag"], f"--trace={file}"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_it_needs_no_heavy_import() -> None:
    """Start-up under 0.3 s is this, on any machine."""
    code = (
        "import sys; from kvferry.cli.main import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'numpy', 'vllm', 'kvferry.node', 'kvferry.traces', 'asyncio') "
        "if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", *RECIPES["agent"]],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.stderr.strip() == "[]"


def test_the_page_about_it_names_every_argument_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    for flag in set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out)) - {
        "--help",
        "--list-gpus",
        "--list",
        "--json",
    }:
        assert f"`{flag}" in text, flag
    document = found(capsys, "agent")
    for field in document:
        assert f"`{field}`" in text, field
    for field in (
        *document["shared_tier"],
        *document["expected"][0],
        *document["returns"][0],
        *document["price"],
    ):
        assert f"`{field}`" in text, field


def test_a_name_of_untuned_weights_is_said_to_stand_for_the_checkpoint_that_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said, tuned = (" ".join(found(capsys, name)["assumptions"]) for name in ("chat", "agent"))
    assert "Commands name meta-llama/Llama-3.1-8B, under which the config is published" in said
    assert "Commands name" not in tuned
