"""How much memory this process may still take: the machine's, and its control group's."""

from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int | None:
    """The least of MemAvailable and the room in every control group above us; None when unknown.

    root: where proc/ and sys/ are found. File cache that the kernel would give up counts as available.
    """
    rooms = [_mem_available(root), *_group_rooms(root)]
    known = [room for room in rooms if room is not None]
    return min(known) if known else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[0] == name:
            return _number(words[1])
    return None


def _mem_available(root: Path) -> int | None:
    kib = _field(_read(root / "proc/meminfo"), "MemAvailable")
    return None if kib is None else kib * 1024


def _group_rooms(root: Path) -> list[int | None]:
    rooms: list[int | None] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        steps = [step for step in path.split("/") if step and step != ".."]
        groups = [base.joinpath(*steps[:depth]) for depth in range(len(steps) + 1)]
        rooms.extend(_room(group, *files) for group in groups)
    return rooms


def _room(group: Path, limit_file: str, usage_file: str) -> int | None:
    limit, usage = _number(_read(group / limit_file)), _number(_read(group / usage_file))
    if limit is None or usage is None:
        return None
    stat = _read(group / "memory.stat")
    cache = _field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0
    return max(0, limit - max(0, usage - cache))
