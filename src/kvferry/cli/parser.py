"""argparse, with mistakes in one line."""

import argparse
from typing import NoReturn

from kvferry.errors import MisconfiguredError


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the nearest argument that exists."""

    def error(self, message: str) -> NoReturn:
        words = message.rsplit(" ", 1)
        if message.startswith("unrecognized arguments: --"):
            from kvferry.sources import suggestion

            wrong = message.split()[2].partition("=")[0]
            options = [name for action in self._actions for name in action.option_strings]
            message = f"unknown argument {wrong}; {suggestion(wrong, options)}"
        elif len(words) == 2 and "usage" not in message:
            message = f"{message}; see {self.prog} --help"
        raise MisconfiguredError(message)
