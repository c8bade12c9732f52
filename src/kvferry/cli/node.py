"""``kvferry node``: run this host's node until it is told to stop."""

import argparse

from kvferry.config import NODE_SETTINGS, load_node_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; what is not given comes from the environment, the file or the default."""
    for setting in NODE_SETTINGS:
        if not setting.environment_only:
            parser.add_argument(setting.flag, metavar=setting.metavar, help=setting.help)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names")
    parser.epilog = (
        "Valkey's password: KVFERRY_VALKEY_PASSWORD or --valkey-password-file. The token: KVFERRY_TOKEN or "
        "--token-file. Ends on SIGTERM or Ctrl-C."
    )


def main(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    flags = {s.name: getattr(args, s.name) for s in NODE_SETTINGS if not s.environment_only}
    settings = load_node_settings(flags, config_path=args.config)
    from kvferry.node.node import run

    return run(settings)
