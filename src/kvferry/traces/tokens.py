"""Logs with the prompts' token ids: exact, whatever the tokenizer was.

One JSON object a line with ``prompt_token_ids`` or ``input_tok_ids`` (LLMServingSim), and if known a time,
the number of output tokens and a session.
"""

from collections.abc import Iterable, Mapping

from kvferry.traces import blocks
from kvferry.traces.formats import ANY, DEFAULT_BLOCK_TOKENS, Clock, Opening, decoded
from kvferry.traces.request import MalformedError, Request
from kvferry.traces.times import seconds

PROMPTS = ("prompt_token_ids", "input_tok_ids", "input_ids")
OUTPUTS = ("output_token_ids", "output_tok_ids", "output_ids")
OUTPUT_COUNTS = ("output_tokens", "output_toks", "output_length", "completion_tokens")
TIMES = (
    "timestamp", "time", "ts", "created", "created_at", "start_time", "arrival_time", "request_time",
    "startTime", "createdAt", "arrived_at", "@timestamp",
)  # fmt: skip
SESSIONS = ("session_id", "conversation_id", "session", "chat_id", "prompt_cache_key", "user")


class TokenIds:
    """JSON lines of token ids."""

    format = "token-ids"
    clock = Clock.TRACE
    note = ""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    @classmethod
    def of(cls, opening: Opening) -> "TokenIds | None":
        """A reader, if one of the first objects has token ids."""
        if any(isinstance(first(line, PROMPTS), list) for line in opening.objects):
            return cls(opening.block_tokens or DEFAULT_BLOCK_TOKENS)
        return None

    def requests(self, line: bytes) -> Iterable[Request]:
        """The line's request. Raises MalformedError."""
        record = decoded(line, ANY)
        ids = first(record, PROMPTS) if isinstance(record, dict) else None
        if not isinstance(record, dict) or not isinstance(ids, list) or not ids:
            raise MalformedError("no token ids of a prompt")
        if all(isinstance(prompt, list) and prompt for prompt in ids):
            return [one for prompt in ids for one in self._request(record, prompt, alone=len(ids) == 1)]
        return self._request(record, ids, alone=True)

    def _request(self, record: Mapping[str, object], ids: list[int], *, alone: bool) -> list[Request]:
        """One of a batch, whose outputs are of the whole batch, or alone."""
        made = first(record, OUTPUTS)
        outputs = len(made) if isinstance(made, list) else whole(first(record, OUTPUT_COUNTS))
        outputs = outputs if alone else None
        session = first(record, SESSIONS)
        return [
            Request(
                time_s=self._time_s(record),
                input_tokens=len(ids),
                output_tokens=outputs,
                blocks=blocks.of_tokens(
                    ids, self.block_tokens, seed=blocks.seed_of(named(record.get("model")))
                ),
                session=None if session is None else named(session),
            )
        ]

    def _time_s(self, record: Mapping[str, object]) -> float | None:
        ns = record.get("arrival_time_ns")
        if isinstance(ns, int | float):
            try:
                return ns / 1e9
            except OverflowError as error:
                raise MalformedError("the time is out of bounds") from error
        return seconds(first(record, TIMES))


def first(record: Mapping[str, object], names: Iterable[str]) -> object:
    """The first of these fields that is there and not null."""
    return next((value for name in names if (value := record.get(name)) is not None), None)


def named(value: object) -> str:
    """A model's or session's name as text, whatever it was written as. Raises MalformedError."""
    try:
        return str(value)
    except (RecursionError, ValueError) as error:  # a number of too many digits
        raise MalformedError("a name is no text") from error


def whole(value: object) -> int | None:
    """A count, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
