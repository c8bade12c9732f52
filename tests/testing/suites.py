"""Runs one test of a contract suite over a subject, as pytest would, and says how it failed."""

import inspect
from typing import Any

import pytest


def failure(suite: type, test: str, **fixtures: Any) -> str:
    """The message of the failure, or nothing. fixtures: of which the test gets those it names."""
    method = getattr(suite(), test)
    wanted = {name: fixtures[name] for name in inspect.signature(method).parameters}
    try:
        method(**wanted)
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def names_of(suite: type) -> list[str]:
    """The names of a suite's tests."""
    return [name for name in dir(suite) if name.startswith("test_")]
