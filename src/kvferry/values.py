"""What a person types, as a value: counts, names and paths, refused in words that show what was typed."""

import grp
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import MisconfiguredError

MAX_DOMAIN_CHARACTERS = 200
MAX_SOCKET_PATH_BYTES = 107  # of Linux, without the closing zero

MAX_GROUP = (1 << 32) - 2
_OVERFLOW_GROUP = Path("/proc/sys/kernel/overflowgid")

MAX_AGE_S = 1e9
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])")
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_COUNT = re.compile(r"[+-]?[0-9]{1,18}")
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)")
_MAX_DIGITS = 30  # of a number that is shown in full, and far beyond any bound


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; ``ca`` None means the system's authorities; cert and key for mutual TLS."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return [name for name in (self.ca, self.cert, self.key) if name is not None]


def parse_count(text: str | int, *, lowest: int, highest: int) -> int:
    """A whole number within bounds. Raises MisconfiguredError."""
    if isinstance(text, str):
        match = _WHOLE.fullmatch(text.strip())
        if match is None:
            raise MisconfiguredError(f"{text!r} is not a whole number; give one from {lowest} to {highest}")
        sign, digits = match.groups()
        if len(digits) > _MAX_DIGITS:
            raise MisconfiguredError(
                f"{sign}{digits[:6]}..., of {len(digits)} digits, is outside {lowest} to {highest}"
            )
        number = int(sign + digits)
    else:
        number = text
    if not lowest <= number <= highest:
        raise MisconfiguredError(f"{number} is outside {lowest} to {highest}")
    return number


def parse_whole(value: object, *, lowest: int, highest: int) -> int:
    """A whole number within bounds, written as one and not as a text. Raises MisconfiguredError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise MisconfiguredError(f"{value!r} is not a whole number; give one from {lowest} to {highest}")
    return parse_count(value, lowest=lowest, highest=highest)


def parse_age(text: object) -> float:
    """Seconds from ``90s``, ``15m``, ``12h``, ``30d``. Raises MisconfiguredError, also without a unit."""
    match = _AGE.fullmatch(text.strip()) if isinstance(text, str) else None
    seconds = float(match[1]) * _AGE_UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_AGE_S:
        raise MisconfiguredError(f"{text!r} is no age; write it like 12h or 30d")
    return seconds


def parse_text(text: object) -> str:
    """One line of printable text that is not empty. Raises MisconfiguredError."""
    if not isinstance(text, str):
        raise MisconfiguredError(f"{text!r} is not a text; put it between quotes")
    if not text or not text.isprintable():
        raise MisconfiguredError(f"{text!r} is not a line of printable text; leave it out for the default")
    return text


def parse_domain(text: object) -> str:
    """The name of a trust domain. Raises MisconfiguredError."""
    name = parse_text(text)
    if len(name) > MAX_DOMAIN_CHARACTERS:
        raise MisconfiguredError(
            f"{name[:20]!r}... has {len(name)} characters; give at most {MAX_DOMAIN_CHARACTERS}"
        )
    return name


def parse_path(text: object) -> Path:
    """A path, with the ``~`` of a user that exists. Raises MisconfiguredError."""
    try:
        return Path(parse_text(text)).expanduser()
    except RuntimeError as error:
        raise MisconfiguredError(f"{text!r} names a home directory that is not known") from error


def parse_socket_path(text: object) -> Path:
    """Where a node listens, whether it does or not. Raises MisconfiguredError."""
    path = parse_path(text)
    if not path.name:
        raise MisconfiguredError(f"{text!r} is a directory; name a file in it, like {path / 'node.sock'}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise MisconfiguredError(
            f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        )
    return path


def parse_ip_address(text: object) -> str:
    """An IPv4 or IPv6 address to listen at. Raises MisconfiguredError."""
    try:
        return str(ipaddress.ip_address(parse_text(text)))
    except ValueError as error:
        raise MisconfiguredError(f"{text!r} is no IP address; write it like 127.0.0.1 or 0.0.0.0") from error


def parse_group_name(text: object) -> str:
    """A group's name, or its number as text, wherever that group may be. Raises MisconfiguredError."""
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    name = parse_text(text)
    if _COUNT.fullmatch(name):
        parse_count(name, lowest=0, highest=MAX_GROUP)
    return name


def parse_group(text: object) -> int:
    """The number of a group, given so or by its name on this host. Raises MisconfiguredError.

    The group that the kernel shows in place of those of other user namespaces would admit strangers.
    """
    name = parse_group_name(text)
    try:
        number = int(name) if _COUNT.fullmatch(name) else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise MisconfiguredError(
            f"{name!r} is no group of this host; create it, or give the group's number"
        ) from error
    try:
        overflow = int(_OVERFLOW_GROUP.read_text())
    except (OSError, ValueError):
        overflow = 65534
    if number == overflow:
        raise MisconfiguredError(
            f"group {name} is what the kernel shows for groups it cannot name here; choose another one"
        )
    return number
