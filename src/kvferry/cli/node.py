"""``kvferry node``: run this host's node until it is told to stop."""

import argparse

from kvferry.cli.given import add_settings, given
from kvferry.config import NODE_SETTINGS, load_node_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting."""
    files = ("token_file", "tls_ca", "tls_cert", "tls_key")
    also = ["metrics_host", "valkey_quota", "valkey_write_rate"]
    also += [f"{whose}_{file}" for whose in ("keeper", "feed") for file in files]
    add_settings(parser, NODE_SETTINGS, also=also, ends="Ends on SIGTERM.")


def main(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    settings = load_node_settings(given(args, NODE_SETTINGS), config_path=args.config)
    from kvferry.node.node import run

    return run(settings)
