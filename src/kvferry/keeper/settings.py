"""Settings of a keeper: typed, parsed once (``kvferry.sources``)."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.addresses import Address
from kvferry.config import (
    DEFAULT_METRICS_HOST,
    OTHER_ENVIRONMENT,
    check_metrics,
    format_size,
    metrics_settings,
    parse_limit,
    parse_size,
    parse_url_text,
    parse_valkey,
)
from kvferry.errors import MisconfiguredError
from kvferry.identity.header import KEY_ID_BYTES
from kvferry.identity.sealing import MAX_KEYS
from kvferry.keeper.address import DEFAULT_PORT, MAX_KEEPERS, parse_listen
from kvferry.keeper.limits import MIN_BUFFER_BYTES, Limits
from kvferry.secret import Secret, parse_secret
from kvferry.sources import Setting, gathered, parsed
from kvferry.tiers.valkey.url import ValkeyUrl
from kvferry.values import TlsFiles, parse_age, parse_path, parse_text

DEFAULT_LISTEN = Address("127.0.0.1", DEFAULT_PORT)
DEFAULT_METRICS_PORT = 9473
MAX_NAME_CHARACTERS = 128

_KEY_ID = re.compile(rf"[0-9a-f]{{{2 * KEY_ID_BYTES}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """Everything a keeper can be told.

    valkey: whose parts it keeps. disk, disk_bytes: a directory, and what its files may take. objects: URL of
    a bucket's prefix or a directory; objects_age_s, objects_bytes: what stays there at most; None: no limit.
    listen: where nodes find it. name: its own among ``keepers``, the names of all that share the work; empty:
    it is alone. token: what nodes must show. tls: its certificate and key, and with ``ca`` the authority
    of nodes' certificates, which they must show. key_ids: of the keys by which nodes encrypt, newest first.
    buffer_bytes: host memory that parts pass through. metrics_*: see a node's.
    """

    valkey: ValkeyUrl
    disk: Path | None = None
    disk_bytes: int | None = None
    objects: str | None = None
    objects_age_s: float | None = None
    objects_bytes: int | None = None
    listen: Address = DEFAULT_LISTEN
    name: str = field(default_factory=socket.gethostname)
    keepers: tuple[str, ...] = ()
    token: Secret | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    key_ids: tuple[bytes, ...] = ()
    buffer_bytes: int = Limits().buffer_bytes
    metrics_port: int = DEFAULT_METRICS_PORT
    metrics_host: str = DEFAULT_METRICS_HOST

    @property
    def tls(self) -> TlsFiles | None:
        """The files, where it speaks TLS."""
        if self.tls_cert is None:
            return None
        ca = str(self.tls_ca) if self.tls_ca is not None else None
        return TlsFiles(ca, str(self.tls_cert), str(self.tls_key))


def parse_name(text: object) -> str:
    """The name of a keeper. Raises MisconfiguredError."""
    name = parse_text(text)
    if len(name) > MAX_NAME_CHARACTERS or "," in name:
        raise MisconfiguredError(
            f"{name[:20]!r} is no name of a keeper: at most {MAX_NAME_CHARACTERS} characters, without a comma"
        )
    return name


def parse_names(text: object) -> tuple[str, ...]:
    """Names of keepers, with commas between. Raises MisconfiguredError."""
    names = tuple(parse_name(word.strip()) for word in parse_text(text).split(","))
    if len(names) > MAX_KEEPERS or len(set(names)) < len(names):
        raise MisconfiguredError(f"{len(names)} keepers; give each once, and at most {MAX_KEEPERS}")
    return names


def parse_key_ids(text: object) -> tuple[bytes, ...]:
    """Ids of encryption keys as ``kvferry status`` shows them. Raises MisconfiguredError."""
    words = [word.strip() for word in parse_text(text).split(",")]
    for word in words:
        if not _KEY_ID.fullmatch(word):
            raise MisconfiguredError(
                f"a word of {len(word)} characters is no key id; kvferry status shows them, like 5f0c31aa"
            )
    if len(words) > MAX_KEYS or len(set(words)) < len(words):
        raise MisconfiguredError(f"{len(words)} key ids; give each once, and at most {MAX_KEYS}")
    return tuple(bytes.fromhex(word) for word in words)


KEEPER_SETTINGS = (
    Setting("valkey", parse_url_text, "URL", "whose parts to keep, like valkey://host:port", "valkey"),
    Setting("disk", parse_path, "DIR", "directory on NVMe to keep KV in", "disk"),
    Setting("disk_size", parse_size, "SIZE", "what its files may take, like 4TiB", "disk_bytes"),
    Setting("objects", parse_url_text, "URL", "s3://bucket/prefix, or file:///directory", "objects"),
    Setting("objects_age", parse_age, "AGE", "what is older leaves the bucket, like 30d", "objects_age_s"),
    Setting("objects_size", parse_limit, "SIZE", "what may be in the bucket, like 50TiB", "objects_bytes"),
    Setting("listen", parse_listen, "ADDRESS", f"where nodes find it (default {DEFAULT_LISTEN})", "listen"),
    Setting("name", parse_name, "NAME", "its name among keepers (default: this host's)", "name"),
    Setting("keepers", parse_names, "NAMES", "all that share the work, like store1,store2", "keepers"),
    Setting("token", parse_secret, "TEXT", "the token itself", "token", environment_only=True),
    Setting("token_file", parse_path, "PATH", "file with a token that nodes must show", "token"),
    Setting("tls_cert", parse_path, "PATH", "its certificate, with its chain: talk TLS", "tls_cert"),
    Setting("tls_key", parse_path, "PATH", "the certificate's key", "tls_key"),
    Setting("tls_ca", parse_path, "PATH", "authority of certificates that nodes must show", "tls_ca"),
    Setting("valkey_password", parse_secret, "TEXT", "", "valkey_password", environment_only=True),
    Setting(
        "valkey_password_file", parse_path, "PATH", "file that holds Valkey's password", "valkey_password"
    ),
    Setting("encryption_key_ids", parse_key_ids, "IDS", "of nodes' keys, where they encrypt", "key_ids"),
    Setting("buffer", parse_size, "SIZE", "memory that parts pass through (default 256MiB)", "buffer_bytes"),
    *metrics_settings(DEFAULT_METRICS_PORT),
)


def load_keeper_settings(
    flags: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_path: Path | str | None = None,
) -> KeeperSettings:
    """Merge flags over environment over file and check the result.

    flags: by setting name, None where not given. config_path: a TOML file; KVFERRY_CONFIG otherwise.
    Raises MisconfiguredError: one line with the name, the value and what to do.
    """
    texts = gathered(
        KEEPER_SETTINGS,
        flags or {},
        environ=environ,
        config_path=config_path,
        others=(*OTHER_ENVIRONMENT, "SOCKET"),  # of the node, for the commands of the same shell
    )
    values = parsed(KEEPER_SETTINGS, texts)
    password = values.pop("valkey_password", None)
    if "valkey" not in values:
        raise MisconfiguredError("a keeper keeps what is in Valkey; name it with --valkey valkey://host:6379")
    values["valkey"] = parse_valkey(values["valkey"], texts["valkey"][1], password)
    settings = KeeperSettings(**values)
    _check(settings)
    return settings


def _check(settings: KeeperSettings) -> None:
    if settings.disk is None and settings.objects is None:
        raise MisconfiguredError("a keeper needs a place to keep parts in; set --disk, --objects or both")
    if (settings.disk is None) != (settings.disk_bytes is None):
        lacking = "disk" if settings.disk is None else "disk_size"
        raise MisconfiguredError(f"disk and disk_size belong together; set {lacking} too")
    if settings.objects is None and (settings.objects_age_s or settings.objects_bytes):
        lone = "objects_age" if settings.objects_age_s else "objects_size"
        raise MisconfiguredError(f"{lone} is set, but no objects; set their place with --objects")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise MisconfiguredError("tls_cert and tls_key belong together; set both or neither")
    if settings.tls_ca is not None and settings.tls_cert is None:
        raise MisconfiguredError("tls_ca is set, but no tls_cert; who asks for certificates has one")
    check_metrics(port=settings.metrics_port, host=settings.metrics_host)
    if settings.keepers and settings.name not in settings.keepers:
        raise MisconfiguredError(
            f"this keeper is called {settings.name!r}, which is none of keepers "
            f"{','.join(settings.keepers)}; set its --name"
        )
    if settings.buffer_bytes < MIN_BUFFER_BYTES:
        raise MisconfiguredError(
            f"a buffer of {format_size(settings.buffer_bytes)} is too small; give it at least "
            f"{format_size(MIN_BUFFER_BYTES)}"
        )
    loopback = ipaddress.ip_address(settings.listen.host).is_loopback
    if not loopback and settings.token is None and settings.tls_ca is None:
        raise MisconfiguredError(
            f"everyone who reaches {settings.listen} could read and delete; set --token-file, or --tls-cert, "
            "--tls-key and --tls-ca, or listen on loopback"
        )
