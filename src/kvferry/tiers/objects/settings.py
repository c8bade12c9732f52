"""How the objects tier behaves: every limit in one place."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvferry.errors import MisconfiguredError

MIN_PACK_BYTES = 1 << 20
MAX_PACK_BYTES = 1 << 30
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,63}")


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """``docs/decisions/objects.md`` has the reasons.

    url: ``s3://BUCKET/PREFIX`` or ``file:///DIRECTORY``. Endpoint, region and keys come from the AWS_*
    variables, or the machine's role, where they are not given.
    pack_bytes: a pack is uploaded when it has so many; or when nothing was added to it for ``linger_s``, and
    at the latest after ten times that. max_bytes, max_age_s: beyond these the oldest packs are deleted; None:
    never. refresh_s: how often it is looked at what others stored and deleted.
    requests, uploads: at a time. read_bytes, write_bytes: memory of those. queued_items: waiting reads, and
    as many writes; more are refused. stall_s: a request that takes so much longer than a slow store would
    is given up. upload_s: how long a pack is tried. open_s: how long opening may take.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    pack_bytes: int = 32 << 20
    linger_s: float = 0.5
    max_bytes: int | None = None
    max_age_s: float | None = None
    refresh_s: float = 60.0
    requests: int = 16
    uploads: int = 4
    read_bytes: int = 256 << 20
    write_bytes: int = 256 << 20
    queued_items: int = 65536
    stall_s: float = 5.0
    upload_s: float = 120.0
    open_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tier's objects are. bucket: empty for a directory."""

    bucket: str
    prefix: str
    directory: Path | None = None


def parse_place(settings: ObjectSettings) -> Place:
    """MisconfiguredError, one line, for anything but the two kinds of URL, or a limit that cannot work."""
    url = settings.url
    if not MIN_PACK_BYTES <= settings.pack_bytes <= MAX_PACK_BYTES:
        raise MisconfiguredError(
            f"packs of {settings.pack_bytes} bytes: between {MIN_PACK_BYTES >> 20} and "
            f"{MAX_PACK_BYTES >> 20} MiB work"
        )
    if settings.write_bytes < 2 * settings.pack_bytes:
        raise MisconfiguredError(
            f"{settings.write_bytes} bytes of memory for packs: two of {settings.pack_bytes} must fit"
        )
    try:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise MisconfiguredError("objects: keys do not belong into the URL: set AWS_ACCESS_KEY_ID")
        if parts.query or parts.fragment:
            raise MisconfiguredError(f"objects at {url!r}: leave out what follows the path")
    except ValueError as error:
        raise MisconfiguredError(f"objects at {url!r}: {error}") from error
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and path.startswith("/") and path != "/":
        return Place("", "", Path(path))
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
        raise MisconfiguredError(f"objects at {url!r}: give s3://BUCKET/PREFIX or file:///DIRECTORY")
    segments = [segment for segment in path.split("/") if segment]
    for segment in segments:
        if not _SEGMENT.fullmatch(segment):
            raise MisconfiguredError(f"objects at {url!r}: {segment!r} is no name for a prefix")
    return Place(parts.netloc, "/".join(segments))
