"""Keepers for the verbs that ask them: of the arguments, of the environment, or those of this host's node."""

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.config import KEEPERS_SETTINGS, client_keepers

if TYPE_CHECKING:
    from kvferry.keeper.admin import Fleet

OTHERS = "Also --keeper-token-file, --keeper-tls-ca, --keeper-tls-cert, --keeper-tls-key FILE, as for a node."


def add_keeper_arguments(
    parser: argparse.ArgumentParser, *, text: str = "keepers to ask (default: those of the node)"
) -> None:
    """``--keepers`` and how to get in, as for a node."""
    for setting in KEEPERS_SETTINGS:
        if not setting.environment_only:
            named = setting.name == "keepers"
            shown = text if named else argparse.SUPPRESS
            parser.add_argument(setting.flag, metavar=setting.metavar, help=shown)


def keeper_flags(args: argparse.Namespace) -> dict[str, str | None]:
    """The arguments by setting name."""
    return {s.name: getattr(args, s.name) for s in KEEPERS_SETTINGS if not s.environment_only}


def keeper_addresses(status: Mapping[str, Any]) -> str:
    """As ``--keepers`` has them, from a node's status; empty for none."""
    keepers = status.get("keepers")
    found = keepers.get("keepers") if isinstance(keepers, dict) else None
    return ",".join(str(keeper["address"]) for keeper in found or ())


def are_named(args: argparse.Namespace, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the arguments or the environment say which they are."""
    return args.keepers is not None or "KVFERRY_KEEPERS" in environ


def fleet(args: argparse.Namespace, *, of_node: str = "") -> "Fleet | None":
    """Connected to; None where there are none. of_node: the node's, where nothing else is said.

    Raises MisconfiguredError, or the first one's error where none of them answers.
    """
    flags = keeper_flags(args)
    if not are_named(args):
        if not of_node:
            return None
        flags["keepers"] = of_node
    addresses, access = client_keepers(flags)
    if not addresses:
        return None
    from kvferry.keeper.admin import Fleet

    return Fleet(addresses, access=access)
