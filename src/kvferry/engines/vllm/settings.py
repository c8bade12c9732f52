"""The connector's own settings: ``kv_connector_extra_config``, typed, checked once, unknown keys refused."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import client_group, default_socket_path, suggestion
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_group

DEFAULT_DOMAIN = "default"
MAX_DEADLINE_CAP_MS = 600_000
_KEYS = (
    "socket",
    "chunk_tokens",
    "deadline_cap_ms",
    "domain",
    "domain_key_file",
    "token_file",
    "group",
    "model_name",
    "revision",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """socket: the node's. chunk_tokens: None takes the engine's default. deadline_cap_ms: 0 takes the node's.

    domain, domain_key_file: the trust domain and its key. token_file: what the node asks for; None takes
    $KVFERRY_TOKEN or $KVFERRY_TOKEN_FILE. group: number of one whose members may own the node; None: this
    user alone. model_name, revision: name the weights where they cannot be read from a local directory.
    """

    socket: Path
    chunk_tokens: int | None = None
    deadline_cap_ms: int = 0
    domain: str = DEFAULT_DOMAIN
    domain_key_file: Path | None = None
    token_file: Path | None = None
    group: int | None = None
    model_name: str | None = None
    revision: str | None = None


def parse_settings(extra: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> ConnectorSettings:
    """Raises MisconfiguredError: one line with the key, the value and what to do."""
    for key in extra:
        if key not in _KEYS:
            raise MisconfiguredError(
                f"unknown key in kv_connector_extra_config: {key}; {suggestion(key, _KEYS)}"
            )
    socket, key_file = _text(extra, "socket"), _text(extra, "domain_key_file")
    token_file = _text(extra, "token_file")
    return ConnectorSettings(
        socket=Path(socket) if socket else default_socket_path(environ),
        chunk_tokens=_count(extra, "chunk_tokens", highest=1 << 20),
        deadline_cap_ms=_count(extra, "deadline_cap_ms", highest=MAX_DEADLINE_CAP_MS) or 0,
        domain=_text(extra, "domain") or DEFAULT_DOMAIN,
        domain_key_file=Path(key_file) if key_file else None,
        token_file=Path(token_file) if token_file else None,
        group=_group(extra.get("group"), environ),
        model_name=_text(extra, "model_name"),
        revision=_text(extra, "revision"),
    )


def _text(extra: Mapping[str, Any], key: str) -> str | None:
    value = extra.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise MisconfiguredError(f"kv_connector_extra_config: {key} is {value!r}; give a text")
    return value


def _count(extra: Mapping[str, Any], key: str, *, highest: int) -> int | None:
    value = extra.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise MisconfiguredError(
            f"kv_connector_extra_config: {key} is {value!r}; give a whole number of 1 to {highest}"
        )
    return value


def _group(value: object, environ: Mapping[str, str]) -> int | None:
    if value is None:
        return client_group(environ=environ)
    try:
        return parse_group(value)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"kv_connector_extra_config: group: {error}") from error
