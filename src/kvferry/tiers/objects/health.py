"""Whether the store can be used: tried at start with every kind of request, and after failures with one."""

import asyncio
import os
import time

from kvferry.errors import MisconfiguredError
from kvferry.tiers.awaited import UnansweredError
from kvferry.tiers.objects.books import Books, log
from kvferry.tiers.objects.bucket import Bucket, BucketError, Trouble
from kvferry.tiers.objects.names import TRIALS, Kind, Name, new_id
from kvferry.tiers.objects.settings import ObjectSettings

_TRIAL = b"kvferry writes, lists, reads and deletes this when it starts\n"
_ADVICE = {
    Trouble.NO_BUCKET: "there is no such bucket: create it",
    Trouble.ABSENT: "what answers there knows no such bucket: check the endpoint (AWS_ENDPOINT_URL), or "
    "create the bucket",
    Trouble.SKEWED: "this machine's clock differs from the store's: set it",
    Trouble.SILENT: "no answer: check endpoint (AWS_ENDPOINT_URL) and network",
    Trouble.SLOW_DOWN: "the store asks for fewer requests: try again later",
    Trouble.FULL: "no room is left there",
}
_DENIED = (
    "access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; it must be allowed to list, read, "
    "write and delete"
)
_NOT_OURS = "access denied: this user must own the directory, or be allowed to write there"
_PASSES = frozenset(Trouble) - {Trouble.DENIED}
"""Of a directory: what may be otherwise later."""


class StoreClock:
    """Seconds since 1970 as the store counts them; this machine's clock may be set or wrong."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def set(self, modified_s: float, put_at: float) -> None:
        """An object that was put at that time (monotonic) has this time of change."""
        self._ahead_s = modified_s - put_at

    def now(self) -> float:
        """To a second or so."""
        return time.monotonic() + self._ahead_s


async def try_out(bucket: Bucket, clock: StoreClock, *, limit_s: float) -> None:
    """Write, list, read and delete one small object; set the clock by it. Raises BucketError."""
    name = Name(Kind.TRIAL, b"", new_id(0.0))
    put_at = time.monotonic()
    await bucket.put(name.path, _TRIAL, limit_s=limit_s)
    listed = [entry for entry in await bucket.list(f"{TRIALS}/", limit_s=limit_s) if entry.path == name.path]
    if not listed or bytes(await bucket.read(name.path, limit_s=limit_s)) != _TRIAL:
        raise BucketError(Trouble.BROKEN, "what was just written cannot be listed and read")
    clock.set(listed[0].modified_s, put_at)
    await bucket.delete([name.path], limit_s=limit_s)


async def recover(books: Books, bucket: Bucket) -> None:
    """While the breaker is open: ask until there is an answer. True to the breaker's own waits."""
    path = Name(Kind.TRIAL, b"", new_id(0.0)).path
    while True:
        with books.lock:
            due = books.breaker.next_probe_at()
        if due is None:
            return
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        try:
            await bucket.read(path, limit_s=books.settings.stall_s)
        except BucketError as error:
            if error.trouble is not Trouble.ABSENT:
                with books.lock:
                    books.last_error = str(error)
                    books.breaker.probe_failed(time.monotonic())
                continue
        with books.lock:
            books.breaker.succeeded()
            books.last_error = ""
        log.info("objects at %s are used again", books.settings.url)
        return


def misconfigured(settings: ObjectSettings, error: BucketError) -> MisconfiguredError:
    """What to tell a person when opening failed. UnansweredError for what may pass, or be mended there."""
    directory = settings.url.startswith("file:")
    advice = _ADVICE.get(error.trouble) or str(error)
    if error.trouble is Trouble.DENIED:
        advice = _NOT_OURS if directory else _denied(str(error))
    if error.trouble is Trouble.SILENT and not directory and not _has_keys(settings):
        advice += "; without AWS_ACCESS_KEY_ID this host's role is asked for first"
    kind = MisconfiguredError if directory and error.trouble not in _PASSES else UnansweredError
    return kind(f"objects at {settings.url}: {advice}")


def _has_keys(settings: ObjectSettings) -> bool:
    return settings.access_key is not None or "AWS_ACCESS_KEY_ID" in os.environ


def _denied(text: str) -> str:
    """With S3's own word for it, where there is one; or why there was nothing to be let in by."""
    if text.startswith("no credentials"):
        return text
    word = text.rpartition(" ")[2]
    return f"{_DENIED} ({word})" if word.isalnum() and not word.islower() else _DENIED
