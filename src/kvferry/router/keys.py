"""Names of the prefixes of a prompt, from its text alone: no tokenizer, no key of the trust domain. Pure.

A prompt is a stream of bytes: text as JSON has it (UTF-8, with escapes where there must be some) and, between
texts, a mark (FF, which no UTF-8 text holds, and a letter), so that no two prompts are the same stream. The
name of a prefix is the digest of the stream up to there, beginning with what changes all of it (model, salt,
adapter, tools ...). Prefixes end

- at every boundary (the end of a message), of which the last ``MAX_BOUNDARIES`` are kept, and
- at fixed places of the stream, ever farther apart, whatever lies there: two prompts that share half of one
  long text share the names up to there.

Names are of one process: they never leave it, and their seed is secret so that nobody can make two prompts
collide. A collision would cost speed only.
"""

import msgspec
import xxhash

from kvferry.errors import RefusedError
from kvferry.router.contract import Key

MAX_BOUNDARIES = 48
MEDIA_LENGTH = 2048  # what an image or a sound counts for, whatever its encoding takes

# Up to this place of the stream, one name every so many bytes.
_GRID = (
    (16 << 10, 1 << 10),
    (64 << 10, 2 << 10),
    (256 << 10, 4 << 10),
    (1 << 20, 32 << 10),
    (4 << 20, 128 << 10),
    (16 << 20, 512 << 10),
)


def _cuts() -> tuple[int, ...]:
    cuts: list[int] = []
    place = 0
    for end, step in _GRID:
        cuts += range(place + step, end + 1, step)
        place = end
    return (*cuts, 1 << 62)


CUTS = _cuts()
MAX_KEYS = len(CUTS) - 1 + MAX_BOUNDARIES


class Mark:
    """What stands between two texts."""

    MESSAGE = b"\xffm"  # its role follows
    TEXT = b"\xfft"  # a part of the content that is text
    PART = b"\xffp"  # one that is not; its digest follows
    FIELD = b"\xfff"  # anything else that a message says: its name, VALUE and the value
    VALUE = b"\xffv"
    TOKENS = b"\xffi"  # token ids, four bytes each, up to the end of the prompt
    END = b"\xffe"


class KeyChain:
    """The names of one prompt's prefixes, while it is read. head: what changes all of it.

    length: what the head adds to the prompt (tools), in bytes.
    """

    __slots__ = ("_boundaries", "_cut", "_cuts", "_hash", "_place")

    def __init__(self, head: bytes, *, length: int = 0, seed: int = 0) -> None:
        self._hash = xxhash.xxh3_128(len(head).to_bytes(8, "little") + head, seed)
        self._place = length
        self._cuts: list[Key] = []
        self._boundaries: list[Key] = []
        self._cut = 0

    def mark(self, mark: bytes, text: str = "") -> None:
        """A mark and short text that belongs to it."""
        data = mark + escaped(text) if text else mark
        self._hash.update(data)
        self._place += len(data)

    def media(self, digest: bytes) -> None:
        """A part that is no text."""
        self._hash.update(Mark.PART + digest)
        self._place += MEDIA_LENGTH

    def text(self, text: str) -> None:
        """Text of any length; prefixes end inside it."""
        self.raw(escaped(text))

    def raw(self, data: bytes) -> None:
        """Bytes of any length; prefixes end inside them."""
        place, cut, hasher = self._place, self._cut, self._hash
        end = place + len(data)
        following = CUTS[cut]
        if end < following:
            hasher.update(data)
            self._place = end
            return
        view, start = memoryview(data), 0
        found = self._cuts.append
        if following <= place:  # passed by a mark before this text: the name is of the first place after it
            found(Key(hasher.digest(), place))
            while following <= place:
                cut += 1
                following = CUTS[cut]
        while following <= end:
            stop = following - place
            hasher.update(view[start:stop])
            start = stop
            found(Key(hasher.digest(), following))
            cut += 1
            following = CUTS[cut]
        hasher.update(view[start:])
        self._place, self._cut = end, cut

    def message(self, role: bytes, content: bytes, *, named: bool) -> None:
        """A whole message of nothing but text, as JSON has it. named: whether its end is worth a name."""
        data = b"".join((Mark.MESSAGE, role, Mark.TEXT, content, Mark.END))
        end = self._place + len(data)
        if end < CUTS[self._cut]:  # most are short: no prefix ends within
            self._hash.update(data)
            self._place = end
            if named:
                self._name()
            return
        self.mark(Mark.MESSAGE + role)
        self.mark(Mark.TEXT)
        self.raw(content)
        self.boundary(named=named)

    def boundary(self, *, named: bool = True) -> None:
        """A message, or a prompt, ends here. named: whether that is worth a name."""
        self._hash.update(Mark.END)
        self._place += len(Mark.END)
        if named:
            self._name()

    def _name(self) -> None:
        self._boundaries.append(Key(self._hash.digest(), self._place))

    def keys(self) -> tuple[Key, ...]:
        """All names so far, shortest first."""
        if not self._cuts:
            return tuple(self._boundaries[-MAX_BOUNDARIES:])
        merged = self._cuts + self._boundaries[-MAX_BOUNDARIES:]
        merged.sort(key=_length)
        return tuple(merged)


def _length(key: Key) -> int:
    return key.length


def escaped(text: str) -> bytes:
    """As canonical JSON has it between its quotes. Raises RefusedError for text that is not Unicode."""
    try:
        return msgspec.json.encode(text)[1:-1]
    except UnicodeEncodeError as error:
        raise RefusedError(f"text holds a lone surrogate at character {error.start}") from None
