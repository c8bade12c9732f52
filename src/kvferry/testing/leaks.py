"""A pytest plugin: every test must leave the process, and the nodes it names, as it found them.

Load it with ``pytest_plugins = ["kvferry.testing.leaks"]`` in the topmost conftest.py.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvferry.testing.census import Census, left_since
from kvferry.testing.holdings import Watched, returns_everything

MAY_LEAK = "may_leak"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers", f"{MAY_LEAK}(reason): what stays in the process is not this test's doing"
    )


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, descriptor, child process or shared-memory file behind."""
    before = Census.now()
    yield
    if request.node.get_closest_marker(MAY_LEAK) is None and (leaked := left_since(before)):
        pytest.fail("left behind: " + ", ".join(leaked))


@pytest.fixture
def watch_node() -> Iterator[Callable[[Watched], None]]:
    """Call it with a node: when the test ends, the node must have back what it gave out since.

    Name it after the fixture that closes the node, so that the node still runs then.
    """
    with ExitStack() as watched:
        yield lambda node: watched.enter_context(returns_everything(node))
