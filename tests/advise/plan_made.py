"""Plans for tests, made without the command line."""

from typing import Any

from kvferry.advise.document import document
from kvferry.advise.plan import Plan, make
from kvferry.advise.question import Prices, Question
from kvferry.advise.workload import Kind, Numbers
from kvferry.cli.flags import BACKEND, CONNECTOR
from kvferry.models.catalogue import entries, find_model
from kvferry.models.concurrency import weights_of
from kvferry.models.gpus import find_gpu

PRICES = Prices(
    gpu_usd_hour=3.0, ram_usd_gib=4.89, disk_usd_gib=0.08, objects_usd_gib=0.023, zone_usd_gb=0.02
)
# 100 conversations of a 70B that grow from 12,000 to 28,000 tokens over 20 turns.
GROWING = Numbers(
    context_p50=20_000,
    context_p99=28_000,
    new_tokens=600,
    output_tokens=242,
    turns=20,
    conversations=100,
    requests_s=4,
)


def question(
    model: str = "llama-3.3-70b",
    gpu: str = "h100",
    *,
    kind: Kind = Kind.OWN,
    numbers: Numbers = Numbers(),  # noqa: B008  (frozen)
    weights_dtype: str | None = None,
    **others: Any,
) -> Question:
    """What ``kvferry plan`` would ask."""
    found = find_model(model)
    config = next(entry.config for entry in entries() if entry.name == found.name)
    return Question(
        model=found,
        config=config,
        gpu=find_gpu(gpu),
        weights=weights_of(found, weights_dtype, None),
        kind=kind,
        numbers=numbers,
        prices=others.pop("prices", PRICES),
        **others,
    )


def shown(plan: Plan) -> dict[str, Any]:
    """Its document."""
    return document(plan, path="model", connector=CONNECTOR, backend=BACKEND)


def growing(**others: Any) -> Plan:
    """The published two servers of eight H100 with 20 GB of host memory each."""
    given = {"gpus": 16, "tensor": 8, "kv": "bf16", "host_bytes": 20_000_000_000, "numbers": GROWING}
    return make(question("llama-3.1-70b", **{**given, **others}))
