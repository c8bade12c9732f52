"""Small random models and adapters for tests with a real engine. Run as a script: DIR [NAME ...].

Kept out of the test process: it imports torch and transformers.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

VOCABULARY = 1024
LORA_RANK = 8
HIDDEN, HEADS, KV_HEADS, HEAD = 256, 8, 2, 32
LAYERS = 4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def llama(directory: Path, *, intermediate: int = 512, kv_heads: int = KV_HEADS) -> None:
    """Full attention, two KV heads: tensor-parallel over two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save(
        LlamaForCausalLM,
        LlamaConfig(
            **_COMMON,
            intermediate_size=intermediate,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            head_dim=HEAD,
        ),
        directory,
    )


def heavy(directory: Path) -> None:
    """The same KV, and a prefill that takes long beside it: a load is always worth it, and may be long."""
    llama(directory, intermediate=8192)


def gemma(directory: Path) -> None:
    """Sliding windows between full attention: a KV group for each layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    save(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_COMMON,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=256,
        ),
        directory,
    )


def gpt_oss(directory: Path) -> None:
    """Sliding windows of one block with attention sinks, full attention, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    save(
        GptOssForCausalLM,
        GptOssConfig(
            **_COMMON,
            **_EXPERTS,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            sliding_window=128,
        ),
        directory,
    )


def llama4(directory: Path) -> None:
    """Attention within chunks of 256 tokens, and full attention in the last layer."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    save(
        Llama4ForCausalLM,
        Llama4TextConfig(
            **_COMMON,
            intermediate_size=128,
            intermediate_size_mlp=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            attention_chunk_size=256,
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
        ),
        directory,
    )


def qwen3_next(directory: Path) -> None:
    """Three layers of gated delta nets, one of full attention, experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    save(
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **_COMMON,
            intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
            head_dim=64,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            full_attention_interval=4,
        ),
        directory,
    )


def granite(directory: Path) -> None:
    """Three Mamba-2 layers, one of full attention: Granite 4."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    save(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **_COMMON,
            intermediate_size=512,
            shared_intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            num_local_experts=0,
            num_experts_per_tok=0,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            position_embedding_type="rope",
            mamba_n_heads=16,
            mamba_n_groups=1,
            mamba_d_state=32,
            mamba_d_head=32,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
        ),
        directory,
    )


def deepseek(directory: Path) -> None:
    """Multi-head latent attention with the latent sizes of DeepSeek V2 and V3; experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    save(
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **_COMMON,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        directory,
    )


def save(model_class: Any, config: Any, directory: Path, *, seed: int = 7) -> None:
    """Random weights, drawn by ``seed``."""
    import torch

    torch.manual_seed(seed)
    model = model_class(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv1d" not in name:
            parameter.data *= 4  # random output that depends on its input
    model.save_pretrained(str(directory), safe_serialization=True)


def adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter for the Llama's query and value projections."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(LORA_RANK, HIDDEN, generator=generator)
            up = torch.randn(rows, LORA_RANK, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = (down * 0.3).to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = (up * 0.3).to(torch.bfloat16)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK * 2,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


MODELS: dict[str, Callable[[Path], None]] = {
    "llama": llama,
    "onehead": partial(llama, kv_heads=1),
    "gemma": gemma,
    "gptoss": gpt_oss,
    "llama4": llama4,
    "qwen3next": qwen3_next,
    "granite": granite,
    "deepseek": deepseek,
    "adapter1": partial(adapter, seed=1),
    "adapter2": partial(adapter, seed=2),
    "heavy": heavy,
}

if __name__ == "__main__":
    root, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names or MODELS:
        MODELS[name](root / name)
