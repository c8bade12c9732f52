"""No input crashes a decoder, makes it allocate or run without bound, or is taken for what it is not."""

import random
from pathlib import Path

import pytest
from tests.fuzz.driver import BoundError, fuzz
from tests.fuzz.mutate import mutate
from tests.fuzz.subjects import Subject, subjects

INPUTS = 6000
SEED = 1
NAMES = (
    "frames from clients",
    "frames from nodes",
    "frames to keepers",
    "frames from keepers",
    "frames from routers",
    "frames of feeds",
    "KV events of vLLM",
    "addresses of keepers",
    "words of keepers",
    "settings of keepers",
    "replies of Valkey",
    "values of Valkey",
    "encrypted values",
    "maps of a Cluster",
    "redirections",
    "headers of parts",
    "settings files",
    "environments",
    "URLs",
    "engine settings",
    "key files",
    "weights",
)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_in_the_documented_way(name: str, tmp_path: Path) -> None:
    subject = next(subject for subject in subjects(tmp_path) if subject.name == name)
    assert fuzz(subject, seed=SEED, inputs=INPUTS // subject.cost) == INPUTS // subject.cost


def test_every_subject_is_run(tmp_path: Path) -> None:
    assert [subject.name for subject in subjects(tmp_path)] == list(NAMES)


def test_the_same_seed_makes_the_same_inputs_and_most_are_damaged() -> None:
    seeds = [b"some good input", b"another one"]
    first = [mutate(random.Random(7), seeds) for _ in range(3)]
    rng = random.Random(7)
    many = [mutate(rng, seeds) for _ in range(1000)]
    assert first == [many[0]] * 3
    assert 200 < len(set(many) - set(seeds)) < 1000


def _crashes(data: bytes) -> None:
    if len(data) > 3 and data[1] == 0:
        raise IndexError("planted")


def _allocates(data: bytes) -> None:
    bytearray(data[0] << 20)


def _hangs(data: bytes) -> None:
    while data[:1] != b"s":
        pass


@pytest.mark.parametrize(
    ("feed", "error", "said"),
    [
        (_crashes, AssertionError, "IndexError: planted; reproduce with feed"),
        (_allocates, BoundError, "bytes were allocated"),
        (_hangs, AssertionError, "CPU time"),
    ],
)
def test_a_planted_crash_allocation_or_hang_is_found(feed: object, error: type[Exception], said: str) -> None:
    subject = Subject("planted", [b"some good input"], feed)  # type: ignore[arg-type]
    with pytest.raises(error, match=said):
        fuzz(subject, seed=SEED, inputs=INPUTS, cpu_s=0.5)
