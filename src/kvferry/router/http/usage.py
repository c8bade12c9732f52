"""What an answer says it took: read from its end, where servers put it."""

import re
from collections import deque

import msgspec

from kvferry.router.contract import Usage

KEPT_PIECES = 4
KEPT_BYTES = 8 << 10
_MARK = b'"usage":'
_ENDS = (b"data: [DONE]", b'"type":"message_stop"}', b'"type": "message_stop"}')
_OBJECT = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_Usage).decode


class Tail:
    """The last bytes of an answer."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque(maxlen=KEPT_PIECES)

    def add(self, data: bytes) -> None:
        """Came now."""
        self._pieces.append(data)

    @property
    def done(self) -> bool:
        """Whether it is a stream's end, as OpenAI's API and Anthropic's have it."""
        return b"".join(self._pieces)[-64:].rstrip().endswith(_ENDS)

    def usage(self) -> Usage | None:
        """None where it says none, or nothing that can be read."""
        end = b"".join(piece[-KEPT_BYTES:] for piece in self._pieces)
        at = end.rfind(_MARK)
        while at >= 0:
            match = _OBJECT.match(end, at)
            if match is not None:
                return _read(match[1])
            at = end.rfind(_MARK, 0, at)
        return None


def _read(text: bytes) -> Usage | None:
    try:
        said = _decode(text)
    except msgspec.DecodeError:
        return None
    prompt, read = said.prompt_tokens, said.cache_read_input_tokens
    if prompt is None and said.input_tokens is not None:  # Anthropic's is without what was cached
        prompt = said.input_tokens + max(0, read or 0) + max(0, said.cache_creation_input_tokens or 0)
    if prompt is None or prompt < 0:
        return None
    done = said.completion_tokens if said.completion_tokens is not None else said.output_tokens
    details = said.prompt_tokens_details or said.input_tokens_details
    cached = details.cached_tokens if details is not None else read
    if cached is not None and not 0 <= cached <= prompt:
        cached = None
    return Usage(prompt, cached, max(0, done or 0))
