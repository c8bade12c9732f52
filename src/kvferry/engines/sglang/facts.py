"""What this SGLang process says of itself and of its host pools, for the namespace."""

import re
from typing import Any

from kvferry.engines.sglang.identity import Adapter, EngineFacts, PoolFacts
from kvferry.engines.sglang.pages import Pages
from kvferry.errors import MisconfiguredError

SUPPORTED = "0.5.23 or a later 0.5"
_SUPPORTED = re.compile(r"0\.5\.(\d+)")
_FIRST_PATCH = 23
# Server options that change KV bytes and show in nothing else that is named.
_OPTIONS = (
    "attention_backend",
    "context_length",
    "custom_weight_loader",
    "decode_attention_backend",
    "decrypted_draft_config_file",
    "disable_fast_image_processor",
    "dsa_decode_backend",
    "dsa_prefill_backend",
    "dsv4_attn_backend",
    "dsv4_prefill_backend",
    "enable_decoder_swa_bounded_replay",
    "enable_deepseek_v4_fp4_indexer",
    "enable_dsa_cache_layer_split",
    "enable_encoder_swa_bounded_replay",
    "enable_int8_mamba_checkpoint",
    "enable_linear_replayssm",
    "enable_linear_replayssm_spec",
    "enable_mamba_cache_stochastic_rounding",
    "enable_page_major_kv_layout",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_mxfp4_moe_precision",
    "image_processor_backend",
    "json_model_override_args",
    "kt_max_deferred_experts_per_token",
    "kt_method",
    "kt_num_gpu_experts",
    "kt_weight_path",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "load_format",
    "mamba_backend",
    "mamba_ssm_dtype",
    "mm_attention_backend",
    "mm_process_config",
    "model_config_parser",
    "model_impl",
    "modelopt_quant",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "quantization",
    "quantize_and_serve",
    "rl_quant_profile",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
    "speculative_draft_sink_size",
    "speculative_draft_window_size",
    "trust_mm_content_hashes",
    "uno_lora_path",
)
_FROM_ELSEWHERE = ("remote_instance", "remote")
# What transformers and SGLang raise for a configuration they cannot make out, or of a release unlike this.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_version(version: str) -> None:
    """Raises MisconfiguredError for a release whose interface is not known."""
    match = _SUPPORTED.match(version)
    if match is None or int(match[1]) < _FIRST_PATCH:
        raise MisconfiguredError(f"SGLang {version} is not supported by this backend: use {SUPPORTED}")


def engine_facts(version: str) -> EngineFacts:
    """Raises MisconfiguredError where no engine runs, for weights from elsewhere, and for more than text."""
    read = _reader()
    if read("checkpoint_engine_wait_weights_before_ready") or read("load_format") in _FROM_ELSEWHERE:
        raise MisconfiguredError(
            f"weights come from another process, not from {read('model_path')}, so they cannot be told: "
            "start the engine from a checkpoint, or without this storage backend"
        )
    path = str(read("model_path"))
    check_text_alone(_model(path), path=path, encoders=bool(read("language_only")))
    return EngineFacts(
        version=version,
        model_path=path,
        revision=_text(read("revision")),
        dtype=str(read("dtype")),
        kv_dtype=str(read("kv_cache_dtype")),
        scales_file=_text(read("quantization_param_path")),
        draft_path=_text(read("speculative_draft_model_path")),
        draft_revision=_text(read("speculative_draft_model_revision")),
        adapters=_adapters(read("lora_paths")),
        options={name: str(read(name)) for name in _OPTIONS},
    )


def check_text_alone(model: Any, *, path: str, encoders: bool) -> None:
    """Raises MisconfiguredError for a model that takes images or sounds, and where that cannot be told.

    A request may bring a hash of its own for an image, and that hash, not the image, is in the names of
    pages: two images could be one page. model: SGLang's ``ModelConfig``. encoders: whether other engines
    encode images for this one.
    """
    takes = True if encoders else getattr(model, "is_multimodal", None)
    if takes is False:
        return
    if takes is not True:
        raise _untold(path)
    raise MisconfiguredError(
        f"{path} takes images or sounds, for which a request may choose the name of its pages, so one user "
        "could be given another's: start it for text alone (--language-model-only for models that have it, "
        "without --enable-multimodal for those that need it), or without this storage backend"
    )


def pool_facts(name: str, pool: Any, pages: Pages, *, config: Any, page_tokens: int, last: bool) -> PoolFacts:
    """config: SGLang's ``HiCacheStorageConfig``. last: only the last page of a prefix is needed of it."""
    first_layer = int(getattr(pool, "start_layer", 0) or 0)
    end_layer = getattr(pool, "end_layer", None)
    return PoolFacts(
        name=name,
        kind=type(pool).__name__,
        layout=_layout(pool),
        dtype=str(getattr(pool, "dtype", "none")).removeprefix("torch."),
        shape=pages.shape + _state_types(pool),
        page_bytes=pages.nbytes,
        page_tokens=page_tokens,
        layers=(first_layer, int(end_layer) if end_layer is not None else first_layer),
        stage=(int(config.pp_rank), int(config.pp_size)),
        shard=_shard(pool, config),
        trailing=1 if last else 0,
    )


def shared_by_ranks(pool: Any, config: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes, which one of them stores.

    So it is with MLA latents and what is compressed from them, not with the heads of a draft model or the
    recurrent states that a model has beside them.
    """
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return bool(config.is_mla_model) and not isinstance(pool, (MHATokenToKVPoolHost, MambaPoolHost))


def _state_types(pool: Any) -> str:
    """Of a pool of recurrent states, whose kinds have types of their own, which may be of one size."""
    temporal = getattr(pool, "temporal_dtype", None)
    if temporal is None:
        return ""
    return "".join(f" {kind}" for kind in (temporal, *(side.dtype for side in pool.slot_state_buffers)))


def _layout(pool: Any) -> str:
    """Of the host memory, and of the device memory that is copied there row by row."""
    infos = getattr(pool, "_buffer_infos", None)
    order = getattr(getattr(infos[0], "buffers", None), "layout", None) if infos else None
    return f"{pool.layout}/{getattr(order, 'value', 'plain')}"


def _shard(pool: Any, config: Any) -> str:
    ranks = (
        "of all ranks" if shared_by_ranks(pool, config) else f"{int(config.tp_rank)}/{int(config.tp_size)}"
    )
    if int(config.attn_cp_size) > 1:  # each rank of a context-parallel group holds a slice of every page
        ranks += f" cp {int(config.attn_cp_rank)}/{int(config.attn_cp_size)}"
    return ranks


def _reader() -> Any:
    """Reads an option by name, as resolved at start-up; None for one that this release does not have."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    places = namespace_of(ServerArgs)

    def read(name: str) -> Any:
        place = places.get(name)
        if place is None:
            return None
        head, *rest = place.split(".")
        try:
            bag = get_context().config_bag(head)
        except ValueError as error:
            raise MisconfiguredError("this process serves no model, so its weights cannot be told") from error
        for part in rest:
            bag = getattr(bag, part)
        return getattr(bag, name)

    return read


def _model(path: str) -> Any:
    """The model as SGLang's scheduler knows it, read once more from its configuration."""
    try:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        return ModelConfig.from_server_args(get_server_args())
    except _UNREADABLE as error:
        raise _untold(path) from error


def _untold(path: str) -> MisconfiguredError:
    return MisconfiguredError(
        f"whether {path} takes images or sounds, whose pages must not be shared, cannot be told from its "
        "configuration: start the engine without this storage backend"
    )


def _text(value: Any) -> str | None:
    return str(value) if value else None


def _adapters(paths: Any) -> tuple[Adapter, ...]:
    """Of ``--lora-paths``: references, a mapping of names to paths, or ``name=path`` texts."""
    if isinstance(paths, dict):
        paths = [value if hasattr(value, "lora_path") else f"{name}={value}" for name, value in paths.items()]
    found = []
    for one in paths or ():
        if isinstance(one, str):
            name, _, path = one.rpartition("=")
            found.append(Adapter(name or path, path))
        else:
            found.append(Adapter(str(one.lora_name), str(one.lora_path)))
    return tuple(found)
