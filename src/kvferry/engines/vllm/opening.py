"""Makes the scheduler side once the workers have said what they hold."""

import logging

from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm.asker import Asker
from kvferry.engines.vllm.messages import Assignment
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.settings import ConnectorSettings

_log = logging.getLogger("vllm.kvferry")


def open_scheduler(
    assignment: Assignment,
    *,
    geometry: ChunkGeometry,
    settings: ConnectorSettings,
    admission: Admission,
    client: Asker,
    pins: Pins,
    steps_in_flight: int,
) -> SchedulerSide:
    """See ``SchedulerSide``."""
    namespace = assignment.namespace
    _log.info(
        "kvferry: chunks of %d tokens (%.1f MB), namespace %s, node at %s",
        namespace.chunk_tokens,
        sum(namespace.part_bytes) / 1e6,
        namespace.namespace.hex(),
        settings.socket,
    )
    return SchedulerSide(
        assignment=assignment,
        geometry=geometry,
        admission=admission,
        client=client,
        pins=pins,
        prefill=PrefillWatch(),
        deadline_cap_s=settings.deadline_cap_ms / 1000,
        steps_in_flight=steps_in_flight,
    )
