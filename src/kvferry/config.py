"""Settings of a node and of its clients: typed, parsed once (``kvferry.sources``)."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.addresses import Address
from kvferry.errors import MisconfiguredError
from kvferry.feed.settings import FEED_SETTINGS, FeedSettings, check_feed
from kvferry.identity.sealing import KeyRing
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.address import parse_keepers
from kvferry.secret import NO_LINE, Secret, parse_secret, read_secret
from kvferry.sources import Setting, gathered, parsed
from kvferry.tiers.valkey.url import ValkeyUrl, parse_url
from kvferry.values import (
    TlsFiles,
    parse_count,
    parse_domain,
    parse_group,
    parse_ip_address,
    parse_path,
    parse_socket_path,
)

# Read elsewhere than by a node: not settings of one, and no mistake either.
OTHER_ENVIRONMENT = ("CONFIG", "DOMAIN_KEY", "PYTHON")
MAX_SIZE_BYTES = 1 << 62
MIN_POOL_BYTES = 64 << 20
DEFAULT_POOL_BYTES = 4 << 30
DEFAULT_DEADLINE_CAP_MS = 5000
MIN_LIMIT_BYTES = 1 << 20
DEFAULT_METRICS_PORT = 9471
DEFAULT_METRICS_HOST = "127.0.0.1"

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def _socket_path() -> Path:
    return default_socket_path(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Everything a node can be told.

    pool_bytes: host memory for KV. valkey: where more is kept; holds the password, which its repr and str
    leave out. disk, disk_bytes: a directory in its place, and what its files may take. None: memory alone.
    deadline_cap_ms: no load may take longer, whatever the estimate says. metrics_host, metrics_port: where
    metrics are served, to all who can connect; port 0: nowhere. domain: the trust domain of the engines that
    are served; empty: that of the first one. token: what clients must show; None: nothing. group: number of
    the group whose members may connect; None: the node's user alone. encryption_keys: for what is stored in
    Valkey; None: it is stored as it is. valkey_quota: bytes that the node may hold there. valkey_write_rate:
    bytes per second that it may write. None: no limit. keepers: of what lies below Valkey. keeper_*: how to
    get in there, see ``KeeperAccess``. feed_*: where routers follow it, see ``FeedSettings``.
    """

    pool_bytes: int = DEFAULT_POOL_BYTES
    valkey: ValkeyUrl | None = None
    disk: Path | None = None
    disk_bytes: int | None = None
    deadline_cap_ms: int = DEFAULT_DEADLINE_CAP_MS
    socket_path: Path = field(default_factory=_socket_path)
    metrics_port: int = DEFAULT_METRICS_PORT
    metrics_host: str = DEFAULT_METRICS_HOST
    domain: str = ""
    token: Secret | None = None
    group: int | None = None
    encryption_keys: KeyRing | None = None
    valkey_quota: int | None = None
    valkey_write_rate: int | None = None
    keepers: tuple[Address, ...] = ()
    keeper_token: Secret | None = None
    keeper_tls_ca: Path | None = None
    keeper_tls_cert: Path | None = None
    keeper_tls_key: Path | None = None
    feed_listen: Address | None = None
    feed_token: Secret | None = None
    feed_tls_ca: Path | None = None
    feed_tls_cert: Path | None = None
    feed_tls_key: Path | None = None

    @property
    def feed(self) -> FeedSettings | None:
        """Where routers follow it; None: nowhere."""
        return FeedSettings.of(
            self.feed_listen, self.feed_token, self.feed_tls_ca, self.feed_tls_cert, self.feed_tls_key
        )

    @property
    def keeper_access(self) -> KeeperAccess:
        """How to get in at its keepers."""
        return _access(self.keeper_token, self.keeper_tls_ca, self.keeper_tls_cert, self.keeper_tls_key)


def default_socket_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where node and engines of this user meet when nobody says otherwise."""
    if chosen := environ.get("KVFERRY_SOCKET"):
        return Path(os.path.expanduser(chosen))  # and as it is where there is no such user
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir():
        return runtime / "kvferry" / "node.sock"
    return Path(f"/tmp/kvferry-{os.getuid()}") / "node.sock"


def parse_size(text: str | int) -> int:
    """Bytes from ``4GiB``, ``512MiB``, ``1.5G`` (decimal without the i) or a plain number."""
    if isinstance(text, int) and not isinstance(text, bool):
        if not 0 <= text <= MAX_SIZE_BYTES:
            raise MisconfiguredError(
                "a size is negative or has too many digits; write it like 4GiB or 512MiB"
            )
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise MisconfiguredError(f"{text!r} is not a size; write it like 4GiB or 512MiB")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_size(nbytes: float) -> str:
    """Bytes for people, in powers of 1,024: ``512 B``, ``1.5 MiB``, ``47.84 GiB``, ``16 TiB``."""
    power = 0
    while abs(nbytes) >= 1024 and power < 4:
        nbytes /= 1024
        power += 1
    places = 0 if nbytes == int(nbytes) or not power else 1 + (power > 2 and abs(nbytes) < 100)
    return f"{nbytes:.{places}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_limit(text: str | int) -> int:
    """A size that a limit may have. Raises MisconfiguredError."""
    nbytes = parse_size(text)
    if nbytes < MIN_LIMIT_BYTES:
        raise MisconfiguredError(
            f"{text!r} is less than {format_size(MIN_LIMIT_BYTES)}; give more, or leave it out for no limit"
        )
    return nbytes


def parse_port(text: str | int) -> int:
    """Of a server; 0 stands for none. Raises MisconfiguredError."""
    return parse_count(text, lowest=0, highest=65535)


def _parse_deadline(text: str | int) -> int:
    return parse_count(text, lowest=10, highest=600_000)


def parse_url_text(text: object) -> str:
    """One line, not shown: a password may be in it. Raises MisconfiguredError."""
    if not isinstance(text, str) or NO_LINE.search(text):
        raise MisconfiguredError("the URL (not shown) is not one line of text; write valkey://host:6379")
    return text


def _parse_keys(text: object) -> KeyRing:
    return KeyRing.load(parse_path(text))


KEEPERS_SETTINGS = (
    Setting("keepers", parse_keepers, "HOSTS", "keepers below Valkey, like store1,store2:9472", "keepers"),
    Setting(
        "keeper_token",
        parse_secret,
        "TEXT",
        "the keepers' token itself",
        "keeper_token",
        environment_only=True,
    ),
    Setting("keeper_token_file", parse_path, "PATH", "file with the token that keepers want", "keeper_token"),
    Setting("keeper_tls_ca", parse_path, "PATH", "authority of the keepers' TLS, in PEM", "keeper_tls_ca"),
    Setting(
        "keeper_tls_cert", parse_path, "PATH", "certificate for keepers that want one", "keeper_tls_cert"
    ),
    Setting("keeper_tls_key", parse_path, "PATH", "its key", "keeper_tls_key"),
)
"""Of a node, and of the verbs that ask keepers themselves."""


def metrics_settings(port: int) -> tuple[Setting, Setting]:
    """Where a process shows its metrics. port: the default."""
    text = f"port of the metrics; 0: none (default {port})"
    host = "address of the metrics (default: loopback)"
    return (
        Setting("metrics_port", parse_port, "PORT", text, "metrics_port"),
        Setting("metrics_host", parse_ip_address, "ADDRESS", host, "metrics_host"),
    )


NODE_SETTINGS = (
    Setting("pool", parse_size, "SIZE", "host memory for KV, like 16GiB (default 4GiB)", "pool_bytes"),
    Setting("valkey", parse_url_text, "URL", "valkey://host:port, or valkeys:// for TLS", "valkey"),
    Setting("disk", parse_path, "DIR", "directory to keep KV in, instead of Valkey", "disk"),
    Setting("disk_size", parse_size, "SIZE", "what its files may take, like 500GiB", "disk_bytes"),
    Setting(
        "deadline_cap_ms",
        _parse_deadline,
        "MS",
        f"longest a load may take (default {DEFAULT_DEADLINE_CAP_MS})",
        "deadline_cap_ms",
    ),
    Setting("socket", parse_socket_path, "PATH", "where engines of this host find the node", "socket_path"),
    Setting("group", parse_group, "GROUP", "name or number of a group that may connect", "group"),
    *metrics_settings(DEFAULT_METRICS_PORT),
    Setting("valkey_password", parse_secret, "TEXT", "", "valkey_password", environment_only=True),
    Setting(
        "valkey_password_file", parse_path, "PATH", "file that holds Valkey's password", "valkey_password"
    ),
    Setting(
        "encryption_key_file",
        _parse_keys,
        "PATH",
        "file with keys for what is stored in Valkey",
        "encryption_keys",
    ),
    Setting(
        "valkey_quota", parse_limit, "SIZE", "what this node may hold in Valkey, like 200GiB", "valkey_quota"
    ),
    Setting(
        "valkey_write_rate",
        parse_limit,
        "SIZE",
        "what this node may write to Valkey per second",
        "valkey_write_rate",
    ),
    Setting("domain", parse_domain, "NAME", "trust domain (default: the first engine's)", "domain"),
    Setting("token", parse_secret, "TEXT", "the token itself", "token", environment_only=True),
    Setting("token_file", parse_path, "PATH", "file with a token that clients must show", "token"),
    *KEEPERS_SETTINGS,
    *FEED_SETTINGS,
)


def load_node_settings(
    flags: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_path: Path | str | None = None,
) -> NodeSettings:
    """Merge flags over environment over file and check the result against this host.

    flags: by setting name, None where not given. config_path: a TOML file; KVFERRY_CONFIG otherwise.
    Raises MisconfiguredError: one line with the name, the value and what to do.
    """
    texts = gathered(
        NODE_SETTINGS, flags or {}, environ=environ, config_path=config_path, others=OTHER_ENVIRONMENT
    )
    values = parsed(NODE_SETTINGS, texts)
    password = values.pop("valkey_password", None)
    if "valkey" in values:
        values["valkey"] = parse_valkey(values["valkey"], texts["valkey"][1], password)
    elif password is not None:
        raise MisconfiguredError("a Valkey password is set, but no Valkey URL; set one with --valkey")
    elif behind := values.keys() & {"encryption_keys", "valkey_quota", "valkey_write_rate"}:
        name = min(behind).replace("encryption_keys", "an encryption key")
        raise MisconfiguredError(f"{name} is set, but no Valkey URL; set one with --valkey")
    _check_access(values)
    check_feed(values)
    if values.get("keepers") and "valkey" not in values:
        raise MisconfiguredError("keepers are set, but no Valkey URL: they bring parts there; set --valkey")
    settings = NodeSettings(**values)
    _check(settings)
    return settings


def parse_valkey(url: str, where: str, password: Secret | None = None) -> ValkeyUrl:
    """The servers and their credentials; ``where`` the URL was given is named. Raises MisconfiguredError."""
    try:
        parsed = parse_url(url, password=password.reveal() if password else None)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{where}: {error}") from error
    if where.startswith("--") and password is None and parsed.password is not None:
        raise MisconfiguredError(
            f"{where} {parsed}: a password among arguments can be read by every user of the host; "
            "put it into KVFERRY_VALKEY_PASSWORD or name a file with --valkey-password-file"
        )
    return parsed


def client_token(token_file: Path | None = None, *, environ: Mapping[str, str] = os.environ) -> str:
    """What to show to a node: from the file, $KVFERRY_TOKEN or $KVFERRY_TOKEN_FILE; else nothing."""
    if token_file is None and (text := environ.get("KVFERRY_TOKEN")):
        try:
            return parse_secret(text).reveal()
        except MisconfiguredError as error:
            raise MisconfiguredError(f"KVFERRY_TOKEN: {error}") from error
    if token_file is None and (named := environ.get("KVFERRY_TOKEN_FILE")):
        try:
            return read_secret(parse_path(named)).reveal()
        except MisconfiguredError as error:
            raise MisconfiguredError(f"KVFERRY_TOKEN_FILE: {error}") from error
    return read_secret(token_file).reveal() if token_file is not None else ""


def client_keepers(
    flags: Mapping[str, str | None] | None = None, *, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[Address, ...], KeeperAccess]:
    """Which keepers to ask, and how to get in: from flags (by setting name), else the environment."""
    known = {setting.variable for setting in KEEPERS_SETTINGS}
    own = {name: value for name, value in environ.items() if name in known}
    values = parsed(
        KEEPERS_SETTINGS,
        gathered(KEEPERS_SETTINGS, flags or {}, environ=own, config_path=None, others=()),
    )
    _check_access(values)
    access = _access(*(values.get(f"keeper_{name}") for name in ("token", "tls_ca", "tls_cert", "tls_key")))
    return values.get("keepers", ()), access


def _access(token: Secret | None, ca: Path | None, cert: Path | None, key: Path | None) -> KeeperAccess:
    files = TlsFiles(*(None if path is None else str(path) for path in (ca, cert, key)))
    return KeeperAccess(token.reveal() if token is not None else "", files if files.ca is not None else None)


def _check_access(values: Mapping[str, object]) -> None:
    if ("keeper_tls_cert" in values) != ("keeper_tls_key" in values):
        raise MisconfiguredError("keeper_tls_cert and keeper_tls_key belong together; set both or neither")
    if "keeper_tls_cert" in values and "keeper_tls_ca" not in values:
        raise MisconfiguredError(
            "keeper_tls_cert is set, but no keeper_tls_ca to verify keepers by; set both"
        )
    if not values.get("keepers") and (lone := [name for name in values if name.startswith("keeper_")]):
        raise MisconfiguredError(f"{lone[0]} is set, but no keepers; set them with --keepers")


def client_group(group: str | None = None, *, environ: Mapping[str, str] = os.environ) -> int | None:
    """Of which group the node may be a member: the one given, else $KVFERRY_GROUP; None: of none."""
    where, text = ("--group", group) if group is not None else ("KVFERRY_GROUP", environ.get("KVFERRY_GROUP"))
    if text is None:
        return None
    try:
        return parse_group(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{where}: {error}") from error


def memory_bytes() -> int:
    """What this process may use: the host's memory or its control group's limit, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def check_metrics(*, port: int, host: str) -> None:
    """Raises MisconfiguredError for the address of a page that is not there."""
    if not port and host != DEFAULT_METRICS_HOST:
        raise MisconfiguredError(
            f"metrics_host is {host}, but metrics_port is 0: no metrics; set a port too, or leave it out"
        )


def _check(settings: NodeSettings) -> None:
    check_metrics(port=settings.metrics_port, host=settings.metrics_host)
    if settings.disk is not None and settings.valkey is not None:
        raise MisconfiguredError("disk and valkey are both set; a node has one of them behind it: keep one")
    if (settings.disk is None) != (settings.disk_bytes is None):
        lacking = "disk" if settings.disk is None else "disk_size"
        raise MisconfiguredError(f"disk and disk_size belong together; set {lacking} too")
    if settings.pool_bytes < MIN_POOL_BYTES:
        raise MisconfiguredError(
            f"a pool of {format_size(settings.pool_bytes)} holds no prefix; give it at least "
            f"{format_size(MIN_POOL_BYTES)}"
        )
    if settings.pool_bytes > (available := memory_bytes()):
        raise MisconfiguredError(
            f"a pool of {format_size(settings.pool_bytes)} is larger than this host's memory of "
            f"{format_size(available)}; leave room for the engines too"
        )
