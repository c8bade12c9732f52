"""Tasks that go on until they are ended."""

import asyncio
import contextlib


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancel it and wait until it is over; None: there is none."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
