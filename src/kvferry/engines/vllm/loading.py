"""From a hit and the blocks that the engine allocated to what every worker loads."""

from collections.abc import Sequence

from kvferry.client.messages import LookupAnswer
from kvferry.engines.planning import ChunkGeometry, LoadPlan, plan_group_load
from kvferry.engines.vllm.messages import LoadSpec


def load_spec(
    request_id: str,
    *,
    geometry: ChunkGeometry,
    answer: LookupAnswer,
    load: LoadPlan,
    tables: Sequence[Sequence[int]],
    null_block: int | None,
) -> LoadSpec | None:
    """tables: the request's block tables, by group. None when they do not fit what the answer promises."""
    if len(tables) != len(geometry.groups):
        return None
    groups = []
    for group, table in zip(geometry.groups, tables, strict=True):
        filled = plan_group_load(geometry, group, load=load, table=table, null_block=null_block)
        if filled is None:
            return None
        groups.append(filled)
    count = load.end_chunk - answer.first_chunk
    parts = len(answer.parts[0])
    per_group = parts // len(groups)  # parts are numbered group by group
    tickets = tuple(
        answer.ticket(part, skip=groups[part // per_group].first_chunk - answer.first_chunk, count=count)
        for part in range(parts)
    )
    return LoadSpec(request_id, load.chunks, tickets, tuple(groups))
