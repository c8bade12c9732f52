"""The blocking client over a pool that is too small: an answer is nothing, or the exact bytes."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node.fleet import LOOKUP_WAIT_S, PART_BYTES, WAIT_S, at_rest, content, digests, settings
from tests.runs import runs

from kvferry.client.messages import NamespaceInfo
from kvferry.client.store import PrefixStore
from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier

PROMPTS = 3
CHUNKS = 12
# Part 0 of all chunks, a window of two, and the state at every third: more than the pool holds.
SPACE = NamespaceInfo(b"test" + b"l" * 12, (PART_BYTES, PART_BYTES, 4096), 128, "test", trailing=(0, 2, 1))


class Step(NamedTuple):
    """Save, match and load this many chunks of a prompt from ``first`` on."""

    verb: str
    prompt: int
    first: int
    last: int


steps = st.builds(
    Step,
    st.sampled_from(["save", "load", "match"]),
    st.integers(0, PROMPTS - 1),
    st.sampled_from([0, 0, 0, 2, 3, 7]),
    st.integers(1, CHUNKS),
)


def _has(chunk: int, part: int) -> bool:
    return part < 2 or chunk % 3 == 2


def _load(store: PrefixStore, chunks: list[bytes], first: int) -> None:
    parts: dict[tuple[int, int], bytes] = {}

    def into(chunk: int, part: int, view: memoryview) -> None:
        parts[chunk, part] = bytes(view)

    whole = store.load(chunks, into, first=first)
    hypothesis.event("found" if whole else "not found")
    end = first + whole
    assert 0 <= whole <= len(chunks) - first
    assert not whole or end % 3 == 0, "a boundary without its state"
    for part, trailing in enumerate(SPACE.trailing):
        start = max(first, end - trailing) if trailing else first
        for chunk in range(start, end):
            assert parts[chunk, part] == content(chunks[chunk], part, SPACE.part_bytes[part])


def _save(store: PrefixStore, chunks: list[bytes], first: int) -> None:
    def fill(position: int, part: int, view: memoryview) -> None:
        view[:] = content(chunks[first + position], part, SPACE.part_bytes[part])

    held = store.save(chunks[:first], chunks[first:], fill, has=lambda at, part: _has(first + at, part))
    assert 0 <= held <= len(chunks) - first


@pytest.mark.long
@hypothesis.settings(max_examples=runs(10), deadline=None, print_blob=True)
@given(life=st.lists(steps, min_size=8, max_size=25), behind=st.booleans())
def test_whatever_was_saved_and_evicted_loads_are_exact(life: list[Step], *, behind: bool) -> None:
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        node = Node(settings(Path(directory)), tier=MemoryTier() if behind else None)
        opened.callback(node.close)
        node.start()
        store = PrefixStore(
            socket_path=node.settings.socket_path, engine="life", namespace=SPACE, answer_s=LOOKUP_WAIT_S
        )
        opened.callback(store.close)
        assert store.wait_connected(WAIT_S)
        for step in life:
            chunks = digests(step.last, f"prompt{step.prompt}")
            first = min(step.first, step.last)
            if step.verb == "save":
                _save(store, chunks, first)
            elif step.verb == "load":
                _load(store, chunks, first)
            else:
                assert 0 <= store.match(chunks) <= len(chunks)
        at_rest(node)
