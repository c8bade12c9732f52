"""Runs one test over a subject, as pytest would, and says how it failed."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def failure_of(test: Callable[..., None], **fixtures: Any) -> str:
    """The message of the failure, or nothing. fixtures: of which the test gets those it names."""
    wanted = {name: fixtures[name] for name in inspect.signature(test).parameters}
    try:
        test(**wanted)
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failure(suite: type, test: str, **fixtures: Any) -> str:
    """The same for a test of a contract suite."""
    return failure_of(getattr(suite(), test), **fixtures)


def names_of(suite: type) -> list[str]:
    """The names of a suite's tests."""
    return [name for name in dir(suite) if name.startswith("test_")]
