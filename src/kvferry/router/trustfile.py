"""The file that puts API keys into trust groups.

    unlisted = "own"          # own, shared or refuse: keys that are not listed
    keyless = "shared"        # the same for requests without a key
    client_salt = "namespace" # namespace, strip or trust
    unsalted = "refuse"       # refuse or pass: prompts that no salt can be put into

    [groups.payments]
    keys = ["sha256:9f86d081884c7d65..."]   # printf %s "$KEY" | sha256sum

It holds digests, never keys.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvferry.errors import MisconfiguredError
from kvferry.identity.regular import open_regular
from kvferry.router.trust import Rules, Unsalted
from kvferry.sources import suggestion

MAX_FILE_BYTES = 16 << 20
MAX_GROUPS = 100_000
MAX_GROUP_NAME = 64
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAMES = ("unlisted", "keyless", "client_salt", "unsalted", "groups")

_Choice = TypeVar("_Choice", bound=Enum)


def read_rules(path: Path) -> Rules:
    """Raises MisconfiguredError: one line, without what looks like a key."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise MisconfiguredError(f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB")
        table = tomllib.loads(content.decode())
        if not table:  # cut short while it was written, more likely than meant: it would let everybody in
            raise MisconfiguredError(f"{path} says nothing; write unlisted, keyless or groups into it")
    except OSError as error:
        raise MisconfiguredError(f"cannot read the trust file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MisconfiguredError(f"{path} is not valid TOML: {error}") from error
    try:
        return rules_of(table)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{path}: {error}") from error


def rules_of(table: Mapping[str, object]) -> Rules:
    """What a file says, as tables. Raises MisconfiguredError."""
    _known(table, _NAMES, "")
    usual = Rules()
    return Rules(
        unlisted=_choice(table, "unlisted", usual.unlisted),
        keyless=_choice(table, "keyless", usual.keyless),
        client_salt=_choice(table, "client_salt", usual.client_salt),
        unsalted=_choice(table, "unsalted", Unsalted.REFUSE),
        listed=_listed(table.get("groups", {})),
    )


def _listed(groups: object) -> dict[bytes, str]:
    if not isinstance(groups, dict) or len(groups) > MAX_GROUPS:
        raise MisconfiguredError(f"groups is no table of up to {MAX_GROUPS}; write [groups.NAME]")
    listed: dict[bytes, str] = {}
    for name, group in groups.items():
        if not 0 < len(name) <= MAX_GROUP_NAME or not name.isprintable():
            raise MisconfiguredError(
                f"group {name[:MAX_GROUP_NAME]!r}: give it a name of 1 to {MAX_GROUP_NAME}"
            )
        if not isinstance(group, dict):
            raise MisconfiguredError(f"groups.{name} is no table; write [groups.{name}]")
        _known(group, ("keys",), f"groups.{name}.")
        keys = group.get("keys", [])
        if not isinstance(keys, list):
            raise MisconfiguredError(f"groups.{name}.keys is no list of texts like sha256:...")
        for place, text in enumerate(keys):
            match = _DIGEST.fullmatch(text) if isinstance(text, str) else None
            if match is None:  # not shown: it may be a key
                raise MisconfiguredError(
                    f"groups.{name}.keys[{place}] is not sha256: and 64 hexadecimal digits; "
                    'printf %s "$KEY" | sha256sum prints them'
                )
            digest = bytes.fromhex(match[1])
            if listed.setdefault(digest, name) != name:
                raise MisconfiguredError(
                    f"groups.{name}.keys[{place}] is also in groups.{listed[digest]}; a key has one group"
                )
    return listed


def _choice(table: Mapping[str, object], name: str, usual: _Choice) -> _Choice:
    given = table.get(name, usual.value)
    kind = type(usual)
    try:
        return kind(given)
    except ValueError as error:
        choices = ", ".join(str(choice.value) for choice in kind)
        raise MisconfiguredError(f"{name} is {given!r}; there are {choices}") from error


def _known(table: Mapping[str, object], names: Iterable[str], prefix: str) -> None:
    for name in table:
        if name not in names:
            raise MisconfiguredError(f"unknown {prefix}{name}; {suggestion(name, names)}")
