"""Which models workers have: ``/v1/models``, read and merged. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvferry.errors import CorruptError

MAX_MODELS = 4096  # of one worker: a model and its adapters
MAX_NAME = 512


class Model(NamedTuple):
    """name: as requests say it. entry: the worker's own words, as JSON. adapter: of another model.

    owner: who says it has it: engines write their own name there.
    """

    name: str
    entry: bytes
    adapter: bool = False
    owner: str = ""

    def __eq__(self, other: object) -> bool:
        """By name and owner: entries hold the time at which they were asked for."""
        return isinstance(other, Model) and (other.name, other.owner) == (self.name, self.owner)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.name)


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class _Entry(msgspec.Struct):
    id: str
    parent: object = None
    owned_by: object = None


_LIST = msgspec.json.Decoder(_List)
_ENTRY = msgspec.json.Decoder(_Entry)


def _model(entry: bytes) -> Model:
    said = _ENTRY.decode(entry)
    owner = said.owned_by if isinstance(said.owned_by, str) else ""
    return Model(said.id, entry, isinstance(said.parent, str), owner)


def models_of(answer: bytes) -> tuple[Model, ...]:
    """Of a worker's answer. Raises CorruptError."""
    try:
        entries = [bytes(raw) for raw in _LIST.decode(answer).data]
        models = tuple(map(_model, entries))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"/v1/models is not as OpenAI has it: {error}") from error
    if len(models) > MAX_MODELS or any(not 0 < len(model.name) <= MAX_NAME for model in models):
        raise CorruptError(f"/v1/models has over {MAX_MODELS} entries, or one with a name over {MAX_NAME}")
    return models


def merged(workers: Iterable[tuple[Model, ...]]) -> bytes:
    """One answer for all of them: each model once, as the first worker has it."""
    entries: dict[str, bytes] = {}
    for models in workers:
        for model in models:
            entries.setdefault(model.name, model.entry)
    return b'{"object":"list","data":[' + b",".join(entries.values()) + b"]}"


def unknown_model(model: str, known: Iterable[str]) -> str:
    """For the client, as vLLM words it, and with what there is."""
    names = sorted(set(known))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"The model `{model[:MAX_NAME]}` does not exist." + (f" There is: {shown}" if names else "")
