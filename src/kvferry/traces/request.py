"""A request as every trace format gives it, and a line that gives none."""

from dataclasses import dataclass

from kvferry.errors import KvferryError

KEY_BYTES = 8
MAX_TOKENS = 1 << 26  # of one prompt or answer; far beyond any model, and its keys still fit in memory
MAX_TIME_S = 1e12  # 31,000 years either way


class MalformedError(KvferryError):
    """A line or record that cannot be read; the message is the reason, without the line's values."""


@dataclass(frozen=True, slots=True)
class Part:
    """A named stretch of a prompt's text, as "system message 0"."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    time_s: when it arrived, on the trace's own clock; None where the trace has no times.
    input_tokens: 1 to ``MAX_TOKENS``. output_tokens: None where the trace does not say.
    blocks: a key of ``KEY_BYTES`` for each block of the prompt, the first one first. A key names content;
        what comes before tells it from others. None where the trace does not identify content.
    session: what the trace says belongs together (a chat, a user's session); None where it does not.
    parts: the prompt's text, where the trace has it. family: only prompts of one family may share (a model).
    prefixes: a digest of the prompt up to the end of each message, the last one of all of it; empty where the
        trace has no messages.

    Raises MalformedError for what is out of bounds, so that no reader needs bounds of its own.
    """

    time_s: float | None
    input_tokens: int
    output_tokens: int | None
    blocks: bytes | None
    session: str | None = None
    parts: tuple[Part, ...] = ()
    family: str = ""
    prefixes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.input_tokens <= MAX_TOKENS:
            raise MalformedError(f"the number of input tokens is not 1 to {MAX_TOKENS}")
        if self.output_tokens is not None and not 0 <= self.output_tokens <= MAX_TOKENS:
            raise MalformedError(f"the number of output tokens is not 0 to {MAX_TOKENS}")
        if self.time_s is not None and not abs(self.time_s) <= MAX_TIME_S:  # so written, NaN is refused
            raise MalformedError("the time is out of bounds")
