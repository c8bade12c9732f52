"""What an engine is told about kvferry: settings as it hands them over, checked once against one table."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import client_group, default_socket_path
from kvferry.errors import MisconfiguredError
from kvferry.sources import suggestion
from kvferry.values import parse_domain, parse_group, parse_path, parse_socket_path, parse_text

DEFAULT_DOMAIN = "default"

# By key: the field that it sets, and what turns the value into the field's.
Parsers = Mapping[str, tuple[str, Callable[[Any], object]]]

DOMAIN_PARSERS: Parsers = {
    "domain": ("domain", parse_domain),
    "domain_key_file": ("domain_key_file", parse_path),
}
NODE_PARSERS: Parsers = {
    **DOMAIN_PARSERS,
    "socket": ("socket", parse_socket_path),
    "token_file": ("token_file", parse_path),
    "group": ("group", parse_group),
    "model_name": ("model_name", parse_text),
    "revision": ("revision", parse_text),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """What every engine that works with a node is told. socket: the node's.

    domain, domain_key_file: the trust domain and its key. token_file: what the node asks for; None takes
    $KVFERRY_TOKEN or $KVFERRY_TOKEN_FILE. group: number of one whose members may own the node; None: this
    user alone. model_name, revision: name the weights where they cannot be read from a local directory.
    """

    socket: Path
    domain: str = DEFAULT_DOMAIN
    domain_key_file: Path | None = None
    token_file: Path | None = None
    group: int | None = None
    model_name: str | None = None
    revision: str | None = None


def parse_fields(
    given: Mapping[str, Any], parsers: Parsers, *, where: str, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Fields of the keys that are given, and not as None.

    where: what the settings are called, for messages. others: keys that are known and read elsewhere.
    Raises MisconfiguredError: one line with the key, the value and what to do.
    """
    known = {*parsers, *others}
    for key in given:
        if key not in known:
            raise MisconfiguredError(f"{where}: unknown key {key}; {suggestion(str(key), known)}")
    fields: dict[str, Any] = {}
    for key, (field, parse) in parsers.items():
        if given.get(key) is not None:
            try:
                fields[field] = parse(given[key])
            except MisconfiguredError as error:
                raise MisconfiguredError(f"{where}: {key}: {error}") from error
    return fields


def node_fields(fields: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """With the environment's word where the settings have none. Raises MisconfiguredError."""
    found = dict(fields)
    if "socket" not in found:
        found["socket"] = default_socket_path(environ)
    if "group" not in found:
        found["group"] = client_group(environ=environ)
    return found
