"""Equal checkpoints have equal fingerprints wherever they lie; what cannot be determined is refused."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.identity.golden import write_model

from kvferry.errors import MisconfiguredError
from kvferry.identity import weights
from kvferry.identity.weights import model_fingerprint, revision_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with one safetensors file and one opaque weight file."""
    root = tmp_path / "model"
    root.mkdir()
    write_model(root)
    return root


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _edit_tensor_in_sampled_page(root: Path) -> None:
    path = root / "model.safetensors"
    _flip(path, _data_start(path) + 5000)  # tensor a: 10000 bytes, its page is 2952..7048


def _edit_last_tensor(root: Path) -> None:
    _flip(root / "model.safetensors", -1)  # tensor b, 3 bytes, is sampled whole


def _rename_tensor(root: Path) -> None:
    path = root / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"'))


CHANGES: dict[str, Callable[[Path], object]] = {
    "config value": lambda root: (root / "config.json").write_text('{"model_type": "llamb"}'),
    "sampled page": _edit_tensor_in_sampled_page,
    "small tensor": _edit_last_tensor,
    "tensor name": _rename_tensor,
    "size": lambda root: os.truncate(root / "extra.bin", (4 << 20) - 1),
    "opaque head": lambda root: _flip(root / "extra.bin", 0),
    "opaque tail": lambda root: _flip(root / "extra.bin", -1),
    "opaque page": lambda root: _flip(root / "extra.bin", (1 << 20) + 100),
    "file name": lambda root: (root / "extra.bin").rename(root / "other.bin"),
    "more weights": lambda root: (root / "more.pt").write_bytes(b"x"),
    "quantisation": lambda root: (root / "hf_quant_config.json").write_text("{}"),
    "code": lambda root: (root / "modeling.py").write_text("x = 1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_fingerprint(model: Path, change: str) -> None:
    before = model_fingerprint(model)
    CHANGES[change](model)
    assert model_fingerprint(model) != before


def test_place_times_links_and_unrelated_files_do_not_count(model: Path, tmp_path: Path) -> None:
    before = model_fingerprint(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("words")
    os.utime(model / "config.json", (1, 1))
    assert model_fingerprint(str(model)) == before
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert model_fingerprint(linked) == before
    assert len(before) == 32


def test_with_more_tensors_than_pages_the_sample_stays_bounded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_fingerprint(model)
    monkeypatch.setattr(weights, "MAX_PAGES", 1)
    bounded = model_fingerprint(model)
    assert bounded != before
    _edit_last_tensor(model)
    assert model_fingerprint(model) == bounded  # tensor b is no longer sampled
    _edit_tensor_in_sampled_page(model)
    assert model_fingerprint(model) != bounded


def _sharded(model: Path, shard: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))


def test_shards_in_subdirectories_are_found_by_the_index(model: Path) -> None:
    (model / "shards").mkdir()
    shutil.copy(model / "model.safetensors", model / "shards" / "1.safetensors")
    _sharded(model, "shards/1.safetensors")
    before = model_fingerprint(model)
    _edit = model / "shards" / "1.safetensors"
    _flip(_edit, -1)
    assert model_fingerprint(model) != before


def test_an_adapter_directory_has_a_fingerprint_too(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(model / "model.safetensors", adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    before = model_fingerprint(adapter)
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    assert model_fingerprint(adapter) != before


def _safetensors(header: object, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


REFUSED: dict[str, Callable[[Path], object]] = {
    "no such directory": shutil.rmtree,
    "no configuration": lambda root: (root / "config.json").unlink(),
    "no weights": lambda root: [(root / name).unlink() for name in ("model.safetensors", "extra.bin")],
    "missing shard": lambda root: _sharded(root, "model-00002.safetensors"),
    "absolute shard": lambda root: _sharded(root, str(root / "model.safetensors")),
    "shard outside": lambda root: _sharded(root, "../model/model.safetensors"),
    "index is no index": lambda root: (root / "x.index.json").write_text("[]"),
    "index is no JSON": lambda root: (root / "x.index.json").write_text("{"),
    "truncated": lambda root: os.truncate(root / "model.safetensors", 9000),
    "cut in its header": lambda root: os.truncate(root / "model.safetensors", 50),
    "empty": lambda root: os.truncate(root / "model.safetensors", 0),
    "no extents": lambda root: (root / "model.safetensors").write_bytes(_safetensors({"a": {}})),
    "extents past the end": lambda root: (root / "model.safetensors").write_bytes(
        _safetensors({"a": {"data_offsets": [0, 9]}}, b"12345678")
    ),
    "header is a list": lambda root: (root / "model.safetensors").write_bytes(_safetensors([1])),
    "a directory in a file's place": lambda root: (
        (root / "config.json").unlink(),
        (root / "config.json").mkdir(),
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_weights_that_cannot_be_determined_are_refused(model: Path, damage: str) -> None:
    REFUSED[damage](model)
    with pytest.raises(MisconfiguredError, match="model"):
        model_fingerprint(model)


def test_a_commit_fixes_the_weights_and_a_branch_does_not() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert revision_fingerprint("org/a", commit) != revision_fingerprint("org/b", commit)
    assert revision_fingerprint("org/a", commit) != revision_fingerprint("org/a", commit[::-1])
    for revision in ("main", "", commit[:12], commit.upper()):
        with pytest.raises(MisconfiguredError, match="full commit hash"):
            revision_fingerprint("org/a", revision)
