"""Where settings come from: flags, environment and a TOML file that share one set of names.

A flag wins over the environment, the environment over the file, the file over the default. Names that
are not known are refused with the nearest one that is. Secrets come from files or the environment only,
live in ``Secret`` and are never printed.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvferry.errors import MisconfiguredError
from kvferry.identity.regular import open_regular
from kvferry.secret import read_secret
from kvferry.values import parse_path

ENVIRONMENT_PREFIX = "KVFERRY_"
MAX_CONFIGURATION_BYTES = 1 << 20

Texts = dict[str, tuple[object, str]]
"""By a setting's name: what was given, and where."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing a process can be told: its name in TOML, flag ``--name`` and environment ``KVFERRY_NAME``.

    One that is ``environment_only`` is a secret; the setting ``NAME_file`` names a file that holds it. A flag
    of which there may be ``many`` gives them all, with commas between, as environment and file have them.
    """

    name: str
    parse: Callable[[Any], object]
    metavar: str
    help: str
    target: str  # the field of the settings
    environment_only: bool = False
    many: bool = False

    @property
    def flag(self) -> str:
        """As an argument: ``--deadline-cap-ms``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As an environment variable: ``KVFERRY_DEADLINE_CAP_MS``."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def gathered(
    settings: Sequence[Setting],
    flags: Mapping[str, str | None],
    *,
    environ: Mapping[str, str],
    config_path: Path | str | None,
    others: Iterable[str],
) -> Texts:
    """What was given, each from where it counts. Raises MisconfiguredError for a name that there is not.

    flags: by setting name, None where not given. config_path: a TOML file; KVFERRY_CONFIG otherwise.
    others: what follows KVFERRY_ in names of the environment that are read elsewhere.
    """
    texts: Texts = {}
    if config_path is None and "KVFERRY_CONFIG" in environ:
        config_path = _named_file("KVFERRY_CONFIG", environ["KVFERRY_CONFIG"])
    if config_path is not None:
        path = config_path if isinstance(config_path, Path) else _named_file("--config", config_path)
        texts.update({name: (value, f"{name} in {path}") for name, value in _file(settings, path).items()})
    texts.update(_environment(settings, environ, others))
    for name, given in flags.items():
        if given is not None:
            texts[name] = (given, "--" + name.replace("_", "-"))
    return texts


def parsed(settings: Sequence[Setting], texts: Texts) -> dict[str, Any]:
    """The values, by field. Raises MisconfiguredError: one line with the name, the value and what to do."""
    secrets = {setting.target: setting.name for setting in settings if setting.environment_only}
    for name in secrets.values():
        if name in texts and f"{name}_file" in texts:
            raise MisconfiguredError(f"KVFERRY_{name.upper()} and {name}_file are both set; keep one")
    values: dict[str, Any] = {}
    for setting in settings:
        if setting.name not in texts:
            continue
        raw, where = texts[setting.name]
        try:
            value: object = setting.parse(raw)
            if setting.target in secrets and not setting.environment_only:
                value = read_secret(Path(str(value)))
        except MisconfiguredError as error:
            raise MisconfiguredError(f"{where}: {error}") from error
        values[setting.target] = value
    return values


def _environment(settings: Sequence[Setting], environ: Mapping[str, str], others: Iterable[str]) -> Texts:
    known = {setting.variable: setting.name for setting in settings}
    elsewhere = {ENVIRONMENT_PREFIX + name for name in others}
    found: Texts = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in elsewhere:
            continue
        if variable not in known:
            _unknown("environment variable", variable, known)
        found[known[variable]] = (value, variable)
    return found


def _file(settings: Sequence[Setting], path: Path) -> dict[str, object]:
    known = {setting.name for setting in settings if not setting.environment_only}
    try:
        with open_regular(path) as file:
            content = file.read(MAX_CONFIGURATION_BYTES + 1)
        if len(content) > MAX_CONFIGURATION_BYTES:
            raise MisconfiguredError(f"{path} is longer than {MAX_CONFIGURATION_BYTES >> 20} MiB")
        table = tomllib.loads(content.decode())
    except OSError as error:
        raise MisconfiguredError(
            f"cannot read the configuration {path}: {error.strerror}; name a TOML file"
        ) from error
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and numbers of thousands of digits
        raise MisconfiguredError(f"{path} is not valid TOML: {error}") from error
    for name, value in table.items():
        if name not in known:
            _unknown(f"setting in {path}", name, known)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise MisconfiguredError(  # the value itself may hold a password
                f"{name} in {path}: a {type(value).__name__} is neither a text nor a whole number"
            )
    return table


def _named_file(where: str, text: str) -> Path:
    try:
        return parse_path(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{where}: {error}") from error


def _unknown(what: str, name: str, known: Iterable[str]) -> NoReturn:
    raise MisconfiguredError(f"unknown {what}: {name}; {suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean ...?``, or the list of what exists."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else "there are " + ", ".join(names)
