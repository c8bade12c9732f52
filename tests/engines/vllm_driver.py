"""A process with one vLLM engine, driven over its standard streams: a JSON line in, a JSON line out.

Run as a script with the engine's arguments as JSON. Only lines that begin with MARK are answers.
"""

import json
import sys
from typing import Any

MARK = "@@answer "
VERBS = ("generate", "start_and_abort", "reset", "scrub", "digests", "metrics")


class Driver:
    """The verbs."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        if arguments.pop("keep_prefix_caching", False):
            _keep_prefix_caching()
        self._llm = LLM(**arguments)

    def generate(self, options: dict[str, Any]) -> Any:
        """Requests side by side: "many", or one."""
        many = options.get("many", [options])
        outputs = self._llm.generate(
            [prompt_of(one) for one in many],
            [params(one) for one in many],
            use_tqdm=False,
            lora_request=_adapter(options),
        )
        return [
            {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
            for output in outputs
        ]

    def start_and_abort(self, options: dict[str, Any]) -> Any:
        """Begin a request, let it run for some steps, abort it, run what is left."""
        engine = self._llm.llm_engine
        name = f"aborted-{options['steps']}"
        internal = engine.add_request(name, prompt_of(options), params(options))
        for _ in range(options["steps"]):
            engine.step()
        engine.abort_request([internal or name], internal=bool(internal))
        while engine.has_unfinished_requests():
            engine.step()
        return True

    def reset(self, options: dict[str, Any]) -> Any:
        """Whether the prefix cache could be reset."""
        return self._llm.reset_prefix_cache(**options)

    def scrub(self, options: dict[str, Any]) -> Any:
        """Overwrite the workers' KV memory with zeros, after a reset."""
        return self._llm.collective_rpc("kvferry_scrub")

    def digests(self, options: dict[str, Any]) -> Any:
        """Of the workers' KV blocks."""
        return self._llm.collective_rpc("kvferry_block_digests")

    def metrics(self, options: dict[str, Any]) -> Any:
        """Counters and gauges, summed over labels; by reason where there is one: ``name:reason``."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                reason = metric.labels.get("reason")
                name = f"{metric.name}:{reason}" if reason else metric.name
                found[name] = found.get(name, 0) + metric.value
        return found


def _keep_prefix_caching() -> None:
    """Let latent attention reuse prefixes on a CPU without AMX.

    The platform switches prefix caching and chunked prefill off there, for speed; its kernels can do both.
    """
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_and_keep(config: Any) -> None:
        cache, scheduler = config.cache_config, config.scheduler_config
        caching, chunked = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        update(config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill = caching, chunked

    CpuPlatform.check_and_update_config = staticmethod(update_and_keep)


def params(options: dict[str, Any]) -> Any:
    """Sampling of one request."""
    from vllm import SamplingParams

    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**fields, **options.get("params", {})})


def prompt_of(options: dict[str, Any]) -> dict[str, Any]:
    """What vLLM takes for one."""
    found: dict[str, Any] = {"prompt_token_ids": options["prompt"]}
    if "salt" in options:
        found["cache_salt"] = options["salt"]
    return found


def _adapter(options: dict[str, Any]) -> Any:
    if "adapter" not in options:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*options["adapter"])


def answer(value: Any) -> None:
    """One line to whoever drives us."""
    sys.stdout.write(f"{MARK}{json.dumps(value)}\n")  # at once: worker processes write there too
    sys.stdout.flush()


def main(driver_class: type[Driver] = Driver, verbs: tuple[str, ...] = VERBS) -> None:
    """Until standard input ends."""
    driver = driver_class(json.loads(sys.argv[1]))
    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        if verb in verbs:
            try:
                found = getattr(driver, verb)(request)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error!r}"}
            answer(found)


if __name__ == "__main__":
    main()
