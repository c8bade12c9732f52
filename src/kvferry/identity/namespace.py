"""The namespace: everything that must be equal for stored bytes to be interchangeable.

A specification is written in one canonical encoding and hashed, behind its domain's tag. Fields are
encoded by name, so every field of the dataclasses enters, a new one included. ``docs/spec/identity.md``
specifies it.
"""

import dataclasses
import enum
import hashlib
import math
import struct
from dataclasses import dataclass

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.domain import KEY_ID_BYTES, domain_tag
from kvferry.identity.geometry import Geometry
from kvferry.identity.names import DOMAIN_TAG_BYTES, NAMESPACE_BYTES

ENCODING_VERSION = 1
WEIGHTS_BYTES = 32
MAX_TEXT_BYTES = 64 << 10
MAX_U64 = (1 << 64) - 1
UNSCALED_DTYPES = frozenset({"bfloat16", "float16", "float32"})

_PERSON = b"kvferry-ns"


@dataclass(frozen=True, slots=True)
class KvScale:
    """One quantisation scale, or one per head: ``name`` is the layer and which of k, v (``"3.k"``)."""

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Make 1 and 1.0 the same value, as they are the same scale."""
        object.__setattr__(self, "values", tuple(map(float, self.values)))


@dataclass(frozen=True, slots=True)
class Setting:
    """Anything else that changes KV bytes: a rope override, a draft model, a context-dependent scaling."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """What the bytes of a part depend on, apart from the tokens and what a request adds to them.

    domain, domain_key_id: the trust domain's name and the public id of its key (``DomainKey.key_id``).
    model: a name that is equal on every host (a hub id, an architecture), never a path.
    weights: 32 bytes, ``weights.model_fingerprint`` or ``weights.revision_fingerprint``.
    weights_generation: 0, then one more for each live update of the weights.
    compute_dtype: what the model computes in ("bfloat16"); kv_dtype: what KV is stored in ("fp8_e4m3").
    kv_scales: the values of the KV quantisation scales; required for quantised KV.
    engine, engine_format: the engine ("vllm") and the version of its KV format ("0.32").
    layout: attention backend and tensor layout of a block. packing: how elements are packed inside it,
        where that depends on the machine (CPU instruction set), else "none".
    geometry: groups, blocks, chunk and shards.
    settings: everything else that changes the bytes; each name once.
    """

    domain: str
    domain_key_id: bytes
    model: str
    weights: bytes
    weights_generation: int
    compute_dtype: str
    kv_dtype: str
    kv_scales: tuple[KvScale, ...]
    engine: str
    engine_format: str
    layout: str
    packing: str
    geometry: Geometry
    settings: tuple[Setting, ...] = ()

    def __post_init__(self) -> None:
        """Raise MisconfiguredError for what is missing or cannot be told apart."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and not value:
                raise MisconfiguredError(f"namespace: {field.name} is empty: say what it is")
        if len(self.weights) != WEIGHTS_BYTES:
            raise MisconfiguredError(
                f"namespace: weights has {len(self.weights)} bytes: give a {WEIGHTS_BYTES}-byte fingerprint"
            )
        if len(self.domain_key_id) != KEY_ID_BYTES:
            raise MisconfiguredError(
                f"namespace: domain_key_id has {len(self.domain_key_id)} bytes: use the domain key's id"
            )
        if self.kv_dtype not in UNSCALED_DTYPES and not self.kv_scales:
            raise MisconfiguredError(
                f"namespace: kv_dtype is {self.kv_dtype} but no scales are given: their values change the "
                "bytes (1.0 if the engine is uncalibrated)"
            )
        for scale in self.kv_scales:
            if not scale.values or not all(map(math.isfinite, scale.values)):
                raise MisconfiguredError(f"namespace: KV scale {scale.name} is {scale.values}: not finite")
        _check_names_differ("scale", [scale.name for scale in self.kv_scales])
        _check_names_differ("setting", [setting.name for setting in self.settings])


def _check_names_differ(what: str, names: list[str]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated or "" in names:
        raise MisconfiguredError(f"namespace: {what} names are empty or repeated: {sorted(repeated)}")


def encode(spec: NamespaceSpec) -> bytes:
    """The canonical encoding. The order of scales and settings does not matter; that of groups does.

    Raises MisconfiguredError for text that is not Unicode or over MAX_TEXT_BYTES, or for integers
    outside 0 .. 2**64-1.
    """
    ordered = dataclasses.replace(
        spec,
        kv_scales=tuple(sorted(spec.kv_scales, key=lambda scale: scale.name.encode(errors="replace"))),
        settings=tuple(sorted(spec.settings, key=lambda setting: setting.name.encode(errors="replace"))),
    )
    out = bytearray(b"kvferry namespace\0")
    out += struct.pack("<I", ENCODING_VERSION)
    _append(out, ordered, "spec")
    return bytes(out)


def fingerprint(spec: NamespaceSpec) -> bytes:
    """The 16 bytes that name the namespace: the domain's tag, and BLAKE2b-96 of the canonical encoding."""
    digest = hashlib.blake2b(encode(spec), digest_size=NAMESPACE_BYTES - DOMAIN_TAG_BYTES, person=_PERSON)
    return domain_tag(spec.domain, spec.domain_key_id) + digest.digest()


def _append_sized(out: bytearray, tag: bytes, content: bytes, path: str) -> None:
    if len(content) > MAX_TEXT_BYTES:
        raise MisconfiguredError(
            f"namespace: {path} has {len(content)} bytes: at most {MAX_TEXT_BYTES} (give a digest instead)"
        )
    out += tag + struct.pack("<I", len(content)) + content


def _append(out: bytearray, value: object, path: str) -> None:
    """Append ``value`` with its type tag; see the table in the specification."""
    match value:
        case bool():
            raise BrokenError(f"namespace: {path} is a bool, which has no encoding: use an enum")
        case enum.Enum():
            _append(out, value.value, path)
        case str():
            try:
                content = value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise MisconfiguredError(f"namespace: {path} is {value!r}: not Unicode text") from error
            _append_sized(out, b"s", content, path)
        case bytes():
            _append_sized(out, b"b", value, path)
        case int():
            if not 0 <= value <= MAX_U64:
                raise MisconfiguredError(f"namespace: {path} is {value}: must be 0 to 2**64-1")
            out += b"i" + struct.pack("<Q", value)
        case float():
            out += b"f" + struct.pack("<d", value)
        case tuple():
            out += b"l" + struct.pack("<I", len(value))
            for index, item in enumerate(value):
                _append(out, item, f"{path}[{index}]")
        case _ if dataclasses.is_dataclass(value):
            names = sorted(
                field.metadata.get("encoded_as", field.name) for field in dataclasses.fields(value)
            )
            out += b"r" + struct.pack("<I", len(names))
            for name in names:
                _append_sized(out, b"", name.encode("ascii"), path)
                _append(out, getattr(value, name), f"{path}.{name}")
        case _:
            raise BrokenError(f"namespace: {path} is a {type(value).__name__}, which has no encoding")
