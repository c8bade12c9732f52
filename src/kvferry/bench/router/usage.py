"""Processor time and memory of a process and all it started."""

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_s(group: int) -> float:
    """Seconds that the living processes of a group have used, all their threads, ended ones too."""
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in _stats(group))
    return ticks * _TICK_S


def resident_bytes(group: int) -> int:
    """Memory in use by the group's processes; shared pages count for each."""
    return sum(int(stat[21]) for stat in _stats(group)) * _PAGE


def _stats(group: int) -> list[list[str]]:
    """Fields of proc(5) after the name: state, ppid, pgrp, ..."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group:
            found.append(fields)
    return found
