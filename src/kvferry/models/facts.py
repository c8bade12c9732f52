"""The fields of a config, read by name: what is missing is refused, all of it in one line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import MisconfiguredError
from kvferry.values import parse_whole

MAX_LAYERS = 4096
MAX_DIM = 1 << 24


class Facts:
    """A config's fields. Remembers which were read, and what to tell about them."""

    def __init__(self, fields: Mapping[str, Any], *, name: str, model_type: str) -> None:
        self.fields = fields
        self.name = name
        self.model_type = model_type
        self.used: dict[str, Any] = {}
        self.settled: set[str] = set()
        self.notes: list[str] = []

    def refuse(self, message: str) -> MisconfiguredError:
        """The error to raise about this config."""
        return MisconfiguredError(f"{self.name} (model_type {self.model_type}): {message}")

    def has(self, field: str) -> bool:
        """Whether the config gives it, and not as null or an empty list."""
        value = self.fields.get(field)
        return value is not None and value != []

    def need(self, *fields: str) -> None:
        """Raise MisconfiguredError that lists every one of ``fields`` that is missing."""
        missing = [field for field in fields if not self.has(field)]
        if missing:
            first = missing[0]
            raise self.refuse(
                f"the config has no {', '.join(missing)}; without it the size would be a guess: take the "
                f"model's own config.json, or give it yourself like --set {first}=VALUE"
            )

    def number(
        self, field: str, default: int | None = None, *, lowest: int = 1, highest: int = MAX_DIM
    ) -> int:
        """A whole number. ``default``: what the architecture's reference code takes where it is left out.

        Raises MisconfiguredError where it is missing without a default, or is no such number.
        """
        if not self.has(field) and default is not None:
            self.note(f"the config leaves out {field}: {default}, the default of {self.model_type}")
            self.used[field] = default
            return default
        self.need(field)
        try:
            value = parse_whole(self.fields[field], lowest=lowest, highest=highest)
        except MisconfiguredError as error:
            raise self.refuse(f"{field}: {error}") from error
        self.used[field] = value
        return value

    def optional(self, field: str) -> int:
        """A whole number, or 0 where it is left out or null."""
        return self.number(field, lowest=0) if self.has(field) else 0

    def flag(self, field: str, *, default: bool) -> bool:
        """True or false. Raises MisconfiguredError for anything else."""
        if not self.has(field):
            return default
        value = self.fields[field]
        if not isinstance(value, bool):
            raise self.refuse(f"{field} is {value!r}: true or false is needed")
        self.used[field] = value
        return value

    def choice(self, field: str) -> str:
        """A text, or nothing."""
        value = self.fields.get(field)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refuse(f"{field} is {value!r}: a text is needed")
        self.used[field] = value
        return value

    def listing(self, field: str, *, length: int | None = None) -> Sequence[Any]:
        """A list, of ``length`` entries where that is given; empty where it is left out."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self.refuse(f"{field} is no list of at most {MAX_LAYERS} entries")
        if length is not None and len(value) != length and value:
            raise self.refuse(
                f"{field} has {len(value)} entries for {length} layers: one of the two is wrong"
            )
        self.used[field] = value
        return value

    def words(self, field: str, *, length: int | None = None) -> Sequence[str]:
        """A list of texts; empty where it is left out."""
        value = self.listing(field, length=length)
        if not all(isinstance(entry, str) for entry in value):
            raise self.refuse(f"{field} has an entry that is no text")
        return value

    def numbers(self, field: str, *, length: int | None = None) -> Sequence[int]:
        """A list of whole numbers from 0; empty where it is left out."""
        value = self.listing(field, length=length)
        if not all(type(entry) is int and 0 <= entry <= MAX_DIM for entry in value):
            raise self.refuse(f"{field} has an entry that is no whole number from 0")
        return value

    def inner(self, field: str) -> "Facts":
        """The fields of a nested object. Raises MisconfiguredError where there is none."""
        self.need(field)
        value = self.fields[field]
        if not isinstance(value, Mapping):
            raise self.refuse(f"{field} is {value!r}: an object with fields is needed")
        self.settle(field)
        return self.under(value)

    def under(self, fields: Mapping[str, Any]) -> "Facts":
        """Other fields of the same config: what is read and told there counts here too."""
        found = Facts(fields, name=self.name, model_type=self.model_type)
        found.used, found.settled, found.notes = self.used, self.settled, self.notes
        return found

    def settle(self, *fields: str) -> None:
        """These may be there, and say nothing that was not read elsewhere."""
        self.settled.update(fields)

    def unknown(self, field: str, value: object, known: Iterable[str]) -> MisconfiguredError:
        """The error for a value whose meaning is not known here."""
        return self.refuse(f"{field} has {value!r}, which is not known here; known are {', '.join(known)}")

    def note(self, text: str) -> None:
        """Keep a remark once."""
        if text not in self.notes:
            self.notes.append(text)
