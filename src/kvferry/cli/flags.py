"""``kvferry flags``: what to add to an engine's command, and the ACL user to give to a node at Valkey."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kvferry.config import default_socket_path
from kvferry.engines.settings import DEFAULT_DOMAIN
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count, parse_domain, parse_group_name, parse_path, parse_socket_path

CONNECTOR = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
BACKEND = {
    "backend_name": "kvferry",
    "module_path": "kvferry.engines.sglang.backend",
    "class_name": "KvferryStorage",
    "interface_v1": 1,
}
HICACHE = "--page-size 64 --enable-hierarchical-cache --hicache-mem-layout page_first"
VALKEY_USER = "kvferry"
KEEPER_USER = "kvferry-keeper"
_ENGINES = ("socket", "deadline_cap_ms", "token_file", "group")
_ONLY = {  # what some targets alone can be told
    "vllm": (*_ENGINES, "chunk_tokens", "block_size"),
    "sglang": _ENGINES,
    "valkey": ("user", "keeper"),
}
_USER = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything optional: what is not given stays at its default and out of the flag."""
    parser.add_argument(
        "target", choices=["vllm", "sglang", "valkey"], help="the engine or the server to configure"
    )
    parser.add_argument("--socket", metavar="PATH", help="the node's socket, when it is not the default one")
    parser.add_argument(
        "--chunk-tokens",
        metavar="N",
        help="tokens per stored chunk, a multiple of --block-size",
    )
    parser.add_argument(
        "--block-size", metavar="N", help="the engine's block size, to check --chunk-tokens against"
    )
    parser.add_argument("--deadline-cap-ms", metavar="MS", help="longest a load may take")
    parser.add_argument("--domain", metavar="NAME", help="trust domain; others cannot read its KV")
    parser.add_argument("--domain-key-file", metavar="PATH", help="file with the domain's 32-byte key")
    parser.add_argument("--token-file", metavar="PATH", help="file with the token that the node asks for")
    parser.add_argument("--group", metavar="GROUP", help="name or number of the group that the node serves")
    parser.add_argument("--user", metavar="NAME", help=f"valkey: the user's name (default {VALKEY_USER})")
    parser.add_argument(
        "--keeper", action="store_true", default=None, help=f"valkey: for a keeper (default {KEEPER_USER})"
    )
    parser.add_argument("--json", action="store_true", help="the value alone, as JSON")


def transfer_config(args: argparse.Namespace) -> dict[str, object]:
    """The value of ``--kv-transfer-config``, with only what differs from the defaults."""
    extra: dict[str, object] = {}
    block = 16 if args.block_size is None else _count("--block-size", args.block_size, 1, 1 << 16)
    if args.chunk_tokens is not None:
        extra["chunk_tokens"] = _chunk_tokens(args.chunk_tokens, block)
    if args.deadline_cap_ms is not None:
        extra["deadline_cap_ms"] = _deadline_ms(args)
    extra |= _common(args)
    return {**CONNECTOR, **({"kv_connector_extra_config": extra} if extra else {})}


def backend_config(args: argparse.Namespace) -> dict[str, object]:
    """The value of SGLang's ``--hicache-storage-backend-extra-config``, likewise."""
    extra: dict[str, object] = {}
    if args.deadline_cap_ms is not None:
        extra["deadline_ms"] = _deadline_ms(args)
    return {**BACKEND, **extra, **_common(args)}


def _deadline_ms(args: argparse.Namespace) -> int:
    return _count("--deadline-cap-ms", args.deadline_cap_ms, 10, 600_000)


def _common(args: argparse.Namespace) -> dict[str, object]:
    """What every engine is told in the same words."""
    found: dict[str, object] = {}
    socket = _checked("--socket", args.socket, _absolute_socket)
    if socket is not None and socket != str(default_socket_path()):
        found["socket"] = socket
    texts = {
        "domain": _checked("--domain", args.domain, parse_domain),
        "domain_key_file": _checked("--domain-key-file", args.domain_key_file, _absolute),
        "token_file": _checked("--token-file", args.token_file, _absolute),
        "group": _checked("--group", args.group, parse_group_name),
    }
    return found | {name: text for name, text in texts.items() if text is not None}


def _absolute(text: str) -> Path:
    """The engine starts in a directory of its own. Raises MisconfiguredError."""
    try:
        return parse_path(text).absolute()
    except OSError as error:
        raise MisconfiguredError(f"{text!r}: this directory is gone; give an absolute path") from error


def _absolute_socket(text: str) -> Path:
    """Likewise; what counts is the length of the whole. Raises MisconfiguredError."""
    parse_socket_path(text)
    return parse_socket_path(str(_absolute(text)))


def _checked(flag: str, text: str | None, parse: Callable[[str], object]) -> str | None:
    """What was given, if it can be one. Whether a file is there is for the engine's host to say."""
    if text is None:
        return None
    try:
        return str(parse(text))
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


def _count(flag: str, text: str, lowest: int, highest: int) -> int:
    try:
        return parse_count(text, lowest=lowest, highest=highest)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


def _chunk_tokens(text: str, block: int) -> int:
    chunk = _count("--chunk-tokens", text, 1, 1 << 20)
    if chunk % block:
        nearest = max(block, round(chunk / block) * block)
        raise MisconfiguredError(
            f"--chunk-tokens {chunk} is not a multiple of the engine's block size {block}; {nearest} is"
        )
    return chunk


def valkey_user(args: argparse.Namespace) -> str:
    """The ``ACL SETUSER`` line for a domain's nodes, or its keepers. Its password is a placeholder."""
    from kvferry.identity.domain import DomainKey, domain_tag
    from kvferry.tiers.valkey.acl import COMMANDS, KEEPER_COMMANDS, setuser

    usual, commands = (KEEPER_USER, KEEPER_COMMANDS) if args.keeper else (VALKEY_USER, COMMANDS)
    user: str = usual if args.user is None else args.user
    if not _USER.fullmatch(user):
        raise MisconfiguredError(f"--user {user!r}: give 1 to 64 letters, digits or any of _ . @ -")
    domain = _checked("--domain", args.domain, parse_domain) or DEFAULT_DOMAIN
    key = DomainKey.load(domain, key_file=_checked("--domain-key-file", args.domain_key_file, parse_path))
    if key.is_default:
        print(f"note: {domain!r} is used without a key: its tag follows from its name", file=sys.stderr)
    return setuser(user, domain_tag(domain, key.key_id), commands=commands)


def main(args: argparse.Namespace) -> int:
    """Print the flag or the line on standard output, ready to paste."""
    for name in sorted({name for names in _ONLY.values() for name in names} - {*_ONLY[args.target]}):
        if getattr(args, name) is not None:
            raise MisconfiguredError(
                f"--{name.replace('_', '-')} is not for {args.target}; see kvferry flags --help"
            )
    if args.target == "valkey":
        line = valkey_user(args)
        print(json.dumps(line) if args.json else line)
        return 0
    if args.target == "vllm":
        flag, found = "--kv-transfer-config", transfer_config(args)
    else:
        found = backend_config(args)
        flag = f"{HICACHE} --hicache-storage-backend dynamic --hicache-storage-backend-extra-config"
    value = json.dumps(found, separators=(",", ":"))
    print(value if args.json else f"{flag} {shlex.quote(value)}")
    return 0
