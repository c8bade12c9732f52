"""The backend's settings, from ``--hicache-storage-backend-extra-config``: typed, checked once."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import client_group, default_socket_path, suggestion
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count, parse_domain, parse_group, parse_path, parse_socket_path, parse_text

DEFAULT_DOMAIN = "default"
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
class BackendSettings:
    """socket: the node's. deadline_s: longest that a call which moves pages may take.

    domain, domain_key_file: the trust domain and its key. token_file: what the node asks for; None takes
    $KVFERRY_TOKEN or $KVFERRY_TOKEN_FILE. group: number of one whose members may own the node; None: this
    user alone. model_name, revision: name the weights where they cannot be read from a local directory.
    """

    socket: Path
    deadline_s: float = DEFAULT_DEADLINE_MS / 1000
    domain: str = DEFAULT_DOMAIN
    domain_key_file: Path | None = None
    token_file: Path | None = None
    group: int | None = None
    model_name: str | None = None
    revision: str | None = None


def _deadline(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MisconfiguredError(f"{value!r} is not a whole number; give one from 10 to {MAX_DEADLINE_MS}")
    return parse_count(value, lowest=10, highest=MAX_DEADLINE_MS) / 1000


_PARSERS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "socket": ("socket", parse_socket_path),
    "deadline_ms": ("deadline_s", _deadline),
    "domain": ("domain", parse_domain),
    "domain_key_file": ("domain_key_file", parse_path),
    "token_file": ("token_file", parse_path),
    "group": ("group", parse_group),
    "model_name": ("model_name", parse_text),
    "revision": ("revision", parse_text),
}


def parse_settings(extra: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> BackendSettings:
    """Raises MisconfiguredError: one line with the key, the value and what to do."""
    for key in extra:
        if key not in _PARSERS and key not in _OF_SGLANG:
            raise MisconfiguredError(f"{WHERE}: unknown key {key}; {suggestion(str(key), _PARSERS)}")
    if not extra.get("interface_v1"):
        raise MisconfiguredError(
            f'{WHERE}: without interface_v1 SGLang hands over copies of pages: write "interface_v1": 1'
        )
    fields: dict[str, Any] = {
        "socket": default_socket_path(environ),
        "group": client_group(environ=environ),
    }
    for key, (field, parse) in _PARSERS.items():
        if extra.get(key) is not None:
            try:
                fields[field] = parse(extra[key])
            except MisconfiguredError as error:
                raise MisconfiguredError(f"{WHERE}: {key}: {error}") from error
    return BackendSettings(**fields)
