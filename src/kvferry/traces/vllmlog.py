"""vLLM's own log, started with ``--enable-log-requests`` (and VLLM_LOGGING_LEVEL=DEBUG where prompts are
wanted).

Older versions put prompt and token ids into "Received request ID: prompt: '...', params: ...,
prompt_token_ids: [...]"; newer ones put them at DEBUG into "Request ID details: prompt: '...',
prompt_token_ids: [...]". A request whose prompt is nowhere is counted as malformed: nothing can be known of
it. Other lines are no requests.
"""

import ast
import contextlib
import datetime as dt
import re
from collections import OrderedDict
from collections.abc import Iterable

from msgspec import json

from kvferry.traces import blocks
from kvferry.traces.formats import DEFAULT_BLOCK_TOKENS, Clock, Opening, decoded
from kvferry.traces.openai import BYTES_PER_TOKEN
from kvferry.traces.request import MalformedError, Part, Request

_REQUEST = re.compile(rb"Received request (\S+): |Request (\S+) details: ")
_TIME = re.compile(rb"\b(?:INFO|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_IDS = re.compile(rb"prompt_token_ids: (\[[\d, ]*\]|array\(\[[\d, ]*\])")
_PROMPT = re.compile(rb"prompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"), ")
_TOKENS: "json.Decoder[list[int]]" = json.Decoder(list[int])
_COLOUR = re.compile(rb"\x1b\[[\d;]*m")
_YEARS = range(2000, 2400)  # the log names no year: it begins in one with a 29th of February
_MAX_DETAILED = 4096  # requests whose details came, and whose other line may still come


class VllmLog:
    """Lines of a vLLM server's log."""

    format = "vllm-log"
    clock = Clock.TRACE
    note = f"prompts without token ids count {BYTES_PER_TOKEN:g} bytes a token, an estimate"

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._detailed: OrderedDict[bytes, None] = OrderedDict()
        self._latest_s: float | None = None

    @classmethod
    def of(cls, opening: Opening) -> "VllmLog | None":
        """A reader, if the first lines are of vLLM."""
        if any(_REQUEST.search(line) or b"vLLM API server" in line for line in opening.lines):
            return cls(opening.block_tokens or DEFAULT_BLOCK_TOKENS)
        return None

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request, if it is one. Raises MalformedError."""
        line = _COLOUR.sub(b"", line) if b"\x1b" in line else line
        found = _REQUEST.search(line)
        if found is None:
            return []
        ids, prompt = _IDS.search(line, found.end()), _PROMPT.search(line, found.end())
        if ids is None and prompt is None:
            if found[1] in self._detailed:
                return []  # the same request once more, with its parameters
            if b" details: " in found[0] or b"params: " not in line:
                raise MalformedError("a request without prompt or token ids")
            raise MalformedError(
                "a request without its prompt; set VLLM_LOGGING_LEVEL=DEBUG to have it logged"
            )
        time_s = self._time_s(line)
        if found[2] is not None:
            self._detailed[found[2]] = None
            if len(self._detailed) > _MAX_DETAILED:
                self._detailed.popitem(last=False)
        if ids is not None and (tokens := decoded(ids[1].removeprefix(b"array("), _TOKENS)):
            return [Request(time_s, len(tokens), None, blocks.of_tokens(tokens, self.block_tokens))]
        if prompt is None:
            raise MalformedError("a request without prompt or token ids")
        text = _text(prompt[1])
        if not text:
            raise MalformedError("the prompt is empty")
        return [
            Request(
                time_s=time_s,
                input_tokens=max(1, round(len(text) / BYTES_PER_TOKEN)),
                output_tokens=None,
                blocks=blocks.of_bytes(text, round(self.block_tokens * BYTES_PER_TOKEN)),
                parts=(Part("prompt", text),),
            )
        ]

    def _time_s(self, line: bytes) -> float | None:
        """In the year that is nearest to the line before, as no line says which."""
        found = _TIME.search(line)
        if found is None:
            return None
        month, day, hour, minute, second = map(int, found.groups())
        first = _YEARS[0] if self._latest_s is None else _year(self._latest_s)
        times = []
        for year in range(max(_YEARS[0], first - 1), min(_YEARS[-1], first + 1) + 1):
            with contextlib.suppress(ValueError):  # no 29th of February in this one
                times.append(dt.datetime(year, month, day, hour, minute, second, tzinfo=dt.UTC).timestamp())
        if not times:
            raise MalformedError("the time is no date")
        latest = times[0] if self._latest_s is None else self._latest_s
        self._latest_s = min(times, key=lambda time: abs(time - latest))
        return self._latest_s


def _year(time_s: float) -> int:
    return dt.datetime.fromtimestamp(time_s, dt.UTC).year


def _text(literal: bytes) -> bytes:
    try:
        value = ast.literal_eval(literal.decode())
    except (ValueError, SyntaxError) as error:
        raise MalformedError("the prompt is cut off") from error
    return str(value).encode(errors="replace")
