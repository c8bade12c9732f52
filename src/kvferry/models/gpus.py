"""GPUs by name: the shipped catalogue, and a file of the user's that adds to it or replaces entries."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import MisconfiguredError
from kvferry.sources import suggestion

MAX_FILE_BYTES = 1 << 20
SHIPPED = "the shipped catalogue"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. 0 stands for not known.

    memory_gb: as sold, 10^9 bytes. bandwidth_gb_s: of its memory, 10^9 bytes a second. The tflops are dense.
    usd_per_hour: for one; price_date: of when that is. source, date: where the entry comes from, and of when.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float = 0.0
    bf16_tflops: float = 0.0
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    usd_per_hour: float = 0.0
    price_date: str = ""
    price_source: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""
    date: str = ""

    @property
    def memory_bytes(self) -> int:
        """As sold."""
        return round(self.memory_gb * 1e9)


_NUMBERS = {field.name for field in fields(Gpu) if field.type is float}
_TEXTS = {"name", "price_date", "price_source"}


def gpus(file: Path | None = None) -> dict[str, Gpu]:
    """All GPUs by name, those of ``file`` in place of shipped ones. Raises MisconfiguredError."""
    shipped = files("kvferry.models").joinpath("gpus.toml").read_text(encoding="utf-8")
    known = {gpu.name: gpu for gpu in _parse(shipped, SHIPPED)}
    if file is not None:
        known |= {gpu.name: gpu for gpu in _parse(_read(file), str(file))}
    return known


def find_gpu(name: str, file: Path | None = None) -> Gpu:
    """By name or alias. Raises MisconfiguredError."""
    known = gpus(file)
    names = {alias: gpu for gpu in known.values() for alias in gpu.aliases} | known
    plain = name.strip().lower().replace(" ", "-").replace("_", "-")
    if plain not in names:
        raise MisconfiguredError(
            f"GPU {name!r} is not known; {suggestion(plain, known)}; add it in a file, named with --gpus-file"
        )
    return names[plain]


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise MisconfiguredError(
                f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB: that is no list of GPUs"
            )
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise MisconfiguredError(
            f"cannot read {file}: {error.strerror}; name a TOML file with GPUs"
        ) from error
    except ValueError as error:
        raise MisconfiguredError(f"{file} is no text; name a TOML file with GPUs") from error


def _parse(text: str, where: str) -> list[Gpu]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MisconfiguredError(f"{where} is no TOML: {error}") from error
    for key in document:
        if key not in ("gpu", "date", "source"):
            raise MisconfiguredError(f"{where}: unknown key {key!r}; write entries under [[gpu]]")
    listed = document.get("gpu", [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise MisconfiguredError(f"{where}: gpu is no list of entries; write [[gpu]] above each")
    origin = {"date": str(document.get("date", "")), "source": str(document.get("source", where))}
    return [_gpu(entry, where, origin) for entry in listed]


def _gpu(entry: Mapping[str, Any], where: str, origin: Mapping[str, str]) -> Gpu:
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise MisconfiguredError(f'{where}: an entry has no name; write name = "h100"')
    allowed = _NUMBERS | _TEXTS | {"aliases"}
    for key, value in entry.items():
        if key not in allowed:
            raise MisconfiguredError(f"{where}: {name} has unknown key {key!r}; {suggestion(key, allowed)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
        if key in _NUMBERS and not number:
            raise MisconfiguredError(f"{where}: {key} of {name} is {value!r}: a number is needed")
        if key in _TEXTS and not isinstance(value, str):
            raise MisconfiguredError(f"{where}: {key} of {name} is {value!r}: a text is needed")
    aliases = entry.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise MisconfiguredError(f"{where}: aliases of {name} are {aliases!r}: a list of texts is needed")
    if not entry.get("memory_gb"):
        raise MisconfiguredError(f"{where}: {name} has no memory_gb; write memory_gb = 80")
    return msgspec.convert(
        {**entry, **origin, "name": name.strip().lower(), "aliases": [alias.lower() for alias in aliases]},
        Gpu,
    )
