"""Where the Valkey servers are and how to speak to them, from one URL.

``valkey://[user[:password]@]host[:port][,host[:port]...][/0][?ca=FILE&cert=FILE&key=FILE]``

Schemes: ``valkey`` and ``redis`` (plain), ``valkeys`` and ``rediss`` (TLS), ``unix`` (a socket's path),
each also with ``+cluster`` to insist on a Cluster (otherwise the server is asked). Several hosts are
several seeds of one Cluster.
"""

import difflib
import ipaddress
import urllib.parse
from dataclasses import dataclass, field

from kvferry.addresses import Address
from kvferry.errors import MisconfiguredError
from kvferry.values import TlsFiles

DEFAULT_PORT = 6379
MAX_URL_CHARACTERS = 1024
MAX_SEEDS = 64
MAX_SOCKET_PATH_BYTES = 107  # of Linux, without the closing zero
_PLAIN = ("valkey", "redis")
_TLS = ("valkeys", "rediss")
_UNIX = ("unix", "valkey+unix")
_CLUSTER_SUFFIX = "+cluster"
_PARAMETERS = ("ca", "cert", "key")
_EXAMPLE = "valkey://host:6379"
_NOT_IN_HOST = " #?/\\[]<>\"'"


@dataclass(frozen=True, slots=True)
class ValkeyUrl:
    """A parsed URL. ``cluster`` None means: ask the server. The password never shows in repr or str."""

    seeds: tuple[Address, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    cluster: bool | None = None

    def __str__(self) -> str:
        """The URL without secrets."""
        scheme = "valkeys" if self.tls else "valkey" if self.seeds[0].port else "unix"
        suffix = _CLUSTER_SUFFIX if self.cluster else ""
        return f"{scheme}{suffix}://{','.join(map(str, self.seeds))}"


def parse_url(text: str, *, password: str | None = None) -> ValkeyUrl:
    """Parse ``text``; ``password`` (from a file or the environment) wins over one in the URL.

    Raises MisconfiguredError, one line, without the password.
    """
    if len(text) > MAX_URL_CHARACTERS:
        raise MisconfiguredError(
            f"Valkey URL: {len(text)} characters: give at most {MAX_URL_CHARACTERS}, a seed or two are enough"
        )
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    cluster = True if scheme.endswith(_CLUSTER_SUFFIX) else None
    scheme = scheme.removesuffix(_CLUSTER_SUFFIX)
    if not separator or scheme not in _PLAIN + _TLS + _UNIX:
        raise MisconfiguredError(_scheme_message(scheme if separator else None, text))
    rest, _, query = rest.partition("?")
    if "@" in query and "=" not in query.partition("@")[0]:  # the end of a password, and not to be shown
        raise MisconfiguredError("Valkey URL: a ? before the @: write one in a password as %3F")
    authority, _, hosts = rest.rpartition("@")
    user, own_password = _credentials(authority)
    tls = _tls(query, wanted=scheme in _TLS)
    if scheme in _UNIX:
        seeds: tuple[Address, ...] = (Address(_socket_path(hosts), 0),)
    else:
        hosts, _, database = hosts.partition("/")
        if database not in ("", "0"):
            raise MisconfiguredError(f"Valkey URL: database {database!r}: kvferry uses database 0, end in /0")
        seeds = tuple(_address(host) for host in hosts.split(","))
    if len(seeds) > MAX_SEEDS:
        raise MisconfiguredError(f"Valkey URL: {len(seeds)} hosts: give at most {MAX_SEEDS} seeds")
    return ValkeyUrl(seeds, user or None, password or own_password, tls, cluster)


def _scheme_message(scheme: str | None, text: str) -> str:
    if scheme is None:
        _, secret, shown = text.rpartition("@")
        shown = f"...@{shown}" if secret else shown
        return f"Valkey URL: no '://' found in {shown!r}: write it as {_EXAMPLE}"
    near = difflib.get_close_matches(scheme, _PLAIN + _TLS, 1)
    hint = (
        f"did you mean {near[0]}://?"
        if near
        else f"use valkey://, valkeys:// (TLS) or unix://, as in {_EXAMPLE}"
    )
    return f"Valkey URL: unknown scheme {scheme!r}: {hint}"


def _credentials(authority: str) -> tuple[str | None, str | None]:
    if not authority:
        return None, None
    user, _, password = authority.partition(":")
    return urllib.parse.unquote(user) or None, urllib.parse.unquote(password) or None


def _socket_path(path: str) -> str:
    if not path.startswith("/"):
        raise MisconfiguredError(
            f"Valkey URL: socket path {path!r} is not absolute: write unix:///run/valkey.sock"
        )
    if not path.isprintable() or len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise MisconfiguredError(
            f"Valkey URL: socket path {path!r} is not printable or longer than {MAX_SOCKET_PATH_BYTES} "
            "bytes: choose a shorter one"
        )
    return path


def _address(text: str) -> Address:
    host, port_text = text, ""
    if text.startswith("["):
        host, _, port_text = text[1:].partition("]")
        port_text = port_text.removeprefix(":")
    elif ":" in text:
        host, _, port_text = text.rpartition(":")
    if not host:
        raise MisconfiguredError(f"Valkey URL: no host in {text!r}: write it as {_EXAMPLE}")
    _check_host(host, text)
    port = (
        int(port_text)
        if port_text.isascii() and port_text.isdigit()
        else DEFAULT_PORT
        if not port_text
        else 0
    )
    if not 1 <= port <= 65535:
        raise MisconfiguredError(
            f"Valkey URL: port {port_text!r} of host {host!r}: use a number from 1 to 65535"
        )
    return Address(host, port)


def _check_host(host: str, text: str) -> None:
    """Refuse what no resolver could find, in words that name the host."""
    if ":" in host or text.startswith("["):
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise MisconfiguredError(
                f"Valkey URL: {host!r} is not an IPv6 address: write it as valkey://[::1]:6379"
            ) from error
        if text.startswith("[") and "]" not in text:
            raise MisconfiguredError(f"Valkey URL: {text!r}: the ] is missing: write [{host}]")
        if not text.startswith(f"[{host}]"):
            raise MisconfiguredError(f"Valkey URL: {text!r}: an IPv6 address needs brackets: [{host}]")
    wrong = f"Valkey URL: {host!r} is not a host name: write it as {_EXAMPLE}"
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise MisconfiguredError(wrong) from error
    if not host.isprintable() or any(character in _NOT_IN_HOST for character in host):
        raise MisconfiguredError(wrong)


def _tls(query: str, *, wanted: bool) -> TlsFiles | None:
    values: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _PARAMETERS:
            raise MisconfiguredError(
                f"Valkey URL: unknown parameter {name!r}: known are {', '.join(_PARAMETERS)}"
            )
        if name in values:
            raise MisconfiguredError(f"Valkey URL: {name}= is given twice: give one")
        values[name] = value
    if values and not wanted:
        raise MisconfiguredError(f"Valkey URL: {next(iter(values))}= needs TLS: use the scheme valkeys://")
    if ("cert" in values) != ("key" in values):
        raise MisconfiguredError("Valkey URL: cert= and key= belong together: give both or neither")
    return TlsFiles(values.get("ca"), values.get("cert"), values.get("key")) if wanted else None
