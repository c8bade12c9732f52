"""The files of a disk tier: one directory, one process, segments of equal size. All of it may block.

Where the file system has no O_DIRECT (tmpfs), reads and writes go through its cache, and one line says so.
OSErrors are the caller's to translate: only it knows what was under way.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvferry.errors import MisconfiguredError
from kvferry.tiers.disk.format import BLOCK_BYTES
from kvferry.tiers.private import make_private

log = logging.getLogger("kvferry.tiers.disk")

LOCK_NAME = "lock"
TRIAL_NAME = "trial"
_SEGMENT_NAME = re.compile(r"segment-([0-9]{4})")
_OURS = os.O_CLOEXEC | os.O_NOFOLLOW

Buffers = Sequence[memoryview]


def aligned_memory(nbytes: int) -> memoryview:
    """Zeroed memory that begins at a page. It goes when its last view does."""
    return memoryview(mmap.mmap(-1, nbytes))


class SegmentFiles:
    """Made by ``open``; used by the tier's threads, each read or write on memory of their own."""

    def __init__(self, directory: Path, lock: int) -> None:
        self.directory = directory
        self.direct = True
        self._lock = lock
        self._trial = -1
        self._files: dict[int, int] = {}

    @classmethod
    def open(cls, directory: Path) -> "SegmentFiles":
        """Make the directory if it is missing, and keep every other process out.

        Raises MisconfiguredError, one line: in use, open to others, or not writable.
        """
        try:
            make_private(directory, of=f"disk tier in {directory}")
        except OSError as error:
            raise MisconfiguredError(
                f"disk tier in {directory}: {error.strerror}; name a directory"
            ) from error
        with contextlib.ExitStack() as undo:
            try:
                lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | _OURS, 0o600)
                undo.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MisconfiguredError(
                    f"disk tier in {directory}: another process uses it; give each node its own"
                ) from error
            except OSError as error:
                raise MisconfiguredError(f"disk tier in {directory}: {error.strerror}") from error
            files = cls(directory, lock)
            undo.pop_all()
        try:
            files._open_trial()
        except OSError as error:
            files.close()
            raise MisconfiguredError(f"disk tier in {directory}: cannot write: {error.strerror}") from error
        return files

    def existing(self) -> dict[int, int]:
        """Numbers of the segments that are there, and their sizes in bytes. Raises OSError."""
        found: dict[int, int] = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _SEGMENT_NAME.fullmatch(entry.name)
                if match is not None and entry.is_file(follow_symlinks=False):
                    found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def first_block(self, number: int) -> bytes:
        """Of a segment that is there, as far as it can be read."""
        try:
            file = os.open(self._path(number), os.O_RDONLY | _OURS)
        except OSError:
            return b""
        try:
            return os.pread(file, BLOCK_BYTES, 0)
        except OSError:
            return b""
        finally:
            os.close(file)

    def attach(self, number: int) -> None:
        """Open a segment that is there. Raises OSError."""
        self._files[number] = self._open(self._path(number), os.O_RDWR)

    def allocate(self, number: int, nbytes: int) -> None:
        """Make a segment with all its bytes, or none. Raises OSError (ENOSPC)."""
        path = self._path(number)
        making = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OURS
        try:
            plain = os.open(path, making, 0o600)
        except FileExistsError:  # one that could not be removed before
            os.unlink(path)
            plain = os.open(path, making, 0o600)
        try:
            os.posix_fallocate(plain, 0, nbytes)
            self._files[number] = self._open(path, os.O_RDWR)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(plain)

    def detach(self, number: int) -> None:
        """Close it."""
        os.close(self._files.pop(number))

    def discard(self, number: int) -> None:
        """Remove a segment that is not open. Raises OSError."""
        os.unlink(self._path(number))

    def read(self, number: int, buffers: Buffers, offset: int) -> int:
        """Fill them, all aligned; returns how many bytes there were. Raises OSError."""
        return os.preadv(self._files[number], list(buffers), offset)

    def write(self, number: int, buffers: Buffers, offset: int) -> int:
        """Write them, all aligned; returns how many bytes that were. Raises OSError."""
        return os.pwritev(self._files[number], list(buffers), offset)

    def look(self) -> None:
        """OSError (ENOENT) if files that are open here were deleted, or the directory is not theirs any more.
        Reads and writes go on without them, and a restart would find nothing."""
        found, ours = os.stat(self.directory / LOCK_NAME, follow_symlinks=False), os.fstat(self._lock)
        files = [ours, *(os.fstat(file) for file in (self._trial, *self._files.values()) if file >= 0)]
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino) or not all(f.st_nlink for f in files):
            raise FileNotFoundError(errno.ENOENT, f"files of {self.directory} are gone")

    def try_out(self) -> None:
        """Write a block and read it back: raises OSError while the disk does not do that, or is not there."""
        self.look()
        block = aligned_memory(BLOCK_BYTES)
        if (
            os.pwritev(self._trial, [block], 0) != BLOCK_BYTES
            or os.preadv(self._trial, [block], 0) != BLOCK_BYTES
        ):
            raise OSError(errno.EIO, "a block could not be written and read back")

    def close(self) -> None:
        """Let another process in. No read or write may be under way."""
        for file in (*self._files.values(), self._trial, self._lock):
            if file >= 0:
                os.close(file)
        self._files.clear()
        self._trial = self._lock = -1

    def _open_trial(self) -> None:
        path = self.directory / TRIAL_NAME
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._trial = self._open(path, flags)
            self.try_out()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            log.warning(
                "%s has no O_DIRECT: reads and writes go through its cache and take more CPU", self.directory
            )
            if self._trial >= 0:
                os.close(self._trial)
                self._trial = -1  # should it not open again
            self._trial = self._open(path, flags)
            self.try_out()

    def _open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | _OURS | (os.O_DIRECT if self.direct else 0), 0o600)

    def _path(self, number: int) -> Path:
        return self.directory / f"segment-{number:04d}"
