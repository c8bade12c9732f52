"""The connector of kvferry, in an engine that waits for its node as long as a busy machine needs.

vLLM imports it in each of its processes.
"""

from tests.patience import patient_engine

from kvferry.engines.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]

_patience = patient_engine()
_patience.__enter__()  # as long as the process lives
