"""What a killed keeper leaves in a bucket or a directory, and what another makes of it."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.objects import QUICK, ObjectStore

import kvferry
from kvferry.testing.s3 import S3Server
from kvferry.testing.tier_calls import fetch_all, some_bytes, some_ref
from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects.settings import ObjectSettings

_PLACES = itertools.count()
SIZE = 100_000
WRITER = """
import sys, threading
from kvferry.testing.tier_calls import some_bytes, some_ref, store_all
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
tier = ObjectTier.open(ObjectSettings(sys.argv[1], pack_bytes=1 << 20, linger_s=0.01, stall_s=30.0))

def removed(n):
    gone = threading.Event()
    tier.remove([some_ref(100_000, 5 * n)], done=lambda outcomes: gone.set())
    gone.wait()

for n in range(100_000):
    parts = [(some_ref(100_000, m), some_bytes(100_000, m)) for m in range(5 * n, 5 * n + 5)]
    outcomes = store_all(tier, parts)
    removed(n)
    print(n, *{outcome.value for outcome in outcomes}, flush=True)
"""


@pytest.fixture(params=["directory", "bucket"])
def store(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://crashes/{next(_PLACES)}"
    url = bucket if request.param == "bucket" else f"file://{tmp_path}/objects"
    made = ObjectStore(ObjectSettings(url, **QUICK))
    yield made
    made.close()


def test_after_a_kill_all_that_was_reported_is_found_and_what_was_removed_is_not(store: ObjectStore) -> None:
    command = [sys.executable, "-c", WRITER, store.settings.url]
    env = os.environ | {"PYTHONPATH": str(Path(kvferry.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
        assert writer.stdout is not None
        reported = [writer.stdout.readline() for _ in range(5)]
        writer.send_signal(signal.SIGKILL)
        reported += writer.stdout.readlines()
    assert all(line.split()[1:] == ["ok"] for line in reported)
    tier = store.open()
    refs = [some_ref(SIZE, n) for n in range(5 * len(reported) + 10)]
    for n, (result, memory) in enumerate(fetch_all(tier, refs)):
        assert result.outcome in (Outcome.OK, Outcome.MISS)
        assert result.outcome is Outcome.MISS or memory == some_bytes(SIZE, n)
        if n < 5 * len(reported):
            assert result.outcome is (Outcome.MISS if n % 5 == 0 else Outcome.OK)


def test_what_writes_of_a_killed_keeper_left_in_a_directory_is_swept_when_it_is_old(tmp_path: Path) -> None:
    store = ObjectStore(ObjectSettings(f"file://{tmp_path}", **QUICK))
    packs = tmp_path / "v1" / ("0" * 32) / "packs"
    packs.mkdir(parents=True)
    old, new, other = (packs / name for name in ("0" * 32 + "#1", "1" * 32 + "#2", "2" * 32))
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (1.0, 1.0))
    store.open()
    store.close()
    assert sorted(packs.iterdir()) == [new, other]
