"""Opening a file that a person named: at once, or not at all."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path | str) -> BinaryIO:
    """A regular file, to read from its beginning.

    Raises OSError, for anything else too: to open a pipe waits for its other end, and a device may never
    end or have effects of its own.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise
