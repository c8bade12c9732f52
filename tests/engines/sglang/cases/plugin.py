"""SGLang on a CPU: what is absent there is stood in for, before anything of it is imported.

- ``torchvision`` (no build matches the CPU torch): image code imports it and is never called here.
- the C++ helper that hashes pages is compiled at first use; here its few lines are Python.
- CUDA kernels are not imported by these classes where there is no GPU; copies between device and host
  memory, which are theirs, are done with torch (``rig.DeviceCopies``).
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest


class _Absent(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang  # first: transformers then knows that there is no torchvision

    sys.meta_path.append(_StandIn())
    from tests.engines.sglang.cases import rig

del sglang


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The process groups and the hash that SGLang's controller asks for."""
    with rig.one_rank():
        yield


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a case opened, last first."""
    with ExitStack() as opened:
        yield opened
