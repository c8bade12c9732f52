"""The connector's own settings: ``kv_connector_extra_config``, typed, checked once, unknown keys refused."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.engines.settings import NODE_PARSERS, NodeAccess, Parsers, node_fields, parse_fields
from kvferry.values import parse_whole

MAX_CHUNK_TOKENS = 1 << 20
MAX_DEADLINE_CAP_MS = 600_000
WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(NodeAccess):
    """chunk_tokens: None takes the engine's default. deadline_cap_ms: 0 takes the node's."""

    chunk_tokens: int | None = None
    deadline_cap_ms: int = 0


def _chunk_tokens(value: Any) -> int:
    return parse_whole(value, lowest=1, highest=MAX_CHUNK_TOKENS)


def _deadline_cap(value: Any) -> int:
    return parse_whole(value, lowest=1, highest=MAX_DEADLINE_CAP_MS)


_PARSERS: Parsers = {
    **NODE_PARSERS,
    "chunk_tokens": ("chunk_tokens", _chunk_tokens),
    "deadline_cap_ms": ("deadline_cap_ms", _deadline_cap),
}


def parse_settings(extra: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> ConnectorSettings:
    """Raises MisconfiguredError: one line with the key, the value and what to do."""
    return ConnectorSettings(**node_fields(parse_fields(extra, _PARSERS, where=WHERE), environ=environ))
