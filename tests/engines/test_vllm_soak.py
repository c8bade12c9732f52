"""Random life on real engines, for half a minute: ``kvferry bench soak`` has hours of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm_engines import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SOAK_S = 800.0


def test_random_life_leaves_every_answer_and_every_loaded_block_right_and_nothing_behind(
    models: Path,
) -> None:
    command = [sys.executable, "-m", "kvferry", "bench", "soak", "--json"]
    command += ["--minutes", "0.5", "--seed", "7", "--model", str(models / "llama")]
    command += ["--valkey-mb", "8"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SOAK_S, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["problems"], done.stderr[-3000:]
    assert done.returncode == 0
    assert found["compared_blocks"] > 0
