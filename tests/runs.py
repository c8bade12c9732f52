"""How much a test that can always do more does: little in ``./test``, much in ``./test long``."""

import os

VARIABLE = "KVFERRY_TEST_RUNS"


def runs(few: int) -> int:
    """``few`` in an everyday run; that many times more as the environment says."""
    return few * int(os.environ.get(VARIABLE, "1"))
