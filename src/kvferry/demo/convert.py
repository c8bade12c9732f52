"""Turn one GGUF file into a plain safetensors model directory. Run as a process of its own by ``model``.

torch and transformers live only in this process: the demo itself stays small and can be stopped at once.
"""

import sys
from pathlib import Path


def convert(gguf: Path, into: Path) -> None:
    """Write weights (bfloat16), config, tokenizer and chat template of ``gguf`` to the directory ``into``.

    The quantised weights are unpacked once to dense ones. bfloat16 is what the engine computes in, so
    nothing more is lost than the file's own quantisation lost.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("reading the tokenizer", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _chat_template(gguf)
    print("unpacking the weights", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    print("writing safetensors", flush=True)
    model.save_pretrained(str(into), safe_serialization=True)
    tokenizer.save_pretrained(str(into))


def _chat_template(gguf: Path) -> str:
    """The template stored in the file's metadata; an empty string when it has none."""
    from gguf import GGUFReader

    field = GGUFReader(str(gguf)).get_field("tokenizer.chat_template")
    return str(field.contents()) if field is not None else ""


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
