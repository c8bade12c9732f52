"""Times as traces and logs write them."""

import datetime as dt
import math

from kvferry.traces.request import MalformedError

# Seconds since 1970 or since the start stay far below the last; finer units of today lie above it.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def seconds(value: object) -> float | None:
    """From a number (seconds, or since 1970 in ms, us or ns) or an ISO date. Raises MalformedError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise MalformedError("the time is neither a number nor a date")
    try:
        number = float(value)
    except ValueError:
        return _date(str(value))
    except OverflowError as error:
        raise MalformedError("the time is out of bounds") from error
    if not math.isfinite(number):
        raise MalformedError("the time is not finite")
    return number / next((unit for above, unit in _UNITS if abs(number) >= above), 1.0)


def _date(text: str) -> float:
    try:
        moment = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise MalformedError("the time is neither a number nor a date") from error
    try:
        return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
    except OverflowError as error:
        raise MalformedError("the time is out of bounds") from error
