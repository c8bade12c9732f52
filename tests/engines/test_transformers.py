"""transformers: what was loaded computes, bit for bit, what the same prefix in the model's own cache does."""

import gc
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.node.fleet import POOL_BYTES, NodeProcess, at_rest, eventually, settings
from tests.servers import running_server

from kvferry.errors import RefusedError
from kvferry.node.node import Node

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
POOL = "128MiB"
PATIENCE_S = 30.0  # no call fails for a busy host
CHUNK = 64
PROMPT = 5 * CHUNK + 19

Open = Callable[..., Any]


@pytest.fixture(scope="module", params=["llama", "gemma", "deepseek", "mistral", "eager", "seeing"])
def model(request: pytest.FixtureRequest, kit: Any) -> Any:
    return kit.MODELS[request.param]()


@pytest.fixture(scope="module")
def llama(kit: Any) -> Any:
    return kit.llama()


@pytest.fixture(scope="module")
def gemma(kit: Any) -> Any:
    return kit.gemma()


@pytest.fixture
def open_cache(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a prefix cache that the test closes, with a pool in this process unless told otherwise."""
    from kvferry.engines.transformers import PrefixCache

    monkeypatch.setattr("kvferry.engines.transformers.prefix.ANSWER_S", PATIENCE_S)
    monkeypatch.setattr("kvferry.client.copying.RESERVE_S", PATIENCE_S)

    def open_one(model: Any, **options: Any) -> Any:
        options.setdefault("chunk_tokens", CHUNK)
        if "socket" not in options:
            options.setdefault("pool", POOL)
        return stack.enter_context(PrefixCache(model, **options))

    return open_one


def test_a_loaded_prefix_answers_bit_for_bit_as_the_models_own(
    model: Any, kit: Any, open_cache: Open
) -> None:
    ids, cache = kit.prompt(PROMPT), open_cache(model)
    assert cache.load(ids).get_seq_length() == 0
    assert cache.save(ids, kit.own_prefix(model, ids, 5 * CHUNK)) == 5 * CHUNK
    loaded = cache.load(ids)
    assert loaded.get_seq_length() == 5 * CHUNK == cache.match(ids)
    own = kit.own_prefix(model, ids, 5 * CHUNK)
    kit.assert_same(kit.answer(model, ids, loaded), kit.answer(model, ids, own))


def test_no_more_is_loaded_than_is_allowed(llama: Any, kit: Any, open_cache: Open) -> None:
    ids, cache = kit.prompt(PROMPT), open_cache(llama)
    cache.save(ids, kit.own_prefix(llama, ids, 5 * CHUNK))
    for cap, wanted in ((0, 0), (CHUNK - 1, 0), (2 * CHUNK + 1, 2), (9 * CHUNK, 5), (None, 5)):
        assert cache.load(ids, max_load_tokens=cap).get_seq_length() == wanted * CHUNK
    loaded, own = cache.load(ids, max_load_tokens=2 * CHUNK), kit.own_prefix(llama, ids, 2 * CHUNK)
    kit.assert_same(kit.answer(llama, ids, loaded), kit.answer(llama, ids, own))
    for nonsense in (-1, 1.0, "8", True):
        with pytest.raises(RefusedError, match="max_load_tokens"):
            cache.load(ids, max_load_tokens=nonsense)


def test_what_generate_computed_serves_the_next_turn(model: Any, kit: Any, open_cache: Open) -> None:
    import torch

    ids, cache = kit.prompt(2 * CHUNK - 5), open_cache(model)
    past = cache.load(ids)
    said, _ = kit.answer(model, ids, past)
    assert cache.save(said, past) == 2 * CHUNK  # the second chunk holds decoded tokens
    turn = torch.cat([said, kit.prompt(CHUNK, seed=2)], dim=1)
    loaded = cache.load(turn)
    assert loaded.get_seq_length() == 2 * CHUNK
    answered, _ = kit.answer(model, turn, loaded)
    assert cache.save(answered, loaded) == answered.shape[1] // CHUNK * CHUNK
    statistics = cache.statistics()
    assert (statistics.prompts, statistics.hits, statistics.loaded_tokens) == (2, 1, 2 * CHUNK)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("shared", [1, CHUNK, 3 * CHUNK - 1, 3 * CHUNK])
def test_any_whole_chunks_that_two_prompts_share_are_found(
    name: str, shared: int, kit: Any, llama: Any, gemma: Any, open_cache: Open
) -> None:
    import torch

    model = {"llama": llama, "gemma": gemma}[name]
    first, cache = kit.prompt(PROMPT), open_cache(model)
    cache.save(first, kit.own_prefix(model, first, PROMPT))
    other = torch.cat([first[:, :shared], kit.prompt(CHUNK, seed=3)], dim=1)
    loaded = cache.load(other)
    tokens = shared // CHUNK * CHUNK
    assert loaded.get_seq_length() == tokens
    own = kit.own_prefix(model, first, PROMPT)
    for ours, theirs in zip(loaded.layers, own.layers, strict=True):
        kept = 0 if ours.keys is None else ours.keys.shape[2]
        assert tokens == 0 or torch.equal(ours.keys, theirs.keys[:, :, tokens - kept : tokens])
        assert tokens == 0 or torch.equal(ours.values, theirs.values[:, :, tokens - kept : tokens])


def test_the_last_token_is_left_to_compute(llama: Any, kit: Any, open_cache: Open) -> None:
    cache = open_cache(llama)
    ids = kit.prompt(2 * CHUNK)
    cache.save(ids, kit.own_prefix(llama, ids, 2 * CHUNK))
    assert cache.load(ids).get_seq_length() == CHUNK
    assert cache.load(kit.prompt(2 * CHUNK + 1)).get_seq_length() == 2 * CHUNK
    assert cache.load(kit.prompt(1)).get_seq_length() == 0


def test_of_sliding_windows_only_what_they_reach_back_to_is_loaded(kit: Any, open_cache: Open) -> None:
    model = kit.gemma(sliding_window=40)  # less than a chunk
    ids, cache = kit.prompt(PROMPT), open_cache(model)
    cache.save(ids, kit.own_prefix(model, ids, PROMPT))
    loaded = cache.load(ids)
    token_bytes = 2 * 2 * 32 * 2  # keys and values, heads, size, bfloat16
    assert cache.statistics().store.loaded_bytes == token_bytes * (5 * CHUNK + 5 * 39)
    own = kit.own_prefix(model, ids, 5 * CHUNK)
    kit.assert_same(kit.answer(model, ids, loaded), kit.answer(model, ids, own))


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("tokens", [CHUNK, 5 * CHUNK])
def test_a_static_cache_is_filled_as_the_model_fills_it(
    name: str, tokens: int, kit: Any, llama: Any, gemma: Any, open_cache: Open
) -> None:
    from transformers import StaticCache

    model = {"llama": llama, "gemma": gemma}[name]
    ids, cache = kit.prompt(tokens + 19), open_cache(model)
    cache.save(ids, kit.own_prefix(model, ids, tokens))

    def static() -> Any:
        return StaticCache(config=model.config, max_cache_len=tokens + 40)

    loaded = cache.load(ids, into=static())
    assert int(loaded.get_seq_length()) == tokens
    own = kit.own_prefix(model, ids, tokens, static())
    kit.assert_same(kit.answer(model, ids, loaded), kit.answer(model, ids, own))
    with pytest.raises(RefusedError, match="unused"):
        cache.load(ids, into=loaded)


def test_a_static_cache_of_full_attention_is_saved(llama: Any, kit: Any, open_cache: Open) -> None:
    from transformers import StaticCache

    ids, cache = kit.prompt(PROMPT), open_cache(llama)
    static = StaticCache(config=llama.config, max_cache_len=PROMPT + 40)
    kit.answer(llama, ids, static)
    assert cache.save(ids, static) == 5 * CHUNK
    loaded = cache.load(ids)
    assert loaded.get_seq_length() == 5 * CHUNK


def test_windows_that_a_cache_has_dropped_are_not_stored_and_said_so_once(
    gemma: Any, kit: Any, open_cache: Open, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import DynamicCache

    ids, cache = kit.prompt(PROMPT), open_cache(gemma)
    for _ in range(2):
        assert cache.save(ids, kit.own_prefix(gemma, ids, PROMPT, DynamicCache(config=gemma.config))) == 0
    assert cache.statistics().refused == {"windows dropped": 2}
    assert caplog.text.count("sliding windows have dropped tokens") == 1


def test_rows_with_one_prefix_share_what_was_loaded(llama: Any, kit: Any, open_cache: Open) -> None:
    import torch

    ids, cache = kit.prompt(PROMPT), open_cache(llama)
    cache.save(ids, kit.own_prefix(llama, ids, 5 * CHUNK))
    rows = ids.repeat(2, 1)
    rows[1, -5:] = kit.prompt(5, seed=9)
    with pytest.raises(RefusedError, match="batch_repeat_interleave"):
        cache.load(rows)
    loaded, own = cache.load(ids), kit.own_prefix(llama, ids, 5 * CHUNK)
    for past in (loaded, own):
        past.batch_repeat_interleave(2)
    answered = kit.answer(llama, rows, loaded)
    kit.assert_same(answered, kit.answer(llama, rows, own))
    with pytest.raises(RefusedError, match="2 sequences"):
        cache.save(ids, loaded)
    assert torch.equal(answered[0][:, :PROMPT], rows)


def test_a_damaged_part_is_computed_again(llama: Any, kit: Any, open_cache: Open, tmp_path: Path) -> None:
    import torch

    node = Node(settings(tmp_path))
    try:
        node.start()
        ids, cache = kit.prompt(PROMPT), open_cache(llama, socket=node.settings.socket_path)
        own = kit.own_prefix(llama, ids, 5 * CHUNK)
        assert cache.save(ids, own) == 5 * CHUNK
        at_rest(node)
        piece = own.layers[1].keys[0, 0, 3 * CHUNK : 4 * CHUNK].contiguous()
        pool = node._app.state.arena.view(0, POOL_BYTES)
        at = bytes(pool).index(piece.view(torch.uint8).numpy().tobytes())
        pool[at + 7] ^= 1
        loaded = cache.load(ids)
        assert loaded.get_seq_length() == 3 * CHUNK
        own.crop(-2 * CHUNK)
        kit.assert_same(kit.answer(llama, ids, loaded), kit.answer(llama, ids, own))
        at_rest(node)
    finally:
        node.close()


def test_a_lost_node_costs_an_empty_cache_and_comes_back_by_itself(
    llama: Any, kit: Any, open_cache: Open, tmp_path: Path
) -> None:
    ids, cache = kit.prompt(PROMPT), open_cache(llama, socket=tmp_path / "node.sock")
    own = kit.own_prefix(llama, ids, PROMPT)
    assert (cache.save(ids, own), cache.load(ids).get_seq_length()) == (0, 0)
    process = NodeProcess(tmp_path / "node.sock")
    try:
        eventually(lambda: cache.save(ids, own) == 5 * CHUNK, "the node that came")
        assert cache.load(ids).get_seq_length() == 5 * CHUNK
        process.signal(signal.SIGKILL)
        process.process.wait()
        past = cache.load(ids)
        assert past.get_seq_length() == 0
        kit.answer(llama, ids, past)
        assert cache.save(ids, past) == 0
    finally:
        process.close()


def test_without_a_socket_the_hosts_node_is_used(
    llama: Any,
    kit: Any,
    stack: ExitStack,
    open_cache: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_SOCKET", str(tmp_path / "node.sock"))
    node = Node(settings(tmp_path))
    stack.callback(node.close)
    node.start()
    cache = open_cache(llama, socket=None, chunk_tokens=None)
    assert cache.chunk_tokens == 128  # on a CPU
    ids = kit.prompt(300)
    eventually(lambda: cache.save(ids, kit.own_prefix(llama, ids, 300)) == 256, "the node")
    assert [engine.label for engine in node.statistics().engines] == [
        "LlamaForCausalLM float32 transformers"
    ] * 2


def test_with_valkey_behind_it_a_pool_in_the_process_outlives_it(
    llama: Any, kit: Any, open_cache: Open
) -> None:
    with running_server() as server:
        ids, behind = kit.prompt(PROMPT), f"valkey://127.0.0.1:{server.port}"
        first = open_cache(llama, valkey=behind)
        assert first.save(ids, kit.own_prefix(llama, ids, 5 * CHUNK)) == 5 * CHUNK
        first.close()
        second = open_cache(llama, valkey=behind)
        loaded = second.load(ids)
        assert loaded.get_seq_length() == 5 * CHUNK
        own = kit.own_prefix(llama, ids, 5 * CHUNK)
        kit.assert_same(kit.answer(llama, ids, loaded), kit.answer(llama, ids, own))
        second.close()


def test_the_lines_of_the_page_work(llama: Any, kit: Any, open_cache: Open, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engines" / "transformers.md").read_text()
    lines = page.split("```python\n")[1].split("```")[0]
    assert open_cache  # patient
    script = tmp_path / "lines.py"
    script.write_text(lines.replace("2GiB", POOL))
    cache: Any = runpy.run_path(str(script), {"model": llama, "prompt": kit.prompt(300)})["cache"]
    try:
        assert cache.load(kit.prompt(300)).get_seq_length() == 256
    finally:
        cache.close()


def _example(socket: Path) -> tuple[list[int], str]:
    """Tokens found per question, and the last line."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "transformers_prefix_cache.py")]
    printed = subprocess.run(
        [*command, "--socket", str(socket)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    found = re.findall(r"(\d+) of 1020 tokens found, +\d+ ms", printed)
    return [int(tokens) for tokens in found], printed.splitlines()[-1]


def test_the_example_finds_in_a_second_process_what_the_first_computed(tmp_path: Path) -> None:
    process = NodeProcess(tmp_path / "node.sock", pool_bytes=128 << 20)
    try:
        first, _ = _example(process.socket_path)
        assert first[0] == 0
        whole = ([896] * 3, "2688 of 3060 prompt tokens were loaded, not computed")
        # A host too busy to answer within a second may cost one run, as it would cost a user.
        assert any(_example(process.socket_path) == whole for _ in range(3))
    finally:
        process.close()


def test_a_pool_in_this_process_is_bounded_and_leaves_nothing(
    llama: Any, kit: Any, open_cache: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = open_cache(llama, pool="64MiB")
    part_bytes = 3 * 2 * 2 * 16 * 4 * CHUNK
    for seed in range(2 * (64 << 20) // (31 * part_bytes)):  # twice what fits
        ids = kit.prompt(31 * CHUNK, seed=seed)
        past = cache.load(ids)
        assert past.get_seq_length() == 0
        _made_up(past, llama, 31 * CHUNK)
        assert cache.save(ids, past) == 31 * CHUNK
    assert [path.name[:8] for path in tmp_path.iterdir()] == ["kvferry-"]
    cache.close()
    cache.close()
    assert not list(tmp_path.iterdir())


def test_a_cache_that_nobody_holds_any_more_gives_its_pool_back(
    llama: Any, open_cache: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engines.transformers import PrefixCache

    assert open_cache  # patient
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = PrefixCache(llama, pool=POOL)
    assert len(list(tmp_path.iterdir())) == 1
    del cache
    gc.collect()
    assert not list(tmp_path.iterdir())


def _made_up(past: Any, model: Any, tokens: int) -> None:
    """KV that no model computed, to fill a pool quickly."""
    import torch

    for index in range(model.config.num_hidden_layers):
        kv = torch.randn(1, 2, tokens, 16)
        past.update(kv, kv, index)
