"""The driver with the verbs of an engine's life: sleep, other weights, sounds, beams, storms of aborts."""

import random
from typing import Any

from tests.engines import vllm_driver
from tests.engines.vllm_driver import Driver, params, prompt_of

VERBS = ("generate_n", "beams", "listen", "forget_sounds", "embeds", "sleep", "reload", "storm", "late")


RATE = 16_000
PROMISE = "lossy_blocks"
"""The key in ``kv_transfer_params`` that ``other_connector`` listens to."""


def sound(seed: int, seconds: float) -> Any:
    """Noise."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(int(seconds * RATE), dtype=np.float32)


class LifeDriver(Driver):
    """The verbs."""

    def generate_n(self, options: dict[str, Any]) -> Any:
        """All answers of one request with ``n`` of them."""
        [output] = self._llm.generate([prompt_of(options)], [params(options)], use_tqdm=False)
        return [list(one.token_ids) for one in output.outputs]

    def beams(self, options: dict[str, Any]) -> Any:
        """The best beams' tokens, prompt included."""
        from vllm.sampling_params import BeamSearchParams

        wanted = BeamSearchParams(beam_width=options["width"], max_tokens=options["tokens"], ignore_eos=True)
        [found] = self._llm.beam_search([prompt_of(options)], wanted, use_tqdm=False)
        return [list(beam.tokens) for beam in found.sequences]

    def listen(self, options: dict[str, Any]) -> Any:
        """A prompt with sounds, each a seed and seconds. uuids: what the client calls them."""
        sounds = [(sound(seed, seconds), RATE) for seed, seconds in options["sounds"]]
        asked = {**prompt_of(options), "multi_modal_data": {"audio": sounds}}
        if "uuids" in options:
            asked["multi_modal_uuids"] = {"audio": options["uuids"]}
        [output] = self._llm.generate([asked], [params(options)], use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens, "cached": output.num_cached_tokens, "prompt": len(output.prompt_token_ids)}

    def forget_sounds(self, options: dict[str, Any]) -> Any:
        """Processed items, not encoder outputs: what a client names anew is processed anew."""
        self._llm.llm_engine.reset_mm_cache()
        return True

    def embeds(self, options: dict[str, Any]) -> Any:
        """A prompt of embeddings."""
        import torch

        generator = torch.Generator().manual_seed(options["seed"])
        shape = (options["tokens"], options["width"])
        asked = {"prompt_embeds": torch.randn(shape, generator=generator).to(torch.bfloat16)}
        [output] = self._llm.generate([asked], [params(options)], use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def sleep(self, options: dict[str, Any]) -> Any:
        """To sleep and awake again."""
        self._llm.sleep(level=options["level"])
        self._llm.wake_up()
        return True

    def reload(self, options: dict[str, Any]) -> Any:
        """Other weights under the same engine."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": options["path"]})
        return True

    def storm(self, options: dict[str, Any]) -> Any:
        """Requests that come and are aborted at random, seen step by step; then whatever is left runs."""
        engine, rng = self._llm.llm_engine, random.Random(options["seed"])
        alive: list[str] = []
        for number, one in enumerate(options["many"]):
            name = f"storm-{options['seed']}-{number}"
            alive.append(engine.add_request(name, prompt_of(one), params(one)) or name)
            for _ in range(rng.randrange(3)):
                engine.step()
            while alive and rng.random() < options["aborts"]:
                engine.abort_request([alive.pop(rng.randrange(len(alive)))], internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return True

    def late(self, options: dict[str, Any]) -> Any:
        """Requests of low priority, and one of high priority after some steps; all answers in order."""
        engine = self._llm.llm_engine
        many, answers = [*options["many"], options["urgent"]], {}
        for number, one in enumerate(many):
            if number == len(many) - 1:
                for _ in range(options["steps"]):
                    engine.step()
            engine.add_request(f"late-{number}", prompt_of(one), params(one), priority=one["priority"])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        return [answers[f"late-{number}"] for number in range(len(many))]


if __name__ == "__main__":
    vllm_driver.main(LifeDriver, (*vllm_driver.VERBS, *VERBS))
