"""``kvferry router``: one OpenAI-compatible address for many workers, until it is told to stop."""

import argparse

from kvferry.cli.given import add_settings, given
from kvferry.errors import MisconfiguredError
from kvferry.router.settings import ROUTER_SETTINGS, load_router_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting."""
    add_settings(parser, ROUTER_SETTINGS, ends="Ends on SIGTERM, reads its settings anew on SIGHUP.")


def main(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    flags = given(args, ROUTER_SETTINGS)
    settings = load_router_settings(flags, config_path=args.config)
    try:
        from kvferry.router.app import run
    except ModuleNotFoundError as error:
        raise MisconfiguredError(
            f"kvferry router needs the package {error.name}: pip install 'kvferry[router]', "
            "or '.[router]' in a checkout"
        ) from error
    return run(settings, reload=lambda: load_router_settings(flags, config_path=args.config))
