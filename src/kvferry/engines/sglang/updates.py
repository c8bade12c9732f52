"""Whether this engine's weights were changed while it runs.

SGLang tells its storage nothing of that, and the names of pages do not change with it. So one method of its
weight updater, through which every kind of update goes, is made to note that it was called.
"""

import functools
import threading
from typing import Any

from kvferry.errors import MisconfiguredError

_METHOD = "_select_runners"
_changed = threading.Event()
_watching = threading.Lock()


def watch() -> threading.Event:
    """Set from the first live update on. Raises MisconfiguredError where that cannot be seen."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    with _watching:
        original = getattr(SchedulerWeightUpdaterManager, _METHOD, None)
        if original is None:
            raise MisconfiguredError(
                "this release of SGLang hides live updates of weights, which make stored pages wrong"
            )
        if not hasattr(original, "__wrapped__"):

            @functools.wraps(original)
            def noted(*args: Any, **kwargs: Any) -> Any:
                _changed.set()
                return original(*args, **kwargs)

            setattr(SchedulerWeightUpdaterManager, _METHOD, noted)
    return _changed
