"""``kvferry node`` starts without Valkey, serves its memory, and uses Valkey when it answers."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.node.fleet import Engine, digests, eventually
from tests.servers import free_ports

from kvferry.cli.status import render
from kvferry.client.admin import AdminClient
from kvferry.client.messages import Reason
from kvferry.testing.processes import Program
from kvferry.testing.servers import start_server

CHUNKS = 4


def test_a_node_without_its_valkey_serves_memory_and_finds_it_later(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "node.sock"
    command = [sys.executable, "-m", "kvferry", "node", "--pool", "64MiB", "--socket", str(path)]
    command += ["--valkey", f"valkey://127.0.0.1:{port}", "--metrics-port", "0"]

    def status() -> dict[str, Any]:
        with AdminClient(path) as admin:
            return admin.status()

    with ExitStack() as stack:
        node = stack.enter_context(Program("node", command, directory=tmp_path, ready=path.exists))
        before = status()
        assert before["tier"]["state"] == "down"
        text = " ".join(render(before).split())
        assert "valkey down" in text
        assert "warning: Valkey unreachable" in text
        engine = Engine(path)
        stack.callback(engine.close)
        engine.connected()
        prompt = digests(CHUNKS)
        engine.save(prompt)
        answer = engine.lookup(prompt)
        assert [end.reason for end in engine.load(answer, prompt)] == [Reason.COMPLETE]

        server = start_server(tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", port=port)
        stack.callback(server.stop)
        eventually(lambda: status()["tier"]["state"] == "up", "Valkey is used")
        later = digests(CHUNKS, "later")
        engine.save(later)
        eventually(lambda: len(server.key_names()) >= CHUNKS, "written to Valkey")
        assert node.terminate() == 0
    log = node.log.read_text()
    assert log.count("Valkey unreachable") == 1, log
    assert "valkey answers now, and is used" in log
    assert "Traceback" not in log
