"""The backend's settings, from ``--hicache-storage-backend-extra-config``: typed, checked once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.engines.settings import NODE_PARSERS, NodeAccess, Parsers, node_fields, parse_fields
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_whole

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 600_000
WHERE = "--hicache-storage-backend-extra-config"

# SGLang's own keys, which it leaves in the dictionary that it hands on.
_OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings(NodeAccess):
    """deadline_s: longest that a call which moves pages may take."""

    deadline_s: float = DEFAULT_DEADLINE_MS / 1000


def _deadline(value: Any) -> float:
    return parse_whole(value, lowest=10, highest=MAX_DEADLINE_MS) / 1000


_PARSERS: Parsers = {**NODE_PARSERS, "deadline_ms": ("deadline_s", _deadline)}


def parse_settings(extra: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> BackendSettings:
    """Raises MisconfiguredError: one line with the key, the value and what to do."""
    fields = parse_fields(extra, _PARSERS, where=WHERE, others=_OF_SGLANG)
    if not extra.get("interface_v1"):
        raise MisconfiguredError(
            f'{WHERE}: without interface_v1 SGLang hands over copies of pages: write "interface_v1": 1'
        )
    return BackendSettings(**node_fields(fields, environ=environ))
