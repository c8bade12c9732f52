"""The adapter's settings: ``adapter_params`` of LMCache's ``--l2-adapter``, checked once, no key unknown.

They have the names and meanings of a node's settings; secrets come from files or the environment.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import parse_valkey
from kvferry.engines.settings import DEFAULT_DOMAIN, DOMAIN_PARSERS, Parsers, parse_fields
from kvferry.errors import MisconfiguredError
from kvferry.identity.sealing import KeyRing
from kvferry.secret import Secret, parse_secret, read_secret
from kvferry.tiers.valkey.url import ValkeyUrl
from kvferry.values import parse_path, parse_text, parse_whole

DEFAULT_LOOKUP_MS = 1_000
DEFAULT_LOAD_MS = 5_000
DEFAULT_STORE_MS = 30_000
MAX_MS = 600_000
MAX_CONNECTIONS = 16
DEFAULT_STORE_CONNECTIONS = 2
MAX_CAPACITY_GB = 1 << 30
_WHERE = "--l2-adapter: adapter_params"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """valkey: the servers, with the password. domain, domain_key_file: the trust domain and its key.

    encryption_keys: for what is stored; None: it is stored as it is. lookup_s, load_s, store_s: longest that
    a task may take. fetch_connections, store_connections: per shard; None: the tier's default. Two store by
    default, so that one sends while the other computes a checksum.
    serde: LMCache's ``serde`` of this adapter as canonical text; empty: none. weights: tells apart models of
    one name. capacity_bytes: what LMCache's own eviction may count on; 0: Valkey evicts.
    """

    valkey: ValkeyUrl
    domain: str = DEFAULT_DOMAIN
    domain_key_file: Path | None = None
    encryption_keys: KeyRing | None = None
    lookup_s: float = DEFAULT_LOOKUP_MS / 1000
    load_s: float = DEFAULT_LOAD_MS / 1000
    store_s: float = DEFAULT_STORE_MS / 1000
    fetch_connections: int | None = None
    store_connections: int = DEFAULT_STORE_CONNECTIONS
    serde: str = ""
    weights: str = ""
    capacity_bytes: int = 0


def _milliseconds(value: Any) -> float:
    return parse_whole(value, lowest=1, highest=MAX_MS) / 1000


def _connections(value: Any) -> int:
    return parse_whole(value, lowest=1, highest=MAX_CONNECTIONS)


def _keys(value: Any) -> KeyRing:
    return KeyRing.load(parse_path(value))


def _capacity(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_CAPACITY_GB:
        raise MisconfiguredError(f"{value!r} is no number of GiB; leave it out where Valkey evicts")
    return int(value * (1 << 30))


def _serde(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        raise MisconfiguredError(f"{value!r} is no serde; repeat the adapter's own, as in {{'type': 'fp8'}}")
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


_PARSERS: Parsers = {
    **DOMAIN_PARSERS,
    "encryption_key_file": ("encryption_keys", _keys),
    "lookup_deadline_ms": ("lookup_s", _milliseconds),
    "load_deadline_ms": ("load_s", _milliseconds),
    "store_deadline_ms": ("store_s", _milliseconds),
    "fetch_connections": ("fetch_connections", _connections),
    "store_connections": ("store_connections", _connections),
    "serde": ("serde", _serde),
    "weights": ("weights", parse_text),
    "max_capacity_gb": ("capacity_bytes", _capacity),
}
_OF_VALKEY = ("valkey", "valkey_password_file")
KEYS = (*_OF_VALKEY, *_PARSERS)


def parse_settings(params: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> AdapterSettings:
    """Raises MisconfiguredError: one line with the key, the value unless it is secret, and what to do."""
    fields = parse_fields(params, _PARSERS, where=_WHERE, others=_OF_VALKEY)
    url = params.get("valkey")
    if not isinstance(url, str) or not url:
        raise MisconfiguredError(f'{_WHERE}: valkey is missing; write "valkey": "valkey://host:6379"')
    return AdapterSettings(
        valkey=parse_valkey(url, f"{_WHERE}: valkey", _password(params, environ)), **fields
    )


def _password(params: Mapping[str, Any], environ: Mapping[str, str]) -> Secret | None:
    """Of the file, else of $KVFERRY_VALKEY_PASSWORD."""
    try:
        if params.get("valkey_password_file") is not None:
            return read_secret(parse_path(params["valkey_password_file"]))
        text = environ.get("KVFERRY_VALKEY_PASSWORD")
        return parse_secret(text) if text is not None else None
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{_WHERE}: Valkey's password: {error}") from error
