"""Models by name: the shipped catalogue, a ``config.json``, or a directory that holds one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvferry.errors import MisconfiguredError
from kvferry.models.layers import Model
from kvferry.models.reading import NESTED, read_model
from kvferry.sources import suggestion

MAX_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A model. source: where its config is published; read: when it was read; via: in which public copy.

    parameters: weights in all, 0 where not known; wide: those that a quantized checkpoint leaves in 16 bits.
    """

    name: str
    repo: str
    aliases: tuple[str, ...]
    source: str
    read: str
    via: str
    parameters: float
    wide: float
    config: Mapping[str, Any]


@cache
def entries() -> tuple[Entry, ...]:
    """All models of the catalogue, by name."""
    document = json.loads(files("kvferry.models").joinpath("models.json").read_text(encoding="utf-8"))
    return tuple(
        Entry(
            name=entry["name"],
            repo=entry["repo"],
            aliases=tuple(entry.get("aliases", ())),
            source=entry["source"],
            read=entry["read"],
            via=entry["via"],
            parameters=entry.get("parameters", 0.0),
            wide=entry.get("wide_parameters", 0.0),
            config=entry["config"],
        )
        for entry in document["models"]
    )


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@cache
def _names() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in entries():
        for name in (entry.name, entry.repo, entry.repo.rpartition("/")[2], *entry.aliases):
            found.setdefault(_plain(name), entry)
    return found


def find_model(name: str, overrides: Mapping[str, Any] | None = None) -> Model:
    """The model of a path or a name, with fields of its config replaced by ``overrides``.

    Raises MisconfiguredError for a name that is neither, an unreadable config, and what ``read_model``
    refuses.
    """
    path = Path(name).expanduser()
    if path.exists() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        return read_model(_apply(_read(file), overrides), name=_title(file), source=str(file))
    entry = _names().get(_plain(name))
    if entry is None:
        raise MisconfiguredError(
            f"{name!r} is no file, no directory and no model of the catalogue; {_hint(name)}; for another "
            "model give the path of its config.json"
        )
    source = f"{entry.source}, read {entry.read} in {entry.via}"
    return read_model(
        _apply(entry.config, overrides),
        name=entry.name,
        source=source,
        parameters=entry.parameters,
        wide=entry.wide,
    )


def _hint(name: str) -> str:
    hint = suggestion(_plain(name), _names())
    return hint if hint.startswith("did") else "`kvferry size --list` shows those"


def _title(file: Path) -> str:
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def _read(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise MisconfiguredError(
                f"{file} is larger than {MAX_CONFIG_BYTES >> 20} MiB: that is no config.json"
            )
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MisconfiguredError(
            f"cannot read {file}: {error.strerror}; give the path of a model's config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise MisconfiguredError(f"{file} is no JSON: {error}; give a model's own config.json") from error
    if not isinstance(document, dict):
        raise MisconfiguredError(f"{file} holds no object: give a model's own config.json")
    return document


def _apply(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Fields go to where the language model's are: into the nested config where there is one."""
    if not overrides:
        return config
    for field in NESTED:
        nested = config.get(field)
        if isinstance(nested, Mapping) and nested:
            return {**config, field: {**nested, **overrides}}
    return {**config, **overrides}
