"""Where keepers are, as people write it."""

from kvferry.addresses import Address, parse_listening, parse_server
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_text

DEFAULT_PORT = 9472
MAX_KEEPERS = 64


def parse_keepers(text: object) -> tuple[Address, ...]:
    """``host[:port],host[:port]``. Raises MisconfiguredError."""
    words = [word.strip() for word in parse_text(text).split(",")]
    if len(words) > MAX_KEEPERS:
        raise MisconfiguredError(f"{len(words)} keepers; give at most {MAX_KEEPERS}")
    return tuple(dict.fromkeys(parse_server(word, port=DEFAULT_PORT, noun="keeper") for word in words))


def parse_listen(text: object) -> Address:
    """``ADDRESS[:PORT]``, an IP address of this host; port 0 takes any. Raises MisconfiguredError."""
    return parse_listening(parse_text(text), port=DEFAULT_PORT)
