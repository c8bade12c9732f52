"""How the two sides of the connector reach their node."""

from kvferry.client.scheduler import SchedulerClient
from kvferry.client.worker import WorkerClient
from kvferry.engines.vllm.messages import Assignment

FIRST_CONNECT_S = 0.25  # once in a worker's life


def connect_scheduler(assignment: Assignment, *, token: str, group: int | None) -> SchedulerClient:
    """It connects in the background."""
    return SchedulerClient(
        socket_path=assignment.socket,
        engine=assignment.engine,
        namespace=assignment.namespace,
        token=token,
        group=group,
    )


def connect_worker(assignment: Assignment, rank: int, *, token: str, group: int | None) -> WorkerClient:
    """Waits a moment for the node: an engine's first plan may hold a load, which would fail without."""
    client = WorkerClient(
        socket_path=assignment.socket,
        engine=assignment.engine,
        rank=rank,
        namespace=assignment.namespace,
        token=token,
        group=group,
    )
    client.wait_connected(FIRST_CONNECT_S)
    return client
