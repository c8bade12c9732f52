"""Small random models for the tests of an engine's life. Run as a script: DIR [NAME ...].

Kept out of the test process: it imports torch and transformers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm_models import HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, save

AUDIO = 3
MAX_SECONDS = 30  # of sound in one item: what the engine takes
TOKENS_PER_SECOND = 25


def _text_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )


def other_llama(directory: Path) -> None:
    """The same model after more training, so to speak."""
    from transformers import LlamaForCausalLM

    save(LlamaForCausalLM, _text_config(), directory, seed=8)


def draft(directory: Path) -> None:
    """A smaller model of the same vocabulary."""
    from transformers import LlamaForCausalLM

    config = _text_config()
    config.num_hidden_layers = 1
    save(LlamaForCausalLM, config, directory, seed=9)


def eagle(directory: Path) -> None:
    """An EAGLE head: one layer behind a projection of the model's own hidden states."""
    import torch
    from safetensors.torch import load_file, save_file

    draft(directory)
    path = str(directory / "model.safetensors")
    left_out = ("lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if name not in left_out
    }
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16) / 16
    save_file(tensors, path, metadata={"format": "pt"})


def mtp(directory: Path) -> None:
    """A model with a head of its own for drafts, in one checkpoint; no experts."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        moe_num_experts=2,
        moe_k=1,
        moe_layer_start_index=LAYERS,
        moe_layer_end_index=LAYERS,
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
    )
    save(Ernie4_5_MoeForCausalLM, config, directory, seed=7)
    path, layer = str(directory / "model.safetensors"), "model.layers.0."
    tensors = load_file(path)
    head = {
        name.replace(layer, "model.mtp_block.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    head["model.mtp_linear_proj.0.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16) / 16
    for norm in ("mtp_emb_norm", "mtp_hidden_norm"):
        head[f"model.{norm}.0.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors | head, path, metadata={"format": "pt"})


def _tokenizer() -> Any:
    """Words ``t6`` to ``t1023`` are tokens 6 to 1023."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"<|{name}|>": number for number, name in enumerate(("AUDIO", "audio_bos", "audio_eos"), AUDIO)}
    words |= {f"t{number}": number for number in range(6, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    )


def listener(directory: Path) -> None:
    """Takes sounds: 25 tokens per second, anywhere in the prompt."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    ears = Qwen2AudioEncoderConfig(
        num_mel_bins=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        d_model=64,
        max_source_positions=MAX_SECONDS * 50,
    )
    fields = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    text = Qwen2Config(**(_text_config().to_dict() | fields | {"model_type": "qwen2"}))
    config = Qwen2AudioConfig(audio_config=ears, text_config=text, audio_token_index=AUDIO)
    save(Qwen2AudioForConditionalGeneration, config, directory, seed=7)
    _rename_tensors(directory, "language_model.model.model.", "language_model.model.")
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=_tokenizer(),
    )
    processor.save_pretrained(str(directory))


def _rename_tensors(directory: Path, wrong: str, right: str) -> None:
    """As released checkpoints call them."""
    from safetensors.torch import load_file, save_file

    path = str(directory / "model.safetensors")
    tensors = {name.replace(wrong, right): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


MODELS: dict[str, Callable[[Path], None]] = {
    "other_llama": other_llama,
    "draft": draft,
    "eagle": eagle,
    "mtp": mtp,
    "listener": listener,
}

if __name__ == "__main__":
    root, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names or MODELS:
        MODELS[name](root / name)
