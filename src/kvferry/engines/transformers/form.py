"""What a model computes besides its weights and its configuration: its modules, and what is set on them.

A constant of a layer (an epsilon, a scale, whether attention is causal) is read from the configuration when
the model is made, and from the layer when it runs; in between it can be set to something else.
"""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

# Of a module's attributes, what says where it came from or how it was made, not what it computes.
_UNIMPORTANT = ("name_or_path",)
MAX_ITEMS = 256  # of a list or tuple; longer ones are no constants
MAX_DEPTH = 4


def form_of(model: Any) -> str:
    """A digest, in hex: the classes of all modules, and the constants and callables set on them.

    Constants are int, float, bool, str, None, and tuples and lists of them; callables go by their qualified
    names. Names that begin with an underscore are left out: torch and transformers keep notes there.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {_qualified(type(module))}\n".encode())
        for line in sorted(_attributes(module)):
            digest.update(f"  {line}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _attributes(module: Any) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.startswith("_") or name in _UNIMPORTANT:
            continue
        text = _text(value, MAX_DEPTH)
        if text is not None:
            yield f"{name} {text}"


def _text(value: Any, depth: int) -> str | None:
    """None for what is no constant and no callable."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        if depth == 0 or len(value) > MAX_ITEMS:
            return None
        texts = [_text(item, depth - 1) for item in value]
        return None if None in texts else f"{type(value).__name__} {texts}"
    return _called(value) if callable(value) else None


def _called(value: Any) -> str:
    if isinstance(value, functools.partial):
        bound = [*value.args, *(item for pair in sorted(value.keywords.items()) for item in pair)]
        return f"partial {_called(value.func)} {[_text(item, 1) for item in bound]}"
    return f"callable {_qualified(value if hasattr(value, '__qualname__') else type(value))}"


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
