"""Two hosts with one Valkey between them."""

from contextlib import ExitStack
from pathlib import Path

from tests.engines.sglang.cases import rig
from tests.engines.sglang.cases.case_controller import backed_up, prefetched
from tests.servers import running_server

from kvferry.testing.expectations import eventually
from kvferry.testing.holdings import at_rest
from kvferry.tiers.valkey.tier import ValkeyTier


def test_what_one_host_stored_another_reads_through_valkey(tmp_path: Path, stack: ExitStack) -> None:
    stack.enter_context(rig.serving(rig.model(tmp_path / "model")))
    server = stack.enter_context(running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"))
    here = rig.start_node(tmp_path / "here", stack, tier=ValkeyTier.connect(server.settings()))
    there = rig.start_node(tmp_path / "there", stack, tier=ValkeyTier.connect(server.settings()))
    writer = rig.controller(here.settings.socket_path, *rig.mha_pool("layer_first"), stack)
    reader = rig.controller(there.settings.socket_path, *rig.mha_pool("layer_first"), stack)
    rig.scramble(writer.mem_pool_host)
    held = backed_up(writer, 6)
    eventually(lambda: here.statistics().counters.stored_parts == 6, "the pages are in Valkey")
    rig.scramble(reader.mem_pool_host, seed=5)
    assert prefetched(reader, 7) == (6 * rig.PAGE, held)
    at_rest(here)
    at_rest(there)
