"""Small random models for the tests of an engine's life. Run as a script: DIR [NAME ...].

Kept out of the test process: it imports torch and transformers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm_models import HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY

IMAGE_TOKEN = 3
IMAGE_SIDE, PATCH = 224, 14
IMAGE_TOKENS = (IMAGE_SIDE // PATCH) ** 2


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


def _save(model_class: Any, config: Any, directory: Path, *, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    model = model_class(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4  # random output that depends on its input
    model.save_pretrained(str(directory), safe_serialization=True)


def other_llama(directory: Path) -> None:
    """The same model after more training, so to speak."""
    from transformers import LlamaForCausalLM

    _save(LlamaForCausalLM, _text_config(), directory, seed=8)


def _tokenizer() -> Any:
    """Words ``t5`` to ``t1023`` are tokens 5 to 1023."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_TOKEN, "<pad>": 4}
    words |= {f"t{number}": number for number in range(5, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )


def llava(directory: Path) -> None:
    """An image is 256 tokens: two chunks on a CPU."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_text_config(),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    _save(LlavaForConditionalGeneration, config, directory, seed=7)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIDE}, crop_size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}
        ),
        tokenizer=_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(str(directory))


MODELS: dict[str, Callable[[Path], None]] = {"other_llama": other_llama, "llava": llava}

if __name__ == "__main__":
    root, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names or MODELS:
        MODELS[name](root / name)
