"""What the contract suites say when a property does not hold, in words of the property.

Not plain asserts: pytest explains those in a user's own files only.
"""

import time
from collections.abc import Callable

WAIT_S = 60.0
"""How long a suite waits for what must come."""


def expect(condition: object, message: str) -> None:
    """AssertionError with ``message`` unless ``condition``."""
    if not condition:
        raise AssertionError(message)


def equal(found: object, wanted: object, what: str) -> None:
    """AssertionError that shows both unless they are equal."""
    expect(found == wanted, f"{what}: {found!r} instead of {wanted!r}")


def eventually(happened: Callable[[], object], what: str) -> None:
    """Wait for what happens in the background. AssertionError when it does not."""
    give_up = time.monotonic() + WAIT_S
    while not happened():
        expect(time.monotonic() < give_up, f"never happened in {WAIT_S} s: {what}")
        time.sleep(0.01)
