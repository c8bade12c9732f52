"""A cheap digest of a local model (or adapter) directory, for when its revision is not known.

Reads configuration files and tensor headers whole and one page of each tensor, so two checkpoints that
differ in a config value, a tensor's name, shape, type or size, or in the values of a sampled page get
different digests. File names count, paths and times do not: equal copies on two hosts are equal.
A change confined to bytes between the samples is not seen; training changes whole tensors.
``docs/spec/identity.md`` is the specification.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from kvferry.errors import MisconfiguredError

FORMAT_VERSION = 1
FINGERPRINT_BYTES = 32
PAGE_BYTES = 4096
MAX_PAGES = 8192  # per model: a mixture of experts may have 100,000 tensors
OPAQUE_EDGE_BYTES = 1 << 20
OPAQUE_PAGES = 256  # per file
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
MAX_CONFIG_BYTES = 64 << 20
MAX_FILES = 4096

CONFIG_NAMES = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "hf_quant_config.json",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "quant_config.json",
        "quantize_config.json",
        "video_preprocessor_config.json",
    }
)
MAIN_CONFIG_NAMES = ("config.json", "params.json", "adapter_config.json")
TENSOR_SUFFIX = ".safetensors"
OPAQUE_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
INDEX_SUFFIX = ".index.json"

_PERSON = b"kvferry-weights"
_REVISION_PERSON = b"kvferry-revision"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HINT = "give the weights' revision instead"


def revision_fingerprint(model: str, revision: str) -> bytes:
    """32 bytes for a model known by name and full commit hash (40 or 64 hexadecimal digits).

    MisconfiguredError for a branch or tag: it may move.
    """
    if not model or not model.isprintable() or not _COMMIT.fullmatch(revision):
        raise MisconfiguredError(
            f"revision {revision!r} of model {model!r} does not fix the weights: use the full commit hash"
        )
    digest = _new_digest(_REVISION_PERSON)
    _update_sized(digest, model.encode("utf-8"))
    _update_sized(digest, revision.encode("ascii"))
    return digest.digest()


def model_fingerprint(model_dir: Path | str) -> bytes:
    """32 bytes for the model or adapter in ``model_dir``.

    MisconfiguredError where the weights cannot be determined: no such directory, no configuration, no
    weight files, a shard that an index names but that is missing, a malformed or unreadable file.
    """
    root = Path(model_dir)
    try:
        names = _file_names(root)
        digest = _new_digest(_PERSON)
        for name in sorted(names.configs):
            _update_sized(digest, b"config")
            _update_sized(digest, name.encode("utf-8"))
            _update_sized(digest, _read_whole(root / name))
        _update_weights(digest, root, sorted(names.weights))
    except OSError as error:
        raise MisconfiguredError(
            f"model directory {root}: {error.filename or ''}: {error.strerror}: {_HINT}"
        ) from error
    except UnicodeEncodeError as error:
        raise MisconfiguredError(f"model directory {root}: a file name is not Unicode: {_HINT}") from error
    return digest.digest()


class _Names:
    """The files of a directory that count, by what is read of them."""

    def __init__(self) -> None:
        self.configs: set[str] = set()
        self.weights: set[str] = set()


def _file_names(root: Path) -> _Names:
    found = _Names()
    indexes: list[str] = []
    with os.scandir(root) as entries:
        files = [entry.name for entry in entries if entry.is_file()]
    for name in files:
        if name.endswith(INDEX_SUFFIX):
            indexes.append(name)
            found.configs.add(name)
        elif name in CONFIG_NAMES or name.endswith(
            ".py"
        ):  # code shipped with a model decides what it computes
            found.configs.add(name)
        elif name.endswith((TENSOR_SUFFIX, *OPAQUE_SUFFIXES)):
            found.weights.add(name)
    gguf = any(name.endswith(".gguf") for name in found.weights)  # holds its own configuration
    if not gguf and not any(name in found.configs for name in MAIN_CONFIG_NAMES):
        raise MisconfiguredError(f"model directory {root} has no config.json: {_HINT}")
    for name in indexes:
        for shard in _shards_of(root / name):
            if not (root / shard).is_file():
                raise MisconfiguredError(f"{root / name} names {shard}, which is missing: download it again")
            found.weights.add(shard)
    if not found.weights:
        raise MisconfiguredError(f"model directory {root} has no weight files: {_HINT}")
    if len(found.weights) + len(found.configs) > MAX_FILES:
        raise MisconfiguredError(f"model directory {root} has more than {MAX_FILES} files: {_HINT}")
    return found


def _shards_of(index: Path) -> set[str]:
    try:
        parsed = json.loads(_read_whole(index))
        shards = set(parsed["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MisconfiguredError(f"{index} is not an index of weight files: {_HINT}") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise MisconfiguredError(f"{index} names {shard!r}: not a file in its directory")
    return shards


def _new_digest(person: bytes) -> "hashlib.blake2b":
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=person)
    digest.update(struct.pack("<I", FORMAT_VERSION))
    return digest


def _update_sized(digest: "hashlib.blake2b", content: bytes) -> None:
    digest.update(struct.pack("<Q", len(content)))
    digest.update(content)


def _read_whole(path: Path) -> bytes:
    with open(path, "rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise MisconfiguredError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: not a configuration file")
    return content


def _update_weights(digest: "hashlib.blake2b", root: Path, names: list[str]) -> None:
    """Names, sizes and headers of all weight files, then the sampled pages of tensors."""
    pages: list[tuple[str, int, int]] = []  # file, offset, bytes: the middle page of each tensor
    for name in names:
        with open(root / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _update_sized(digest, b"weights")
            _update_sized(digest, name.encode("utf-8"))
            digest.update(struct.pack("<Q", size))
            if name.endswith(TENSOR_SUFFIX):
                header = _safetensors_header(file, size, root / name)
                _update_sized(digest, header)
                for start, nbytes in _tensor_extents(header, size, root / name):
                    page = min(PAGE_BYTES, nbytes)
                    pages.append((name, start + (nbytes - page) // 2, page))
            else:
                for start, nbytes in _opaque_extents(size):
                    _update_page(digest, file, start, nbytes, root / name)
    step = -(-len(pages) // MAX_PAGES) or 1
    digest.update(struct.pack("<QQ", len(pages), step))
    for name, sampled in groupby(pages[::step], key=lambda page: page[0]):
        with open(root / name, "rb") as file:
            for _, start, nbytes in sampled:
                _update_page(digest, file, start, nbytes, root / name)


def _update_page(digest: "hashlib.blake2b", file: BinaryIO, start: int, nbytes: int, path: Path) -> None:
    content = os.pread(file.fileno(), nbytes, start)
    if len(content) != nbytes:
        raise MisconfiguredError(f"{path} ends before byte {start + nbytes}: download it again")
    _update_sized(digest, content)


def _safetensors_header(file: BinaryIO, size: int, path: Path) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise MisconfiguredError(f"{path} is not a whole safetensors file: download it again")
    header = file.read(length)
    if len(header) != length:
        raise MisconfiguredError(f"{path} ends inside its header: download it again")
    return header


def _tensor_extents(header: bytes, size: int, path: Path) -> list[tuple[int, int]]:
    """Where each tensor's bytes lie in the file, (start, bytes), in file order; empty tensors left out."""
    data = 8 + len(header)
    extents: list[tuple[int, int]] = []
    try:
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                if not 0 <= begin <= end <= size - data:
                    raise ValueError(f"tensor {name} lies at {begin}..{end}")
                if end > begin:
                    extents.append((data + begin, end - begin))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MisconfiguredError(f"{path} has a malformed header: download it again") from error
    return sorted(extents)


def _opaque_extents(size: int) -> Iterator[tuple[int, int]]:
    """What is read of a file whose tensors are not located: both ends, and pages evenly between.

    The ends hold the metadata of GGUF, and of PyTorch archives the directory with each tensor's CRC.
    """
    if size <= 2 * OPAQUE_EDGE_BYTES + OPAQUE_PAGES * PAGE_BYTES:
        yield 0, size
        return
    yield 0, OPAQUE_EDGE_BYTES
    between = size - 2 * OPAQUE_EDGE_BYTES
    for index in range(OPAQUE_PAGES):
        yield OPAQUE_EDGE_BYTES + between * index // OPAQUE_PAGES, PAGE_BYTES
    yield size - OPAQUE_EDGE_BYTES, OPAQUE_EDGE_BYTES
