"""Fixtures of engine tests."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, last first."""
    with ExitStack() as opened:
        yield opened
