"""Ties a command to its parent's life, then becomes that command: ``bound.py PARENT CORES COMMAND...``

Run by path with ``python -I -S``, so it costs little; imports nothing of ours. CORES is a comma-separated
list, or ``-`` for no pinning. A program of its own and not a hook between fork and exec, because such hooks
are unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel (Linux) for SIGTERM at the parent's death, pin, exec."""
    parent, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
