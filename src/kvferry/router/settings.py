"""Settings of a router: typed, parsed once (``kvferry.sources``)."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvferry.addresses import Address, parse_listening, parse_server
from kvferry.config import (
    DEFAULT_METRICS_HOST,
    OTHER_ENVIRONMENT,
    check_metrics,
    default_socket_path,
    metrics_settings,
    parse_size,
)
from kvferry.errors import MisconfiguredError
from kvferry.feed.access import FeedAccess
from kvferry.feed.settings import DEFAULT_PORT as FEED_PORT
from kvferry.router.feed.endpoints import KvEvents, parse_kv_events
from kvferry.router.http.limits import Limits
from kvferry.router.pilots import Share, parse_share
from kvferry.router.policies import POLICIES
from kvferry.secret import Secret, parse_secret
from kvferry.sources import Setting, Texts, gathered, parsed, suggestion
from kvferry.values import (
    TlsFiles,
    parse_age,
    parse_count,
    parse_path,
    parse_socket_path,
    parse_text,
)

MIN_TRUST_SECRET_BYTES = 16
DEFAULT_PORT = 8080
DEFAULT_LISTEN = Address("127.0.0.1", DEFAULT_PORT)
DEFAULT_METRICS_PORT = 9475
MAX_WORKERS = 4096
_POOL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class WorkerAddress(NamedTuple):
    """An engine. pool: the one it is in; empty: the default."""

    url: str
    pool: str = ""

    def __str__(self) -> str:
        return f"{self.pool}={self.url}" if self.pool else self.url


@dataclass(frozen=True, slots=True)
class Feeds:
    """port: where the node of a worker's host publishes; 0: nowhere. others: of workers by their URL."""

    port: int = FEED_PORT
    others: Mapping[str, Address] = field(default_factory=dict)

    def of(self, worker: str) -> Address | None:
        """The feed of the node that this worker uses; None: it has none."""
        if worker in self.others:
            return self.others[worker]
        return Address(urlsplit(worker).hostname or "", self.port) if self.port else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything a router can be told.

    workers: engines. names: the same, each address of the name being one. policy: how one is chosen for a
    request. feed, feed_*: where nodes tell what they hold, and how to get in there. kv_events: where plain
    engines tell it themselves. probe_interval_s: between questions to a worker; 0: none, and who fails
    stays away. trust: a file of API keys and their groups; trust_secret: what salts are keyed with.
    worker_api_key: sent to workers in place of callers' own. split, mirror: what part of conversations
    goes, or is copied, to another pool. listen: where clients find it. tls: its certificate and key, and
    with ``ca`` the authority of clients' certificates, which they must show. worker_tls: for workers at
    https URLs. metrics_*: see a node's.
    admin_socket: where it is asked and told; None: in the directory for sockets. engine_control: clients may
    ask engines for what controls them.
    """

    workers: tuple[WorkerAddress, ...] = ()
    names: tuple[WorkerAddress, ...] = ()
    policy: str = POLICIES[0]
    feeds: Feeds = field(default_factory=Feeds)
    kv_events: KvEvents = field(default_factory=KvEvents)
    feed_token: Secret | None = None
    feed_tls_ca: Path | None = None
    feed_tls_cert: Path | None = None
    feed_tls_key: Path | None = None
    probe_interval_s: float = 2.0
    trust: Path | None = None
    trust_secret: Secret | None = None
    worker_api_key: Secret | None = None
    split: Share | None = None
    mirror: Share | None = None
    listen: Address = DEFAULT_LISTEN
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    worker_tls_ca: Path | None = None
    worker_tls_cert: Path | None = None
    worker_tls_key: Path | None = None
    body_bytes: int = Limits().body_bytes
    waiting: int = Limits().waiting
    per_worker: int = Limits().per_worker
    metrics_port: int = DEFAULT_METRICS_PORT
    metrics_host: str = DEFAULT_METRICS_HOST
    admin_socket: Path | None = None
    engine_control: bool = False

    @property
    def tls(self) -> TlsFiles | None:
        """The files, where it speaks TLS to clients."""
        if self.tls_cert is None:
            return None
        return TlsFiles(_text(self.tls_ca), _text(self.tls_cert), _text(self.tls_key))

    @property
    def worker_tls(self) -> TlsFiles:
        """The files with which it speaks to workers at https URLs."""
        return TlsFiles(_text(self.worker_tls_ca), _text(self.worker_tls_cert), _text(self.worker_tls_key))

    @property
    def feed_access(self) -> FeedAccess:
        """How to get in at the feeds of nodes."""
        files = (self.feed_tls_ca, self.feed_tls_cert, self.feed_tls_key)
        token = self.feed_token.reveal() if self.feed_token is not None else ""
        if files == (None, None, None):
            return FeedAccess(token=token)
        ca, cert, key = map(_text, files)
        return FeedAccess(token=token, tls=TlsFiles(ca, cert, key))

    @property
    def limits(self) -> Limits:
        """Those of the proxy."""
        return Limits(body_bytes=self.body_bytes, waiting=self.waiting, per_worker=self.per_worker)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def parse_worker(text: object) -> str:
    """``http[s]://host[:port]``, as it is called from then on. Raises MisconfiguredError."""
    url = parse_text(text).strip().rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MisconfiguredError(f"{url!r} is no URL: {error}; write it like http://gpu1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MisconfiguredError(f"{url!r} is no URL of a worker; write it like http://gpu1:8000")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise MisconfiguredError(
            f"{url!r} has more than scheme, host and port; write it like http://gpu1:8000"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")


def parse_pool(name: str) -> str:
    """Empty for the default one, which is also called so. Raises MisconfiguredError."""
    if name and not _POOL.fullmatch(name):
        raise MisconfiguredError(f"{name!r} is no name of a pool: letters, digits, - and _")
    return "" if name == "default" else name


def parse_workers(text: object) -> tuple[WorkerAddress, ...]:
    """``[POOL=]URL``, with commas between. Raises MisconfiguredError."""
    pools: dict[str, str] = {}
    for word in parse_text(text).split(","):
        pool, named, url = word.strip().partition("=")
        pool, url = (parse_pool(pool or " "), url) if named else ("", pool)
        url = parse_worker(url)
        if pools.setdefault(url, pool) != pool:
            raise MisconfiguredError(f"{url} is in two pools; give it once")
    if len(pools) > MAX_WORKERS:
        raise MisconfiguredError(f"{len(pools)} workers; give at most {MAX_WORKERS}")
    return tuple(WorkerAddress(url, pool) for url, pool in pools.items())


def parse_names(text: object) -> tuple[WorkerAddress, ...]:
    """``[POOL=]http://name:port``, with commas between. Raises MisconfiguredError."""
    names = parse_workers(text)
    for name in names:
        if name.url.startswith("https:"):
            raise MisconfiguredError(f"{name}: certificates are for names; give https workers one by one")
    return names


def parse_feeds(text: object) -> Feeds:
    """``none``, a port, or ``WORKER=HOST[:PORT]``, with commas between. Raises MisconfiguredError."""
    port, others = FEED_PORT, {}
    for word in str(text).split(","):
        worker, named, address = word.strip().partition("=")
        if named:
            others[parse_worker(worker)] = parse_server(address, port=FEED_PORT, noun="node")
        elif worker == "none":
            port = 0
        else:
            port = parse_count(worker, lowest=1, highest=65535)
    return Feeds(port, others)


def parse_probe(text: object) -> float:
    """Seconds, from ``1s`` to an hour. Raises MisconfiguredError."""
    try:
        seconds = parse_age(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{text!r} is no time; write it like 2s or 1m") from error
    if not 1.0 <= seconds <= 3600.0:
        raise MisconfiguredError(f"{text!r} is outside 1s to 1h")
    return seconds


def parse_policy(text: object) -> str:
    """The name of a policy. Raises MisconfiguredError."""
    name = parse_text(text)
    if name not in POLICIES:
        raise MisconfiguredError(f"{name!r} is no policy; {suggestion(name, POLICIES)}")
    return name


def parse_listen(text: object) -> Address:
    """``ADDRESS[:PORT]``, an IP address of this host; port 0 takes any. Raises MisconfiguredError."""
    return parse_listening(parse_text(text), port=DEFAULT_PORT)


def parse_control(text: object) -> bool:
    """``pass`` or ``refuse``. Raises MisconfiguredError."""
    word = parse_text(text)
    if word not in ("pass", "refuse"):
        raise MisconfiguredError(f"{word!r} is neither pass nor refuse; pass lets clients control engines")
    return word == "pass"


def _parse_waiting(text: str | int) -> int:
    return parse_count(text, lowest=0, highest=1_000_000)


def _parse_per_worker(text: str | int) -> int:
    return parse_count(text, lowest=1, highest=1_000_000)


ROUTER_SETTINGS = (
    Setting("worker", parse_workers, "URL", "engines, like http://gpu1:8000", "workers", many=True),
    Setting("worker_dns", parse_names, "URL", "the same, for each address of a name", "names", many=True),
    Setting("policy", parse_policy, "NAME", f"how one is chosen (default {POLICIES[0]})", "policy"),
    Setting("feed", parse_feeds, "PORT", f"of nodes' feeds (default {FEED_PORT}), none", "feeds", many=True),
    Setting(
        "kv_events", parse_kv_events, "PORT", "of vLLM's own KV events, where it publishes them", "kv_events"
    ),
    Setting("feed_token", parse_secret, "TEXT", "the token itself", "feed_token", environment_only=True),
    Setting("feed_token_file", parse_path, "PATH", "file with the feeds' token", "feed_token"),
    Setting("feed_tls_ca", parse_path, "PATH", "authority of the feeds' certificates", "feed_tls_ca"),
    Setting("feed_tls_cert", parse_path, "PATH", "the certificate to show them", "feed_tls_cert"),
    Setting("feed_tls_key", parse_path, "PATH", "its key", "feed_tls_key"),
    Setting(
        "probe",
        parse_probe,
        "AGE",
        "how often workers are asked how they are (default 2s)",
        "probe_interval_s",
    ),
    Setting("trust", parse_path, "PATH", "file of API keys and their groups", "trust"),
    Setting("trust_secret", parse_secret, "TEXT", "the secret itself", "trust_secret", environment_only=True),
    Setting("trust_secret_file", parse_path, "PATH", "file with the secret of salts", "trust_secret"),
    Setting(
        "worker_api_key", parse_secret, "TEXT", "the key itself", "worker_api_key", environment_only=True
    ),
    Setting(
        "worker_api_key_file", parse_path, "PATH", "file with the key that workers get", "worker_api_key"
    ),
    Setting("split", parse_share, "SHARE", "of conversations to a pool, like 10%=poolB", "split"),
    Setting("mirror", parse_share, "SHARE", "copied to a pool, answers discarded", "mirror"),
    Setting("listen", parse_listen, "ADDRESS", f"where clients find it (default {DEFAULT_LISTEN})", "listen"),
    Setting("per_worker", _parse_per_worker, "N", "requests at one at a time (default 1024)", "per_worker"),
    Setting("queue", _parse_waiting, "N", "requests that wait for a place (default 4096)", "waiting"),
    Setting("body_size", parse_size, "SIZE", "of one request at most (default 64MiB)", "body_bytes"),
    Setting(
        "engine_control",
        parse_control,
        "WORD",
        "refuse (default) or pass: sleep, metrics ...",
        "engine_control",
    ),
    Setting("tls_cert", parse_path, "PATH", "its certificate, with its chain: talk TLS", "tls_cert"),
    Setting("tls_key", parse_path, "PATH", "the certificate's key", "tls_key"),
    Setting("tls_ca", parse_path, "PATH", "authority of certificates that clients must show", "tls_ca"),
    Setting("worker_tls_ca", parse_path, "PATH", "authority of https workers' certificates", "worker_tls_ca"),
    Setting("worker_tls_cert", parse_path, "PATH", "the certificate to show them", "worker_tls_cert"),
    Setting("worker_tls_key", parse_path, "PATH", "its key", "worker_tls_key"),
    *metrics_settings(DEFAULT_METRICS_PORT),
    Setting("admin_socket", parse_socket_path, "PATH", "where its user asks and tells it", "admin_socket"),
)


def admin_sockets() -> Path:
    """The directory in which routers of this user are asked and told, unless they were given another."""
    environ = {name: value for name, value in os.environ.items() if name != "KVFERRY_SOCKET"}
    return default_socket_path(environ).parent


def load_router_settings(
    flags: Mapping[str, str | None] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_path: Path | str | None = None,
) -> RouterSettings:
    """Merge flags over environment over file and check the result.

    flags: by setting name, None where not given. config_path: a TOML file; KVFERRY_CONFIG otherwise.
    Raises MisconfiguredError: one line with the name, the value and what to do.
    """
    texts = gathered(
        ROUTER_SETTINGS,
        flags or {},
        environ=environ,
        config_path=config_path,
        others=(*OTHER_ENVIRONMENT, "SOCKET"),
    )
    values = parsed(ROUTER_SETTINGS, texts)
    if "workers" not in values and "names" not in values:
        raise MisconfiguredError("a router needs workers; name one with --worker http://host:8000")
    settings = RouterSettings(**values)
    _check(settings, texts)
    return settings


def _check(settings: RouterSettings, texts: Texts) -> None:
    pairs = {"tls": (settings.tls_cert, settings.tls_key)}
    pairs["feed_tls"] = (settings.feed_tls_cert, settings.feed_tls_key)
    pairs["worker_tls"] = (settings.worker_tls_cert, settings.worker_tls_key)
    for name, (cert, key) in pairs.items():
        if (cert is None) != (key is None):
            raise MisconfiguredError(f"{name}_cert and {name}_key belong together; set both or neither")
    if settings.tls_ca is not None and settings.tls_cert is None:
        raise MisconfiguredError("tls_ca is set, but no tls_cert; who asks for certificates has one")
    secret = settings.trust_secret
    if secret is not None and len(secret.reveal().encode()) < MIN_TRUST_SECRET_BYTES:
        raise MisconfiguredError(
            f"the trust secret is shorter than {MIN_TRUST_SECRET_BYTES} bytes; openssl rand -hex 32 makes one"
        )
    _check_used(settings)
    pools = {worker.pool for worker in (*settings.workers, *settings.names)}
    for name, share in (("split", settings.split), ("mirror", settings.mirror)):
        if share is not None and share.pool not in pools:
            raise MisconfiguredError(
                f"{texts[name][1]} {share}: no worker is in {share.pool}; add {share.pool}=URL to the workers"
            )
    if "" not in pools:
        raise MisconfiguredError("all workers are in named pools; name one without a pool: --worker URL")
    check_metrics(port=settings.metrics_port, host=settings.metrics_host)


def _check_used(settings: RouterSettings) -> None:
    """What nothing would look at is refused: whoever set it expects that it does something."""
    if not any(worker.url.startswith("https:") for worker in settings.workers):
        for name in ("worker_tls_ca", "worker_tls_cert", "worker_tls_key"):
            if getattr(settings, name) is not None:
                raise MisconfiguredError(f"{name} is set, but no worker is at an https URL; leave it out")
    if not settings.feeds.port and not settings.feeds.others:
        for name in ("feed_token", "feed_tls_ca", "feed_tls_cert", "feed_tls_key"):
            if getattr(settings, name) is not None:
                raise MisconfiguredError(f"{name} is set, but feed is none; leave one of them out")
