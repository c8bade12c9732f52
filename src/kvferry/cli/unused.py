"""Options that a command would not look at are refused: whoever gave one expects that it does something."""

import argparse
from collections.abc import Sequence

from kvferry.config import KEEPERS_SETTINGS, default_socket_path
from kvferry.errors import MisconfiguredError

KEEPER_FLAGS = tuple(setting.flag for setting in KEEPERS_SETTINGS if not setting.environment_only)
NODE_FLAGS = ("--socket", "--group")


def refuse(args: argparse.Namespace, flags: Sequence[str], *, why: str) -> None:
    """Raises MisconfiguredError for the first of these that was given. why: the rest of the line."""
    for flag in flags:
        if _is_given(args, flag):
            raise MisconfiguredError(f"{flag} {why}")


def _is_given(args: argparse.Namespace, flag: str) -> bool:
    value = getattr(args, flag.removeprefix("--").replace("-", "_"))
    usual = str(default_socket_path()) if flag == "--socket" else None
    return value is not None and value != usual
