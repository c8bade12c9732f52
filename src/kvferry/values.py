"""What a person types, as a value: counts, names and paths, refused in words that show what was typed."""

import os
import re
from pathlib import Path

from kvferry.errors import MisconfiguredError

MAX_DOMAIN_CHARACTERS = 200
MAX_SOCKET_PATH_BYTES = 107  # of Linux, without the closing zero

_COUNT = re.compile(r"[+-]?[0-9]{1,18}")


def parse_count(text: str | int, *, lowest: int, highest: int) -> int:
    """A whole number within bounds. Raises MisconfiguredError."""
    if isinstance(text, str) and not _COUNT.fullmatch(text.strip()):
        raise MisconfiguredError(f"{text!r} is not a whole number; give one from {lowest} to {highest}")
    number = int(text)
    if not lowest <= number <= highest:
        raise MisconfiguredError(f"{number} is outside {lowest} to {highest}")
    return number


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
