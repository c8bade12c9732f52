"""The long mode: ``python -m tests.fuzz [INPUTS [SEED]]``, a million inputs by default; prints the seed."""

import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.driver import timed
from tests.fuzz.subjects import subjects

INPUTS = 1_000_000


def main(inputs: int, seed: int) -> None:
    """Shared out so that every subject takes about as long."""
    print(f"{inputs} inputs, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        chosen = subjects(Path(directory))
        whole = sum(1 / subject.cost for subject in chosen)
        total = 0
        for subject in chosen:
            share = round(inputs / subject.cost / whole)
            fed, seconds = timed(subject, seed=seed, inputs=share)
            total += fed
            print(f"{subject.name}: {fed} inputs in {seconds:.1f} s", flush=True)
    print(f"{total} inputs: none crashed, hung or was accepted wrongly")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else INPUTS,
        int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbits(32),
    )
