"""Which LMCache this adapter was written for."""

from kvferry.errors import MisconfiguredError

SUPPORTED_FROM = (0, 5)
SUPPORTED_BELOW = (0, 6)
SUPPORTED_TEXT = ">=0.5.6,<0.6"


def engine_format(found: str) -> str:
    """The part of LMCache's version that may change what an object's bytes mean.

    Raises MisconfiguredError outside the supported range.
    """
    try:
        release = tuple(int(part) for part in found.partition("+")[0].split(".")[:2])
    except ValueError:
        release = ()
    if not SUPPORTED_FROM <= release < SUPPORTED_BELOW:
        raise MisconfiguredError(
            f"LMCache {found} is outside the range this kvferry supports ({SUPPORTED_TEXT}): "
            "install a supported LMCache or another kvferry"
        )
    return ".".join(map(str, release))
