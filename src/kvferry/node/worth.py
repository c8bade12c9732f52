"""Which parts a prompt stores are likely to be wanted again. Pure.

A conversation comes back with most of its prompt known and a little new at its end, and goes on from there
once. A one-time prompt shares a head with many others, which all go on differently, or shares less than it
brings. What prompts share is known by its later use instead.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_REMEMBERED = 65536  # recent prompts, and as many places where they went on; a quarter of a KiB each


@dataclass(slots=True)
class _Continued:
    """chunk: what followed first. forked: something else followed too."""

    chunk: bytes
    forked: bool = False


class Worth:
    """Remembers, of recent prompts, where what was known of them ended."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        # By namespace and chunk: the first that was not known, whether it is likely; the last one of a prompt
        # that was known all through, None: what follows has no name yet.
        self._marks: OrderedDict[tuple[bytes, bytes], bool | None] = OrderedDict()
        self._continued: OrderedDict[tuple[bytes, bytes], _Continued] = OrderedDict()

    def found(self, namespace: bytes, prompt: Sequence[bytes], known: int) -> None:
        """A lookup: the prompt's first ``known`` chunks were somewhere, the engine's cache included."""
        if known < len(prompt):
            mostly = 2 * known >= len(prompt)
            self._mark((namespace, prompt[known]), mostly and self._goes_on(namespace, prompt, known))
        elif prompt:
            self._mark((namespace, prompt[-1]), None)

    def likely(self, namespace: bytes, prompt: Sequence[bytes]) -> bool:
        """Whether what is new in this prompt will be wanted again. prompt: up to the last that is stored."""
        for at in range(len(prompt) - 1, -1, -1):
            name = (namespace, prompt[at])
            if name in self._marks:
                mark = self._marks[name]
                return self._goes_on(namespace, prompt, at + 1) if mark is None else mark
        return False

    def _goes_on(self, namespace: bytes, prompt: Sequence[bytes], known: int) -> bool:
        """Whether a known beginning is continued by this prompt, and by no other differently."""
        if not 0 < known < len(prompt):
            return False
        name = (namespace, prompt[known - 1])
        continued = self._continued.setdefault(name, _Continued(prompt[known]))
        continued.forked |= continued.chunk != prompt[known]
        self._continued.move_to_end(name)
        while len(self._continued) > self._limit:
            self._continued.popitem(last=False)
        return not continued.forked

    def _mark(self, name: tuple[bytes, bytes], mark: bool | None) -> None:
        self._marks[name] = mark
        self._marks.move_to_end(name)
        while len(self._marks) > self._limit:
            self._marks.popitem(last=False)
