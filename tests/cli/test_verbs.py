"""What each verb prints, for people and for programs."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.node.fleet import WAIT_S, Engine, digests, eventually
from tests.servers import free_ports

import kvferry
from kvferry.cli import explain as explain_verb
from kvferry.cli import status as status_verb
from kvferry.cli.bench import BENCHMARKS
from kvferry.cli.main import VERBS, main
from kvferry.cli.table import COLUMNS, causes, clip, compact, duration, per_second, plain, share, table
from kvferry.client.admin import AdminClient
from kvferry.client.messages import NamespaceInfo
from kvferry.config import NODE_SETTINGS, NodeSettings
from kvferry.demo.nodeview import NodeView
from kvferry.node.explain import Record
from kvferry.node.node import Node
from kvferry.node.wire import Reason

SCREEN_LINES = 24
SCREEN_COLUMNS = 110


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    running = Node(NodeSettings(pool_bytes=64 << 20, socket_path=tmp_path / "node.sock", metrics_port=0))
    running.start()
    yield running
    running.close()


def test_the_overview_names_every_verb_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    for verb in VERBS:
        assert any(line.startswith(f"  {verb} ") for line in lines)


@pytest.mark.parametrize(
    "command", [*((verb,) for verb in VERBS), *(("bench", name) for name in BENCHMARKS)], ids=" ".join
)
def test_every_verb_and_every_benchmark_has_help(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_help_of_the_node_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["node", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= SCREEN_LINES
    for setting in NODE_SETTINGS:
        assert (setting.variable if setting.environment_only else setting.flag) in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvferry {kvferry.__version__}\n"


def test_starting_the_command_loads_neither_torch_nor_an_engine_nor_the_metrics() -> None:
    probe = (
        "import sys, kvferry, kvferry.cli.main, kvferry.config, kvferry.client.admin;"
        "kvferry.cli.main.main(['--help']);"
        "print(sorted({'torch','vllm','numpy','transformers','prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_flag_survives_a_shell_and_holds_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "vllm"]) == 0
    flag, value = shlex.split(capsys.readouterr().out)
    assert flag == "--kv-transfer-config"
    assert json.loads(value) == {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    argv = ["flags", "vllm", "--json", "--socket", "/run/it's.sock", "--chunk-tokens", "256", "--domain", "a"]
    assert main(argv) == 0
    extra = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert extra == {"socket": "/run/it's.sock", "chunk_tokens": 256, "domain": "a"}


def test_status_shows_people_units_and_programs_everything(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--socket", str(tmp_path / "node.sock")]) == 0
    text = capsys.readouterr().out
    assert "0 B of 64 MiB" in text
    assert "no engine is connected" in text
    assert main(["status", "--json", "--socket", str(tmp_path / "node.sock")]) == 0
    assert json.loads(capsys.readouterr().out)["pool_bytes"] == node.statistics().pool_bytes


def test_the_status_of_a_large_node_fits_a_hundred_columns(node: Node) -> None:
    status = json.loads(msgspec.json.encode(node.statistics()))
    status["catalogue"] |= {
        "used_bytes": 1023.9 * 2**30,
        "pool_bytes": 1023.9 * 2**30,
        "evicted_parts": 10**9,
    }
    status["counters"] |= {
        "lookups": 10**9,
        "lookup_chunks": 10**12,
        "committed_bytes": 10**15,
        "hit_tokens": {"memory": 10**12, "valkey": 10**12},
        "hit_bytes": {"memory": 10**15, "valkey": 10**15},
        "failed": {f"{reason.value}-{tier}": 10**6 for reason in Reason for tier in ("memory", "valkey")},
    }
    addresses = " ".join(f"10.0.0.{number}:6379" for number in range(32))
    status["tier"] = {
        "name": "valkey",
        "state": "degraded",
        "fetched_bytes": 10**15,
        "stored_bytes": 10**15,
        "failed": {"dropped": 5},
        "detail": {
            "server": "valkey 9.1.2",
            "mode": "cluster of 32 shards",
            "url": "valkey-cluster://10.0.0.1:6379,10.0.0.2:6379",
            "shards": addresses,
            "warning": "a sentence of many words " * 5,
            "breaker_open": "10.0.0.1:6379: connection refused",
        },
    }
    engine = {
        "engine": "vllm:" + "long" * 20 + ":abcdef12/0",
        "role": "scheduler",
        "rank": 100,
        "pid": 4194304,
    }
    more = {"label": "/models/" + "m" * 200, "domain": "d" * 64, "loads": 1000, "reservations": 8192}
    status["engines"] = [engine | more | {"namespace": "5f1d02c9" * 4}]
    status["namespaces"] = [
        {"namespace": f"{number:032x}", "label": "/models/" + "m" * 200, "domain": "d", "chunk_tokens": 128}
        for number in range(100)
    ]
    lines = status_verb.render(status).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    text = "\n".join(lines)
    (valkey,) = [line.split() for line in lines if line.startswith("valkey  degraded")]
    assert valkey[2] == "-"
    assert "valkey 9.1.2, cluster of 32 shards, valkey-cluster://10.0.0.1:6379" in text
    assert all(address in text.split() for address in addresses.split())
    assert "breaker open: 10.0.0.1:6379: connection refused" in text
    assert ":abcdef12/0  scheduler   100  4194304  5f1d02c9" in text
    assert "and 84 earlier ones (--json)" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (999_999.6, "1.0 mn"),
        (1_000_000, "1.0 mn"),
        (1_384_802, "1.4 mn"),
        (999_940_000, "999.9 mn"),
        (999_999_999, "1.0 bn"),
        (5.04e12, "5.0 tn"),
    ],
)
def test_large_counts_take_seven_columns(number: float, text: str) -> None:
    assert compact(number) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12_000, "12,000 a second"),
        (100, "100 a second"),
        (9.96, "10 a second"),
        (0.191, "0.19 a second"),
        (1e-3, "3.6 an hour"),
    ],
)
def test_a_rate_has_no_exponent(rate: float, text: str) -> None:
    assert per_second(rate) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.85, "0.85"), (2.1, "2.1"), (327_680, "327,680"), (1e6, "1,000,000"), (0, "0")]
)
def test_an_input_is_shown_as_it_was_written(number: float, text: str) -> None:
    assert plain(number) == text


def test_a_long_name_keeps_both_its_ends() -> None:
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghijk", 10) == "abcd..hijk"
    assert clip("abcdefghijk", 9) == "abc..hijk"


def test_dropping_says_how_much(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del node
    assert main(["drop", "memory", "--json", "--socket", str(tmp_path / "node.sock")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tier"], said["dropped_parts"], said["dropped_bytes"]) == ("memory", 0, 0)


def test_one_namespace_is_dropped_by_the_digits_that_status_shows(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = ["--socket", str(tmp_path / "node.sock")]
    spaces = [
        NamespaceInfo(bytes.fromhex("0ddba11a" + "5f1d02c9" * 3), (1 << 20,), 128, "test", "first"),
        NamespaceInfo(bytes.fromhex("0ddba11a" + "5f1d02ca" * 3), (1 << 20,), 128, "test", "second"),
    ]
    engines = [Engine(tmp_path / "node.sock", space).connected() for space in spaces]
    try:
        for engine in engines:
            eventually(lambda engine=engine: engine.save(digests(1)) == 1, "stored")
        eventually(lambda: node.statistics().catalogue.ready_parts == 2, "committed")
        assert main(["status", *socket]) == 0
        text = capsys.readouterr().out
        assert "namespace 5f1d02c9 first" in text
        assert "namespace 5f1d02ca second" in text
        engines[0].scheduler.end(engines[0].lookup(digests(1), "cmpl-1").load_id)
        assert main(["explain", "cmpl-1", *socket]) == 0
        assert "namespace 5f1d02c9 first" in capsys.readouterr().out
        eventually(lambda: node.statistics().catalogue.pins == 0, "the load has ended")
        for wrong, said in (("5f1d", "2 namespaces begin"), ("abcd", "no namespace begins")):
            assert main(["drop", "memory", "--namespace", wrong, *socket]) != 0
            err = capsys.readouterr().err
            assert said in err
            assert "kvferry status" in err
        assert main(["drop", "memory", "--namespace", "ab" * 16, *socket]) != 0
        assert "unknown namespace abab" in (err := capsys.readouterr().err)
        assert "kvferry status" in err
        assert main(["drop", "memory", "--namespace", "5F1D02C9", *socket]) == 0
        assert capsys.readouterr().out == "dropped 1 MiB from memory\n"
        assert node.statistics().catalogue.ready_parts == 1
    finally:
        for engine in engines:
            engine.close()


def test_an_unknown_request_is_a_failure_not_a_traceback(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del node
    assert main(["explain", "nobody", "--socket", str(tmp_path / "node.sock")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "'nobody'" in err


def test_every_reason_of_an_answer_has_a_meaning() -> None:
    assert {reason.value for reason in Reason} <= set(explain_verb.MEANING)


def test_explain_tells_tiers_and_the_first_missing_chunk() -> None:
    record = Record(
        "cmpl-1", 0.0, engine="A", chunk_tokens=128, prompt_tokens=1300, chunks=10, engine_chunks=1
    )
    record.reused_chunks = {"memory": 4, "valkey": 2}
    record.reused_bytes = {"memory": 4 << 20, "valkey": 2 << 20}
    record.first_missing_chunk, record.reason = 7, "absent"
    document = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    text = explain_verb.render(document)
    assert "memory    4 chunks = 512 tokens, 4 MiB" in text
    assert "valkey    2 chunks = 256 tokens, 2 MiB" in text
    assert "chunk 7 is the first one not reused: absent (no tier has the next chunk)" in text
    assert "is missing" not in text
    state = {**document, "missing_part": 2, "missing_trailing": 1}
    assert "part 2 is missing, which is needed of the last chunk before the end" in explain_verb.render(state)
    rank = {**document, "missing_part": 1, "missing_trailing": 0}
    assert "part 1 is missing, which is needed of every chunk" in explain_verb.render(rank)


def test_a_node_serves_until_it_is_told_to_stop_and_leaves_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvferry", "node", "--pool", "64MiB"]
    command += ["--socket", str(path), "--metrics-port", str(port)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    try:
        eventually(lambda: NodeView(path).answers() or process.poll() is not None, "the node's start")
        with AdminClient(path) as admin:
            assert admin.status()["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert out == b""
    assert not path.exists()


def test_tables_align_numbers_right_and_words_left() -> None:
    assert table(["A", "N"], [["x", "10"], ["long", "5"]]) == "A      N\nx     10\nlong   5"


def test_numbers_carry_units() -> None:
    assert [duration(s) for s in (0.0042, 0.5, 3.21, 600, 9000)] == [
        "4.2 ms",
        "500 ms",
        "3.2 s",
        "10 min",
        "2.5 h",
    ]
    assert share(1, 3) == "33%"
    assert share(0, 0) == "-"
    assert causes({"a": 1, "b": 1200, "c": 0}) == "b 1,200, a 1"
    assert causes({}) == "none"
