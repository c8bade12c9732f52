"""The model is converted once, whole or not at all."""

import sys
from pathlib import Path

import pytest

from kvferry.demo import model
from kvferry.errors import MisconfiguredError, RetryError

CONVERTER = """\
import sys
from pathlib import Path
into = Path(sys.argv[2])
for name in {names!r}:
    (into / name).write_text("x")
sys.exit({code})
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model, "packaged_gguf", lambda: gguf)
    return tmp_path


def _converter(monkeypatch: pytest.MonkeyPatch, folder: Path, *, names: list[str], code: int = 0) -> Path:
    script = folder / "converter.py"
    script.write_text(CONVERTER.format(names=names, code=code))
    wrapper = folder / "python"
    wrapper.write_text(
        f'#!/bin/sh\necho ran >> {folder}/runs\nshift 2\nexec {sys.executable} {script} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setattr(model, "converter_command", lambda: [str(wrapper), "-m", "converter"])
    return folder / "runs"


def test_a_second_call_finds_what_the_first_converted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    runs = _converter(monkeypatch, cache, names=names)
    first = model.demo_model(chosen=None, say=lambda _: None)
    second = model.demo_model(chosen=None, say=lambda _: None)
    assert first == second
    assert model.is_model(first)
    assert runs.read_text() == "ran\n"
    assert [path.name for path in first.parent.iterdir() if path.name.startswith(".conv")] == []


@pytest.mark.parametrize(
    ("names", "code"),
    [(["config.json"], 0), (["config.json", "model.safetensors", "tokenizer.json"], 3)],
)
def test_a_failed_conversion_leaves_no_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], code: int
) -> None:
    _converter(monkeypatch, cache, names=names, code=code)
    with pytest.raises(RetryError):
        model.demo_model(chosen=None, say=lambda _: None)
    models = model.cache_home() / "models"
    assert [path for path in models.iterdir() if path.name != ".lock"] == []


def test_a_directory_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="--model"):
        model.demo_model(chosen=tmp_path, say=lambda _: None)
