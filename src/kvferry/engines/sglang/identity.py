"""The namespace of one pool of one rank of an SGLang engine."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.client.messages import NamespaceInfo
from kvferry.engines.checkpoints import local_directory
from kvferry.engines.sglang.pages import MARKER_BYTES
from kvferry.engines.sglang.settings import WHERE, BackendSettings
from kvferry.errors import MisconfiguredError
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup
from kvferry.identity.namespace import UNSCALED_DTYPES, KvScale, NamespaceSpec, Setting, fingerprint
from kvferry.identity.weights import model_fingerprint, revision_fingerprint

ENGINE = "sglang"
MAX_QUANTISATION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter named at start-up: SGLang's id of it follows from name and path, not from content."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What changes the KV bytes of this engine, whichever pool they are in.

    version: SGLang's. model_path, draft_path: as SGLang was given them; draft_path None for no draft model.
    dtype, kv_dtype: as configured. scales_file: JSON with KV scales, or None. options: every other option
    that changes the bytes, by name.
    """

    version: str
    model_path: str
    revision: str | None
    dtype: str
    kv_dtype: str
    scales_file: str | None
    draft_path: str | None
    draft_revision: str | None
    adapters: tuple[Adapter, ...]
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool as this rank has it.

    kind: its class. layout: of its memory. shape: of a page's bytes. page_tokens: tokens of a KV page.
    layers: first and last of the rank's. stage: pipeline rank and size. shard: which share of the page, of
    how many; ranks that hold equal bytes have the same.
    """

    name: str
    kind: str
    layout: str
    dtype: str
    shape: str
    page_bytes: int
    page_tokens: int
    layers: tuple[int, int]
    stage: tuple[int, int]
    shard: str
    trailing: int = 0

    def ends(self) -> "PoolFacts":
        """Of the markers where its runs of pages end."""
        return replace(self, name=f"{self.name} ends", shape="marker", page_bytes=MARKER_BYTES, trailing=1)


class Identity:
    """What all pools of an engine have in common, computed once: the weights are looked at."""

    def __init__(self, settings: BackendSettings, engine: EngineFacts) -> None:
        """Raises MisconfiguredError where something that changes the bytes cannot be determined."""
        self.key = DomainKey.load(settings.domain, key_file=settings.domain_key_file)
        self._settings = settings
        self._engine = engine
        self._weights = _weights(
            engine.model_path, engine.revision, name=settings.model_name, stated=settings.revision
        )
        found = dict(engine.options)
        if engine.scales_file is not None:
            found["kv_scales_file"] = _digest_of(Path(engine.scales_file))
        if engine.draft_path is not None:
            draft = _weights(engine.draft_path, engine.draft_revision, name=None, stated=None)
            found["draft_weights"] = draft.hex()
        if engine.adapters:
            found["lora_adapters"] = _adapters(engine.adapters)
        self._options = found

    def namespace(self, pool: PoolFacts, *, generation: str = "") -> NamespaceInfo:
        """generation: not empty once this engine has begun a name space of its own."""
        geometry = Geometry(
            groups=(
                KvGroup(
                    kind=GroupKind.FULL,
                    block_tokens=pool.page_tokens,
                    stages=((f"{pool.layers[0]}-{pool.layers[1]}",),),
                    block_bytes=(pool.page_bytes,),
                    kv_heads=1,
                ),
            ),
            chunk_tokens=pool.page_tokens,
        )
        found = self._options | {
            "pool": pool.name,
            "pool_dtype": pool.dtype,
            "page": pool.shape,
            "stage": f"{pool.stage[0]}/{pool.stage[1]}",
            "shard": pool.shard,
            "trailing": str(pool.trailing),
        }
        if generation:
            found["generation"] = generation
        kv_dtype = pool.dtype if self._engine.kv_dtype == "auto" else self._engine.kv_dtype
        # Scales are the checkpoint's or the file's, and both are named: their values need not be.
        scaled = kv_dtype not in UNSCALED_DTYPES
        spec = NamespaceSpec(
            domain=self._settings.domain,
            domain_key_id=self.key.key_id,
            model=self._settings.model_name or "by weights",
            weights=self._weights,
            weights_generation=0,
            compute_dtype=self._engine.dtype,
            kv_dtype=kv_dtype,
            kv_scales=(KvScale("of the checkpoint or the scales file", (1.0,)),) if scaled else (),
            engine=ENGINE,
            engine_format=self._engine.version,
            layout=f"{pool.kind}/{pool.layout}",
            packing="none",
            geometry=geometry,
            settings=tuple(Setting(name, value or "none") for name, value in sorted(found.items())),
        )
        label = self._settings.model_name or Path(self._engine.model_path).name
        return NamespaceInfo(
            namespace=fingerprint(spec),
            part_bytes=geometry.part_bytes,
            chunk_tokens=pool.page_tokens,
            domain=self._settings.domain,
            label=f"{label} {pool.name} {kv_dtype} shard {pool.shard}",
            trailing=(pool.trailing,) if pool.trailing else (),
        )


def _weights(path: str, revision: str | None, *, name: str | None, stated: str | None) -> bytes:
    directory = local_directory(path, revision=revision)
    if directory is not None:
        return model_fingerprint(directory)
    if stated is not None:
        return revision_fingerprint(name or path, stated)
    raise MisconfiguredError(
        f"the weights of {path} are in no local directory, so they cannot be told from others: "
        f'give "revision" (the full commit hash) in {WHERE}'
    )


def _adapters(adapters: tuple[Adapter, ...]) -> str:
    digest = hashlib.blake2b(digest_size=32, person=b"kvferry-sg-lora")
    for adapter in sorted(adapters, key=lambda one: (one.name, one.path)):
        directory = local_directory(adapter.path, revision=None)
        if directory is None:
            raise MisconfiguredError(
                f"LoRA adapter {adapter.name} ({adapter.path}) is in no local directory, so its content "
                "cannot be told: name a directory in --lora-paths, or load it once the engine runs"
            )
        for text in (adapter.name.encode(), adapter.path.encode(), model_fingerprint(directory)):
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_QUANTISATION_BYTES + 1)
    except OSError as error:
        raise MisconfiguredError(f"KV scales {path}: {error.strerror}") from error
    if len(content) > MAX_QUANTISATION_BYTES:
        raise MisconfiguredError(f"KV scales {path}: more than {MAX_QUANTISATION_BYTES} bytes")
    return hashlib.sha256(content).hexdigest()
