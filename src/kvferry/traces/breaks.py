"""What breaks prefixes: instructions that are the same but for a few characters near their beginning.

The head of a prompt is what comes before its first message that is not of the system: tools and instructions.
A head that is new is compared with the latest heads of its family. Where most of what follows the first
differing place is equal again, that place cost the rest: a time, an identifier, tools in another order.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvferry.traces.request import Part, Request

MAX_HEAD_BYTES = 1 << 18
MAX_HEADS = 16  # of one family, the latest
MAX_FAMILIES = 256
MAX_COMPARED = 20_000
_CONTEXT = 24
_SHOWN = 60
_HEAD = ("tools", "system", "developer")
_TIME = re.compile(rb"\d{1,2}:\d\d|\d{4}-\d\d-\d\d|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? ")
_ID = re.compile(rb"[0-9a-fA-F]{8}-[0-9a-fA-F-]{9,}|\b[0-9a-zA-Z_]*\d[0-9a-zA-Z_]{7,}\b")


class Cause(StrEnum):
    """What differs."""

    TIME = "a date or time"
    IDENTIFIER = "an identifier"
    NUMBER = "a number"
    ORDER = "tools in another order"
    TEXT = "other text"


@dataclass(frozen=True, slots=True)
class Example:
    """The first differing place: how many bytes are equal before it, and what stands there in both."""

    equal_bytes: int
    earlier: str
    later: str


@dataclass(slots=True)
class Break:
    """Requests whose head differs so from an earlier one. lost_bytes: equal, but behind the difference."""

    part: str
    cause: Cause
    requests: int
    lost_bytes: int
    example: Example


class Breaks:
    """Watches requests go by. compared: new heads looked at; beyond ``MAX_COMPARED`` no more are."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Cause], Break] = {}
        self.compared = 0
        self._families: OrderedDict[str, OrderedDict[bytes, tuple[Part, ...]]] = OrderedDict()

    def add(self, request: Request) -> None:
        """Take in the next request."""
        if self.compared >= MAX_COMPARED:
            return
        parts = _head(request.parts)
        head = b"".join(part.content for part in parts)[:MAX_HEAD_BYTES]
        if not head:
            return
        heads = self._families.setdefault(request.family, OrderedDict())
        self._families.move_to_end(request.family)
        if head not in heads and heads:
            self.compared += 1
            nearest = max(heads, key=lambda other: common(head, other))
            self._compare(heads[nearest], nearest, parts, head)
        heads[head] = parts
        heads.move_to_end(head)
        if len(heads) > MAX_HEADS:
            heads.popitem(last=False)
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    def _compare(self, earlier: tuple[Part, ...], old: bytes, parts: tuple[Part, ...], new: bytes) -> None:
        at = common(old, new)
        rest = min(len(old), len(new)) - at
        again = min(rest, common(old[::-1], new[::-1]))
        name, tools = _part_at(parts, at), _tools(parts)
        if name == "tools" and tools and sorted(tools) == sorted(_tools(earlier)):
            cause, again = Cause.ORDER, rest
        elif not rest or 2 * again < rest:
            return
        else:
            cause = _cause(old, new, at)
        known = self.found.get((name, cause))
        if known is None:
            example = Example(at, _shown(old, at), _shown(new, at))
            known = self.found[name, cause] = Break(name, cause, 0, 0, example)
        known.requests += 1
        known.lost_bytes += again


def common(one: bytes, other: bytes) -> int:
    """How many bytes are equal from the first on."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _head(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    end = next((place for place, part in enumerate(parts) if not part.name.startswith(_HEAD)), len(parts))
    return parts[:end]


def _part_at(parts: tuple[Part, ...], at: int) -> str:
    for part in parts:
        if at < len(part.content):
            return part.name
        at -= len(part.content)
    return parts[-1].name


def _tools(parts: tuple[Part, ...]) -> list[bytes]:
    if not parts or parts[0].name != "tools":
        return []
    try:
        return [bytes(tool) for tool in msgspec.json.decode(parts[0].content, type=list[msgspec.Raw])]
    except (ValueError, RecursionError):
        return []


def _cause(old: bytes, new: bytes, at: int) -> Cause:
    around = [text[max(0, at - _CONTEXT) : at + _CONTEXT] for text in (old, new)]
    if all(_TIME.search(text) for text in around):
        return Cause.TIME
    if all(_ID.search(text) for text in around):
        return Cause.IDENTIFIER
    if all(text[at : at + 1].isdigit() for text in (old, new)):
        return Cause.NUMBER
    return Cause.TEXT


def _shown(text: bytes, at: int) -> str:
    shown = text[max(0, at - _CONTEXT) :][:_SHOWN].decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in shown)
