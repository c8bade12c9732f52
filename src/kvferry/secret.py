"""Secrets: from the environment or a file that others cannot reach, and never shown."""

import os
import re
import stat
from pathlib import Path

from kvferry.errors import MisconfiguredError
from kvferry.identity.regular import open_regular

MAX_SECRET_BYTES = 4096
NO_LINE = re.compile(r"[\r\n\0\ud800-\udfff]")


class Secret:
    """A text that neither ``repr`` nor ``str`` shows. ``reveal`` gives it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself. Keep it out of messages, logs and arguments of other programs."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)


def parse_secret(text: str) -> Secret:
    """A secret as the environment holds it. Raises MisconfiguredError without showing it."""
    if not 0 < len(os.fsencode(text)) <= MAX_SECRET_BYTES or NO_LINE.search(text):
        raise MisconfiguredError(
            f"the secret (not shown) is not one line of 1 to {MAX_SECRET_BYTES} bytes; unset it or correct it"
        )
    return Secret(text)


def read_secret(path: Path) -> Secret:
    """The first line of a small file that only its owner, and perhaps a group, can read.

    Raises MisconfiguredError without showing any of it.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_SECRET_BYTES + 1).decode()
    except OSError as error:
        raise MisconfiguredError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MisconfiguredError(f"{path} is not UTF-8 text") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise MisconfiguredError(f"{path} holds a secret and is open to others: chmod 600 {path}")
    first = text.split("\n", 1)[0].rstrip("\r")
    if not first or len(text) > MAX_SECRET_BYTES:
        raise MisconfiguredError(f"{path} holds no secret of 1 to {MAX_SECRET_BYTES} bytes in its first line")
    return Secret(first)
