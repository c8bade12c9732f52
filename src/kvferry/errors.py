"""The errors kvferry raises, grouped by what the caller should do about them.

Foreign exceptions (sockets, servers, files) are translated into one of these once, at the edge where
they arise, and chained. A message says what was wrong, names the value, and says what to do.
"""


class KvferryError(Exception):
    """Base of every error kvferry raises on purpose."""


class RetryError(KvferryError):
    """A passing condition: the same call may succeed later (busy, timed out, failing over)."""


class RefusedError(KvferryError):
    """The other side understood the request and declined it; repeating it unchanged is pointless."""


class CorruptError(KvferryError):
    """Bytes are not what their header or their checksum says. They must not be used."""


class ClosedError(KvferryError):
    """The object was closed, or its peer is gone. Open a new one."""


class BrokenError(KvferryError):
    """A rule inside kvferry was violated (double release, unknown lease). This is a defect."""


class MisconfiguredError(KvferryError):
    """A setting, argument or environment is wrong. One line: what, the value, what to do."""
