"""``kvferry node``: run this host's node until it is told to stop."""

import argparse

from kvferry.config import NODE_SETTINGS, load_node_settings


class _OneLineEach(argparse.HelpFormatter):
    """So that all of them fit a screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; what is not given comes from the environment, the file or the default."""
    for setting in NODE_SETTINGS:
        if not setting.environment_only:
            parser.add_argument(setting.flag, metavar=setting.metavar, help=setting.help)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names")
    parser.usage = "kvferry node [options]"
    parser.formatter_class = _OneLineEach
    parser.epilog = "Secrets also from KVFERRY_VALKEY_PASSWORD and KVFERRY_TOKEN. Ends on SIGTERM."


def main(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    flags = {s.name: getattr(args, s.name) for s in NODE_SETTINGS if not s.environment_only}
    settings = load_node_settings(flags, config_path=args.config)
    from kvferry.node.node import run

    return run(settings)
