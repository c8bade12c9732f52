"""Several questions about one long document, with a prefix cache that outlives the process.

    python examples/transformers_prefix_cache.py                 a small random model, a pool in this process
    python examples/transformers_prefix_cache.py --socket PATH   the same, on a node: run it twice
    python examples/transformers_prefix_cache.py --model NAME    a real one

Prints, per question, how many tokens of the prompt were found and how long the first token took.
"""

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvferry.engines.transformers import PrefixCache

DOCUMENT_TOKENS = 1000
QUESTIONS = ("What is this about?", "Who wrote it?", "What does it leave out?")


def small_model() -> tuple[Any, list[Any]]:
    """Random weights, equal in every run, and prompts of random tokens that begin alike."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).eval()
    document = torch.randint(10, 4096, (1, DOCUMENT_TOKENS))
    return model, [torch.cat([document, torch.randint(10, 4096, (1, 20))], dim=1) for _ in QUESTIONS]


def real_model(name: str) -> tuple[Any, list[Any]]:
    """A model and its tokenizer, from a directory or the hub."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    document = "The quick brown fox jumps over the lazy dog. " * (DOCUMENT_TOKENS // 10)
    return model, [tokenizer(document + question, return_tensors="pt").input_ids for question in QUESTIONS]


def ask(model: Any, cache: PrefixCache, prompt: Any) -> tuple[int, float]:
    """Tokens found, and seconds to the first token."""
    began = time.perf_counter()
    past = cache.load(prompt)  # the longest prefix that is there, or nothing
    found = int(past.get_seq_length())
    answer = model.generate(prompt, past_key_values=past, max_new_tokens=1, do_sample=False)
    seconds = time.perf_counter() - began
    cache.save(answer, past)  # what was computed, for the next one
    return found, seconds


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--socket", help="of a node (kvferry node); without one, a pool in this process")
    parser.add_argument("--model", help="a directory or a name on the hub")
    chosen = parser.parse_args()
    model, prompts = real_model(chosen.model) if chosen.model else small_model()
    where = {"socket": chosen.socket} if chosen.socket else {"pool": "256MiB"}
    with PrefixCache(model, **where) as cache:
        for question, prompt in zip(QUESTIONS, prompts, strict=True):
            found, seconds = ask(model, cache, prompt)
            print(f"{question:24} {found:5} of {prompt.shape[1]} tokens found, {seconds * 1000:6.0f} ms")
        total = cache.statistics()
        print(f"{total.loaded_tokens} of {total.prompt_tokens} prompt tokens were loaded, not computed")


if __name__ == "__main__":
    main()
