"""The settings of a process as the flags of its verb, on one screen."""

import argparse
import textwrap
from collections.abc import Sequence

from kvferry.sources import Setting


class _OneLineEach(argparse.HelpFormatter):
    """So that all of them fit a screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """A flag is not broken in two at its hyphens."""
        return textwrap.fill(
            " ".join(text.split()),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )


def add_settings(
    parser: argparse.ArgumentParser, settings: Sequence[Setting], *, also: Sequence[str] = (), ends: str
) -> None:
    """One flag per setting; what is not given comes from the environment, the file or the default.

    also: names of those that the last lines name, without a word. ends: the end of those lines.
    """
    for setting in settings:
        if not setting.environment_only:
            told = setting.help.replace("%", "%%")  # argparse would take it for a format
            shown = argparse.SUPPRESS if setting.name in also else told
            if setting.many:
                parser.add_argument(
                    setting.flag, metavar=setting.metavar, help=shown, action="extend", nargs="+"
                )
            else:
                parser.add_argument(setting.flag, metavar=setting.metavar, help=shown)
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)
    parser.usage = argparse.SUPPRESS
    parser.formatter_class = _OneLineEach
    others = ["--config", *(setting.flag for setting in settings if setting.name in also)]
    secrets = [setting.variable for setting in settings if setting.environment_only]
    told = f"Secrets also from {', '.join(secrets)}. " if secrets else ""
    parser.epilog = f"Also {', '.join(others)} FILE. {told}{ends}"


def given(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[str, str | None]:
    """The flags by setting name."""
    found: dict[str, str | None] = {}
    for setting in settings:
        if not setting.environment_only:
            value = getattr(args, setting.name)
            found[setting.name] = ",".join(value) if isinstance(value, list) else value
    return found
