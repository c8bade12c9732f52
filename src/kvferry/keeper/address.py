"""Where keepers are and how to get in, as people write it."""

import ipaddress

from kvferry.errors import MisconfiguredError
from kvferry.tiers.valkey.url import Address
from kvferry.values import parse_count, parse_ip_address, parse_text

DEFAULT_PORT = 9472
MAX_KEEPERS = 64
_NOT_IN_HOST = " #?/\\[]<>\"'@,:"


def parse_keepers(text: object) -> tuple[Address, ...]:
    """``host[:port],host[:port]``. Raises MisconfiguredError."""
    words = [word.strip() for word in parse_text(text).split(",")]
    if len(words) > MAX_KEEPERS:
        raise MisconfiguredError(f"{len(words)} keepers; give at most {MAX_KEEPERS}")
    return tuple(dict.fromkeys(_address(word) for word in words))


def parse_listen(text: object) -> Address:
    """``ADDRESS[:PORT]``, an IP address of this host; port 0 takes any. Raises MisconfiguredError."""
    host, port = _split(parse_text(text))
    return Address(parse_ip_address(host), _port(port, lowest=0))


def _address(word: str) -> Address:
    host, port = _split(word)
    if ":" in host:
        host = parse_ip_address(host)
    elif not host or any(character in _NOT_IN_HOST for character in host):
        raise MisconfiguredError(f"{word!r} is no keeper; write it like keeper.internal:{DEFAULT_PORT}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise MisconfiguredError(f"{host!r} is not a host name") from error
    return Address(host, _port(port, lowest=1))


def _split(text: str) -> tuple[str, str]:
    """Host and port, which may be empty; an IPv6 address with a port has brackets."""
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise MisconfiguredError(f"{text!r} is no address; write it like [::1]:{DEFAULT_PORT}")
        return host, port[1:]
    try:
        return str(ipaddress.IPv6Address(text)), ""
    except ValueError:
        host, _, port = text.partition(":")
        return host, port


def _port(text: str, *, lowest: int) -> int:
    return parse_count(text, lowest=lowest, highest=65535) if text else DEFAULT_PORT
