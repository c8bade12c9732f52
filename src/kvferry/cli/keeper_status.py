"""``kvferry status --keepers``: what keepers hold and do."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from kvferry.cli.address import rendered
from kvferry.cli.keepers import keeper_flags
from kvferry.cli.table import causes, clip, compact, count, duration, labelled, table
from kvferry.config import client_keepers, format_size
from kvferry.errors import KvferryError
from kvferry.keeper.rendezvous import complaint, namesakes

if TYPE_CHECKING:
    from kvferry.addresses import Address
    from kvferry.keeper.access import KeeperAccess

_NAME_COLUMNS = 30
_MAX_PEERS = 16
EXIT_FAILED = 1


def render(status: dict[str, Any]) -> str:
    """The status document as text for people, every number with its unit."""
    keeper: dict[str, Any] = status["keeper"]
    stages: dict[str, Any] = keeper["stages"]
    lines = [
        labelled(
            "keeper",
            f"{status['name']} at {status['address']}, kvferry {status['version']}, pid {status['pid']}, "
            f"up {duration(status['uptime_s'])}",
        ),
        "",
        _tiers(keeper, status.get("troubles", [])),
        "",
        labelled(
            "stages",
            f"{count(stages['requests'])} requests wait for {count(stages['parts'])} parts; "
            f"of {count(sum(stages['outcomes'].values()))} parts asked for: {causes(stages['outcomes'])}",
        ),
        *_copies("disk", keeper["keep"]),
        *_copies("objects", keeper["flush"]),
        *_scan(keeper["scan"]),
        labelled(
            "buffer", f"{format_size(keeper['buffer_bytes'])} of {format_size(keeper['buffer_limit_bytes'])}"
        ),
    ]
    if status["keepers"]:
        lines.append(labelled("shared", f"with {', '.join(status['keepers'])}"))
    defects = keeper["defects"] + status["server"]["defects"]
    if defects:
        lines.append(labelled("defects", f"{count(defects)} (see the keeper's log, and please report them)"))
    return "\n".join([*lines, "", *_peers(status["server"])])


def _tiers(keeper: dict[str, Any], troubles: list[dict[str, Any]]) -> str:
    staged = keeper["stages"]["staged_bytes"]
    words = {trouble["tier"]: trouble["word"] for trouble in reversed(troubles)}
    rows = [
        [
            tier["name"],
            words.get(tier["name"], tier["state"]),
            _holds(tier["detail"]),
            format_size(staged.get(tier["name"], 0)),
            format_size(tier["fetched_bytes"]),
            format_size(tier["stored_bytes"]),
            compact(sum(tier["failed"].values())),
        ]
        for tier in keeper["tiers"]
    ]
    lines = [table(["TIER", "STATE", "HOLDS", "STAGED", "READ", "WRITTEN", "FAILURES"], rows)]
    lines += [
        labelled(
            one["tier"], f"{one['word']} since {one['since']} ({duration(one['seconds'])}): {one['reason']}"
        )
        for one in troubles
    ]
    lines += [
        labelled(tier["name"], f"failures: {causes(tier['failed'])}")
        for tier in keeper["tiers"]
        if any(tier["failed"].values())
    ]
    return "\n".join(lines)


def _holds(detail: dict[str, str]) -> str:
    """Of a tier that knows it."""
    parts = detail.get("parts", "")
    return f"{compact(int(parts))} parts" if parts.isdecimal() else "-"


def _copies(tier: str, line: dict[str, Any] | None) -> list[str]:
    """To one tier: what waits, what was copied, and what was not."""
    if line is None:
        return []
    text = f"to {tier}: {count(line['copied_parts'])} parts copied, {format_size(line['copied_bytes'])}; "
    if line["parts"]:
        text += (
            f"{count(line['parts'])} wait, {format_size(line['nbytes'])}, the oldest for "
            f"{duration(line['oldest_s'])}"
        )
    else:
        text += "none wait"
    lost = {
        "left Valkey before": line["gone_parts"],
        "backlog full": line["dropped_parts"],
        **line["failed"],
    }
    if any(lost.values()):
        text += f"; not copied: {causes(lost)}"
    return [labelled("copies", text + ("; paused" if line["paused"] else ""))]


def _scan(scan: dict[str, Any] | None) -> list[str]:
    if scan is None:
        return []
    passes = "1 pass" if scan["passes"] == 1 else f"{count(scan['passes'])} passes"
    text = f"{passes}, {count(scan['found_parts'])} parts found that nobody told of"
    return [labelled("scan", text + (f"; {scan['error']}" if scan["error"] else ""))]


def _peers(server: dict[str, Any]) -> list[str]:
    nodes = [peer for peer in server["peers"] if peer["role"] == "node"]
    rows = [
        [clip(peer["node"] or "-", _NAME_COLUMNS), peer["address"], peer["version"], count(peer["asked"])]
        for peer in nodes[:_MAX_PEERS]
    ]
    lines = [table(["NODE", "ADDRESS", "VERSION", "ASKS"], rows)] if rows else ["no node is connected"]
    if len(nodes) > _MAX_PEERS:
        lines.append(f"and {count(len(nodes) - _MAX_PEERS)} more (--json)")
    if any(server["refused"].values()):
        lines.append(labelled("refused", causes(server["refused"])))
    return lines


def main(args: argparse.Namespace) -> int:
    """Ask each of them and print. 1 where one does not answer."""
    addresses, access = client_keepers(keeper_flags(args))
    documents: list[dict[str, Any]] = []
    names: list[tuple[str, str]] = []
    errors: list[str] = []
    for address in addresses:
        try:
            documents.append(_ask(address, access))
        except KvferryError as error:
            errors.append(str(error))
        else:
            names.append((str(documents[-1].get("name")), str(address)))
    errors += [complaint(name, at) for name, at in namesakes(names).items()]
    if args.json:
        print(json.dumps({"keepers": documents, "errors": errors}, indent=2))
    else:
        texts = [rendered(render, document, version=str(document["version"])) for document in documents]
        texts += [labelled("keepers", error) for error in errors]
        print("\n\n".join(texts))
    return EXIT_FAILED if errors else 0


def _ask(address: "Address", access: "KeeperAccess") -> dict[str, Any]:
    from kvferry.keeper.admin import KeeperAdmin

    with KeeperAdmin(address, access=access) as admin:
        return {"version": admin.version, **admin.status()}
