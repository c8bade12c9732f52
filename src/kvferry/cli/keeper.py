"""``kvferry keeper``: run a keeper on this storage host until it is told to stop."""

import argparse

from kvferry.cli.given import add_settings, given
from kvferry.keeper.settings import KEEPER_SETTINGS, load_keeper_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting."""
    add_settings(parser, KEEPER_SETTINGS, ends="Ends on SIGTERM.")


def main(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    settings = load_keeper_settings(given(args, KEEPER_SETTINGS), config_path=args.config)
    from kvferry.keeper.app import run

    return run(settings)
