"""What engines wrote down of the blocks in their own memory, and whether what was loaded is what was stored.

A saving engine writes the digest of every block that it copies out under a chunk's name, read from its KV
tensors; a loading engine does the same for every block that was copied in, once it is in place. Neither
reads what the connector copied, and a reader of both needs nothing of node, Valkey or the part's layout.
"""

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "SOAK_AUDIT"
MAX_SHOWN = 20


class Notes:
    """Appends to a file of this process alone; a reader may come at any time. Thread-safe."""

    def __init__(self, directory: Path, role: str) -> None:
        self._lock = threading.Lock()
        self._file = (directory / f"{os.getpid()}-{role}.notes").open("ab", buffering=0)

    def stored(self, *, part: int, chunk: bytes, blocks: Sequence[str]) -> None:
        """Before anybody can load it. blocks: digests, in order."""
        self._write({"part": part, "chunk": chunk.hex(), "stored": list(blocks)})

    def promised(self, *, load: int, epoch: int, chunks: Sequence[bytes]) -> None:
        """Before a load begins. chunks: of the prompt, from its start."""
        self._write({"load": load, "epoch": epoch, "chunks": [chunk.hex() for chunk in chunks]})

    def loaded(
        self, *, load: int, epoch: int, part: int, position: int, first: int, blocks: Sequence[str]
    ) -> None:
        """position: of the chunk in the prompt. first: number of the first of these blocks in the part."""
        self._write(
            {
                "load": load,
                "epoch": epoch,
                "part": part,
                "at": position,
                "first": first,
                "loaded": list(blocks),
            }
        )

    def _write(self, note: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(note).encode() + b"\n")

    def close(self) -> None:
        """No more notes."""
        self._file.close()


@dataclass(slots=True)
class Verdict:
    """blocks: that were loaded and compared. chunks: parts of chunks that were stored. wrong: in words."""

    blocks: int = 0
    chunks: int = 0
    wrong: list[str] = field(default_factory=list[str])


def judge(directory: Path) -> Verdict:
    """Every loaded block must be one that some engine stored at that place of that chunk's part."""
    verdict = Verdict()
    stored: dict[tuple[str, int], list[list[str]]] = defaultdict(list)
    promised: dict[tuple[int, int], list[str]] = {}
    loaded: list[dict[str, Any]] = []
    for note in _notes(directory):
        if "stored" in note:
            stored[note["chunk"], note["part"]].append(note["stored"])
            verdict.chunks += 1
        elif "loaded" in note:
            loaded.append(note)
        else:
            promised[note["epoch"], note["load"]] = note["chunks"]
    for note in loaded:
        chunks = promised.get((note["epoch"], note["load"]), [])
        name = chunks[note["at"]] if note["at"] < len(chunks) else ""
        candidates = stored.get((name, note["part"]), [])
        blocks, first = note["loaded"], note["first"]
        verdict.blocks += len(blocks)
        if not any(blocks == kept[first : first + len(blocks)] for kept in candidates):
            why = "differs from what was stored" if candidates else "was never stored"
            verdict.wrong.append(
                f"load {note['load']}: part {note['part']} of chunk {note['at']} ({name[:8]}) {why}"
            )
    return verdict


def _notes(directory: Path) -> Iterator[dict[str, Any]]:
    """All of them. The last line of a process that was killed may be half a line."""
    for file in sorted(directory.glob("*.notes")):
        for line in file.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)
