"""Ties a command to its parent's life, then becomes that command: ``bound.py PARENT CORES COMMAND...``

Run by path with ``python -I -S``, so it costs little; imports nothing of ours. CORES is a comma-separated
list, or ``-`` for no pinning. A program of its own and not a hook between fork and exec, because such hooks
are unsafe in a process with threads.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
GRACE_MS = 2000  # nobody waits for what the command would save


def main(arguments: list[str]) -> None:
    """Ask the kernel (Linux) for SIGTERM at the parent's death, leave a guard, pin, exec."""
    parent, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)
        _leave_guard(os.pidfd_open(parent), os.getpid())
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


def _leave_guard(parent: int, command: int) -> None:
    """An engine that is still starting does not end on SIGTERM: a process of its session sees to it.

    Of a group of its own: whoever stops the command's whole group (SIGSTOP) does not stop it.
    """
    if os.getpgrp() != command:
        return
    if os.fork() == 0:
        if os.fork() == 0:  # twice, so that the command has no child that it does not know
            os.setpgid(0, 0)
            _guard(parent, command)
        os._exit(0)
    os.wait()
    os.close(parent)


def _guard(parent: int, command_id: int) -> None:
    """Ends with the command. When the parent (a pidfd) dies first, ends the command's group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        command = os.pidfd_open(command_id)
    except OSError:
        return  # ended already
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(command, select.POLLIN)
    if command in {descriptor for descriptor, _ in poll.poll()}:
        return
    poll.unregister(parent)
    os.killpg(command_id, signal.SIGTERM)
    os.killpg(command_id, signal.SIGCONT)
    poll.poll(GRACE_MS)
    os.killpg(command_id, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
