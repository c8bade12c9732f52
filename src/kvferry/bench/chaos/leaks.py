"""What is left when nothing is under way: anything beyond the state before the faults is a leak."""

import os
import time
from collections.abc import Callable
from typing import Any

from kvferry.bench.chaos.processes import Census, NodeProcess
from kvferry.client.admin import AdminClient
from kvferry.errors import KvferryError

SPARE_DESCRIPTORS = 9  # a node's three connections to a server that was no primary at first, three times
SPARE_THREADS = 9
SPARE_ANONYMOUS_KB = 32 << 10
POLL_S = 0.1

Tick = Callable[[], None]


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


def held(status: dict[str, Any]) -> list[str]:
    """What an idle node should not hold, in words."""
    catalogue = status["catalogue"]
    engines = status["engines"]
    found = {
        "loads": status["loads"],
        "fetches": status["fetches"],
        "parts on their way to Valkey": status["writeback_backlog_parts"],
        "pins": catalogue["pins"],
        "pinned bytes": catalogue["pinned_bytes"],
        "reserved slots": catalogue["filling_parts"],
        "slots of removed parts": catalogue["unlinked_parts"],
        "overdue reservations": status["overdue_reservations"],
        "loads of engines": sum(engine["loads"] for engine in engines),
        "reservations of engines": sum(engine["reservations"] for engine in engines),
        "defects": status["defects"],
    }
    return [f"{number} {what}" for what, number in found.items() if number]


def at_rest(node: NodeProcess, *, within_s: float, tick: Tick) -> list[str]:
    """Wait until the idle node holds nothing; what it still holds when time is up."""
    give_up = time.monotonic() + within_s
    while True:
        status = node.status()
        left = ["no answer to status"] if status is None else held(status)
        if not left or time.monotonic() > give_up:
            return [f"{node.name}: {what}" for what in left]
        tick()
        time.sleep(POLL_S)


def unaccounted(node: NodeProcess) -> list[str]:
    """After forgetting every part, no slot may be in use."""
    try:
        admin = AdminClient(node.socket)
        try:
            admin.drop("memory")
            catalogue = admin.status()["catalogue"]
        finally:
            admin.close()
    except KvferryError as error:
        return [f"{node.name}: {error}"]
    if catalogue["used_bytes"] or catalogue["ready_parts"]:
        return [
            f"{node.name}: {catalogue['used_bytes']} bytes of slots in use by {catalogue['ready_parts']} "
            "parts after all were dropped"
        ]
    return []


def beyond(name: str, before: Census | None, now: Census | None) -> list[str]:
    """What a process holds beyond what it, or the one before it under that name, held earlier at rest."""
    if now is None or before is None:
        return [f"{name}: does not run"]
    found: list[str] = []
    for what, spare in (
        ("descriptors", SPARE_DESCRIPTORS),
        ("threads", SPARE_THREADS),
        ("anonymous_kb", SPARE_ANONYMOUS_KB),
        ("children", 0),
    ):
        was, has = getattr(before, what), getattr(now, what)
        if has > was + spare:
            found.append(f"{name}: {has} {what}, {was} before the faults")
    return found
