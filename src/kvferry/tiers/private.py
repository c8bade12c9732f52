"""Directories that hold users' prompts: nobody else's, and open to nobody else."""

import os
import stat
from pathlib import Path

from kvferry.errors import MisconfiguredError


def make_private(directory: Path, *, of: str) -> None:
    """Make it if it is missing. Raises MisconfiguredError, one line, and OSError where it cannot be made.

    of: whose it is, for that line.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise MisconfiguredError(
            f"{of}: it is open to others or theirs, and will hold users' prompts; "
            f"chmod 700 {directory}, or name a directory that does not exist yet"
        )
