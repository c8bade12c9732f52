"""Where servers are and where to listen, as people write it: ``host[:port]``."""

import ipaddress
from typing import NamedTuple

from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count, parse_ip_address

_NOT_IN_HOST = " #?/\\[]<>\"'@,:"


class Address(NamedTuple):
    """A server: host and port, or the path of a Unix socket with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listening(text: str, *, port: int) -> Address:
    """``ADDRESS[:PORT]``, an IP address of this host; port 0 takes any. Raises MisconfiguredError.

    port: where none is written.
    """
    host, written = _split(text, port)
    if host.isascii() and host.isdecimal() and not written:
        raise MisconfiguredError(f"{text!r} is a port without an address; write it like 127.0.0.1:{host}")
    return Address(parse_ip_address(host), _port(written, port, lowest=0))


def parse_server(text: str, *, port: int, noun: str) -> Address:
    """``host[:port]`` of a server, which is called so. Raises MisconfiguredError."""
    host, written = _split(text, port)
    if ":" in host:
        host = parse_ip_address(host)
    elif not host or any(character in _NOT_IN_HOST for character in host):
        raise MisconfiguredError(f"{text!r} is no {noun}; write it like {noun}.internal:{port}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise MisconfiguredError(f"{host!r} is not a host name") from error
    return Address(host, _port(written, port, lowest=1))


def _split(text: str, port: int) -> tuple[str, str]:
    """Host and port, which may be empty; an IPv6 address with a port has brackets."""
    if text.startswith("["):
        host, closed, written = text[1:].partition("]")
        if not closed or (written and not written.startswith(":")):
            raise MisconfiguredError(f"{text!r} is no address; write it like [::1]:{port}")
        return host, written[1:]
    try:
        return str(ipaddress.IPv6Address(text)), ""
    except ValueError:
        host, _, written = text.partition(":")
        return host, written


def _port(text: str, default: int, *, lowest: int) -> int:
    return parse_count(text, lowest=lowest, highest=65535) if text else default
