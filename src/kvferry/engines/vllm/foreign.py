"""What another connector beside this one puts into the engine's blocks."""


class ForeignLoads:
    """Says when nothing may be stored. steps_in_flight: how many are planned before the first one's result.

    A step whose forward pass loads for another connector may fail to. vLLM learns of it with that step's
    result; until then it takes those blocks for computed, and lets other requests use them. Asynchronous
    loads need no such care: vLLM runs a request only once its load has ended.
    """

    def __init__(self, *, steps_in_flight: int) -> None:
        self._steps_in_flight = steps_in_flight
        self._unsure = 0

    def may_store(self, *, loads: bool) -> bool:
        """Of a step that is being planned, once per step. loads: it loads for another connector."""
        if loads:
            self._unsure = self._steps_in_flight
        if not self._unsure:
            return True
        self._unsure -= 1
        return False
