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


def llama(directory: Path, *, intermediate: int = 512) -> None:
    """Full attention, two KV heads: tensor-parallel over two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    _save(LlamaForCausalLM, config, directory)


def heavy(directory: Path) -> None:
    """The same KV, and a prefill that takes long beside it: a load is always worth it, and may be long."""
    llama(directory, intermediate=8192)


def gemma(directory: Path) -> None:
    """Sliding windows between full attention: several KV groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=256,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    _save(Gemma3ForCausalLM, config, directory)


def _save(model_class: Any, config: Any, directory: Path) -> None:
    import torch

    torch.manual_seed(7)
    model = model_class(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
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
    "gemma": gemma,
    "adapter1": partial(adapter, seed=1),
    "adapter2": partial(adapter, seed=2),
    "heavy": heavy,
}

if __name__ == "__main__":
    root, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names or MODELS:
        MODELS[name](root / name)
