"""The requests of a bucket, or of a directory, through obstore; its errors become ours here, once.

Each request has a limit and is dropped at it: the connection is closed, nothing of it goes on.
"""

import asyncio
import contextlib
import enum
import os
import re
import tempfile
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.tiers.objects.reasons import lacks_credentials, reason
from kvferry.tiers.objects.settings import ObjectSettings, Place, parse_place
from kvferry.tiers.private import make_private

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_T = TypeVar("_T")
CONNECT_S = 5.0
LEFT_S = 3600.0
"""No write takes so long: what is older was left behind."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_SPACE = re.compile(r"No space left|StorageFull|QuotaExceeded|Disk quota")
_LIST_CHUNK = 1000
_PANIC = "RustPanic"  # of a defect inside obstore; its class cannot be imported


class Trouble(enum.Enum):
    """Why a request failed; each is a counter's label."""

    ABSENT = "absent"  # no such object
    NO_BUCKET = "no_bucket"
    DENIED = "denied"
    SKEWED = "clock_skew"
    SLOW_DOWN = "slow_down"  # 429, 503
    FULL = "full"
    SHORT = "short"  # the object ends before what was asked for
    SILENT = "no_answer"  # none within its limit
    BROKEN = "broken"  # connection lost, server error, anything else


_OF_CODE = {
    "NoSuchBucket": Trouble.NO_BUCKET,
    "NoSuchKey": Trouble.ABSENT,
    "RequestTimeTooSkewed": Trouble.SKEWED,
    "SlowDown": Trouble.SLOW_DOWN,
    "ServiceUnavailable": Trouble.SLOW_DOWN,
    "InvalidRange": Trouble.SHORT,
    "QuotaExceeded": Trouble.FULL,
}
_OF_STATUS = {
    401: Trouble.DENIED,
    403: Trouble.DENIED,
    404: Trouble.ABSENT,
    416: Trouble.SHORT,
    429: Trouble.SLOW_DOWN,
    503: Trouble.SLOW_DOWN,
    507: Trouble.FULL,
}


class BucketError(KvferryError):
    """A request that failed. trouble: why. The text is one line and names no secret."""

    def __init__(self, trouble: Trouble, text: str) -> None:
        super().__init__(text)
        self.trouble = trouble


class Listed(NamedTuple):
    """modified_s: seconds since 1970 by the store's clock."""

    path: str
    nbytes: int
    modified_s: float


class Bucket(Protocol):
    """Paths are below the tier's prefix. limit_s: after which a request fails as SILENT. BucketError."""

    async def get(self, path: str, start: int, nbytes: int, *, limit_s: float) -> memoryview:
        """So many bytes from there on; exactly."""
        ...

    async def read(self, path: str, *, limit_s: float) -> memoryview:
        """The whole object."""
        ...

    async def put(self, path: str, data: bytes | memoryview, *, limit_s: float) -> None:
        """All or nothing, over what is there. ``data`` may be looked at after a failure too."""

    async def list(self, prefix: str, *, limit_s: float) -> list[Listed]:
        """Everything below a path that ends with a slash."""
        ...

    async def delete(self, paths: Sequence[str], *, limit_s: float) -> None:
        """Also of what is not there."""

    def close(self) -> None:
        """Close connections. Nothing is asked afterwards."""


class ObstoreBucket:
    """A ``Bucket``."""

    def __init__(self, store: "ObjectStore") -> None:
        self._store = store

    async def get(self, path: str, start: int, nbytes: int, *, limit_s: float) -> memoryview:
        """See Bucket."""
        found = await _within(self._store.get_range_async(path, start=start, length=nbytes), limit_s)
        if len(found) != nbytes:
            raise BucketError(Trouble.SHORT, f"{path}: {len(found)} bytes instead of {nbytes}")
        return memoryview(found)

    async def read(self, path: str, *, limit_s: float) -> memoryview:
        """See Bucket."""

        async def whole() -> Any:
            return await (await self._store.get_async(path)).bytes_async()

        return memoryview(await _within(whole(), limit_s))

    async def put(self, path: str, data: bytes | memoryview, *, limit_s: float) -> None:
        """See Bucket. In one request: what an upload in pieces leaves behind is paid for and not listed."""
        await _within(self._store.put_async(path, data, use_multipart=False), limit_s)

    async def list(self, prefix: str, *, limit_s: float) -> list[Listed]:
        """See Bucket."""
        stream = self._store.list(prefix, chunk_size=_LIST_CHUNK)
        found = await _within(stream.collect_async(), limit_s)
        return [Listed(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in found]

    async def delete(self, paths: Sequence[str], *, limit_s: float) -> None:
        """See Bucket."""
        try:
            await _within(self._store.delete_async(list(paths)), limit_s)
        except BucketError as error:
            if error.trouble is not Trouble.ABSENT:
                raise

    def close(self) -> None:
        """See Bucket. obstore has no other way than to be let go."""
        del self._store


def open_bucket(settings: ObjectSettings) -> Bucket:
    """Nothing is sent yet. Raises MisconfiguredError, one line."""
    place = parse_place(settings)
    try:
        import obstore.store
    except ImportError as error:
        raise MisconfiguredError("objects need obstore: pip install 'kvferry[objects]'") from error
    try:
        return ObstoreBucket(_open(obstore.store, settings, place))
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise MisconfiguredError(f"objects at {settings.url}: {one_line(error)}") from error


def _open(stores: Any, settings: ObjectSettings, place: Place) -> "ObjectStore":
    if place.directory is not None:
        make_private(place.directory, of=f"objects at {settings.url}")
        store = stores.LocalStore(place.directory, mkdir=True, automatic_cleanup=True)
        _sweep(place.directory)
        return store
    _check_endpoint(settings)
    given = {
        "endpoint": settings.endpoint,
        "region": settings.region,
        "access_key_id": settings.access_key,
        "secret_access_key": settings.secret_key,
    }
    return stores.S3Store(
        place.bucket,
        prefix=place.prefix or None,
        config={name: value for name, value in given.items() if value is not None},
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(days=1),  # each request has its own
        },
        retry_config={"max_retries": 0},
    )


def _check_endpoint(settings: ObjectSettings) -> None:
    """What obstore would only find when it sends something, and then by a panic."""
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    for endpoint in (settings.endpoint, *(os.environ.get(name) for name in variables)):
        parts = urlsplit(endpoint or "https://none")
        if parts.scheme not in ("http", "https") or not parts.hostname or " " in parts.netloc:
            raise ValueError(f"endpoint {endpoint!r} is no URL like https://HOST:PORT")


def _sweep(directory: Path) -> None:
    """Delete what writes of a killed process left: obstore writes a file beside and renames it."""
    with tempfile.NamedTemporaryFile(dir=directory) as now:
        horizon = os.fstat(now.fileno()).st_mtime - LEFT_S
    for left in directory.glob("v1/*/*/*#*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < horizon:
                left.unlink()


async def _within(work: Awaitable[_T], limit_s: float) -> _T:
    """Foreign tracebacks are left out: whoever kept one would keep the store, and its connections, open."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as error:
        raise BucketError(Trouble.SILENT, f"no answer within {limit_s:.1f} s") from error
    except FileNotFoundError as error:
        trouble = _trouble(str(error), Trouble.ABSENT)
        raise BucketError(trouble, one_line(error)) from error.with_traceback(None)
    except Exception as error:
        import obstore.exceptions

        panicked = type(error).__name__ == _PANIC
        if not panicked and not isinstance(error, obstore.exceptions.BaseError | OSError | ValueError):
            raise
        otherwise = Trouble.BROKEN
        if isinstance(error, obstore.exceptions.PermissionDeniedError | PermissionError):
            otherwise = Trouble.DENIED
        raise BucketError(_trouble(str(error), otherwise), one_line(error)) from error.with_traceback(None)
    finally:
        del work


def _trouble(text: str, otherwise: Trouble) -> Trouble:
    """What S3 said: its code, or else the status of its answer. DENIED where nothing could be shown to it."""
    if lacks_credentials(text):
        return Trouble.DENIED
    code, status = _CODE.search(text), _STATUS.search(text)
    if code is not None and code[1] in _OF_CODE:
        return _OF_CODE[code[1]]
    if status is not None and int(status[1]) in _OF_STATUS:
        return _OF_STATUS[int(status[1])]
    return Trouble.FULL if _NO_SPACE.search(text) else otherwise


def one_line(error: Exception) -> str:
    """What is worth telling of an error of obstore, whose text goes on for pages."""
    text = str(error)
    if known := reason(text):
        return known
    code = _CODE.search(text)
    first = text.partition("<?xml")[0].partition("\n")[0].strip()[:200]
    clean = "".join(c if c.isprintable() else "?" for c in first)
    return f"{clean} {code[1]}" if code is not None else clean
