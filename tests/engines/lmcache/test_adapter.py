"""The adapter as LMCache loads it, with LMCache's own keys and objects, against real servers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.servers import Cluster, Server

from kvferry.testing.servers import running_tls_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`LoggingHandler` in:DeprecationWarning"),  # LMCache's, on late imports
]

Open = Callable[..., Any]


@pytest.fixture
def rig() -> Any:
    from tests.engines.lmcache import rig

    return rig


def test_the_three_event_descriptors_differ(rig: Any, opened: Open, valkey: Server) -> None:
    one, other = opened(valkey), opened(valkey)
    fds = [
        fd
        for a in (one, other)
        for fd in (a.get_store_event_fd(), a.get_lookup_and_lock_event_fd(), a.get_load_event_fd())
    ]
    assert len(set(fds)) == 6


def _another_loads_it(rig: Any, one: Any, other: Any) -> None:
    keys = [rig.key(n) for n in range(5)]
    shapes = [rig.SHAPE, (1, 1, 1, 1), (3, 1000, 1024), (2, 4, 256, 160), (1, 7, 13, 5)]
    for key, shape in zip(keys, shapes, strict=True):
        sent = rig.thing(key.chunk_hash[-1], shape)
        nbytes = sent.get_size()
        result = rig.store(one, [key], [sent])
        assert result.is_successful()
        assert result.bytes_transferred() == nbytes
        assert rig.look_up(other, [key, rig.key(99)], rig.desc(shape)) == [0]
        into = rig.thing(None, shape)
        assert rig.load(other, [key], [into]) == [0]
        assert rig.content(into) == rig.content(sent)


def test_what_one_server_stored_another_loads_byte_for_byte(rig: Any, opened: Open, valkey: Server) -> None:
    _another_loads_it(rig, opened(valkey), opened(valkey))


def test_a_cluster_holds_the_objects_on_all_its_shards(
    rig: Any, opened: Open, valkey_cluster: Cluster
) -> None:
    one, other = opened(valkey_cluster), opened(valkey_cluster)
    _another_loads_it(rig, one, other)
    keys = [rig.key(n) for n in range(24)]
    assert rig.store(one, keys, [rig.thing(n) for n in range(24)]).is_successful()
    assert all(server.key_names() for server in valkey_cluster.servers)
    into = [rig.thing(None) for _ in keys]
    assert rig.load(other, keys, into) == list(range(24))
    assert [rig.content(thing) for thing in into] == [rig.content(rig.thing(n)) for n in range(24)]


def test_over_tls_with_encryption_nothing_is_readable_in_valkey(
    rig: Any, opened: Open, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32 + "\n")
    keys.chmod(0o600)
    with running_tls_server() as (server, url):
        one = opened(url, encryption_key_file=str(keys))
        _another_loads_it(rig, one, opened(url, encryption_key_file=str(keys)))
        sent = rig.thing(3)
        assert rig.store(one, [rig.key(300)], [sent]).is_successful()
        names = server.key_names()
        assert names
        values = [server.ask("GET", name) for name in names]
        assert not [value for value in values if rig.content(sent)[:64] in value]
        assert rig.load(opened(url), [rig.key(300)], [rig.thing(None)]) == [], "no key, no object"
        one.close()


def test_a_password_comes_from_a_file_and_is_not_shown(rig: Any, opened: Open, tmp_path: Path) -> None:
    from kvferry.testing.servers import running_server

    password = tmp_path / "password"
    password.write_text("s3cret\n")
    password.chmod(0o600)
    with running_server(password="s3cret") as server:
        one = opened(f"valkey://127.0.0.1:{server.port}", valkey_password_file=str(password))
        _another_loads_it(rig, one, opened(server.url, valkey_password_file=str(password)))
        assert "s3cret" not in str(one.report_status())
        one.close()


@pytest.mark.parametrize(
    "difference",
    [
        {"model_name": "test/other"},
        {"kv_rank": 1},
        {"object_group_id": 1},
        {"cache_salt": "alice"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_every_field_of_lmcaches_name_tells_objects_apart(
    rig: Any, opened: Open, valkey: Server, difference: dict[str, Any]
) -> None:
    one = opened(valkey)
    other = rig.key(1, **difference)
    assert rig.store(one, [rig.key(1)], [rig.thing(1)]).is_successful()
    assert rig.look_up(one, [rig.key(1), other], rig.desc()) == [0]
    into = rig.thing(None)
    assert rig.load(one, [other], [into]) == []
    assert not any(rig.content(into)), "memory of a miss was written"


def test_servers_of_one_name_with_other_tensors_never_read_each_other(
    rig: Any, opened: Open, valkey: Server
) -> None:
    import torch

    one, other = opened(valkey), opened(valkey)
    keys = [rig.key(1)]
    assert rig.store(one, keys, [rig.thing(1)]).is_successful()
    equal_in_size = (rig.SHAPE[0], rig.SHAPE[2], rig.SHAPE[1], rig.SHAPE[3])
    for shape, dtype in ((rig.SHAPE, torch.float16), (equal_in_size, torch.bfloat16), ((8,), torch.uint8)):
        into = rig.thing(None, shape, dtype)
        assert rig.look_up(other, keys, rig.desc(shape, dtype)) == []
        assert rig.load(other, keys, [into]) == []
        assert not any(rig.content(into))
    assert rig.load(one, keys, [rig.thing(None)]) == [0], "asking for another kind must remove nothing"


def test_domains_and_weights_are_kept_apart(rig: Any, opened: Open, valkey: Server, tmp_path: Path) -> None:
    secret = tmp_path / "domain"
    secret.write_text("cd" * 32)
    secret.chmod(0o600)
    ours = opened(valkey)
    assert rig.store(ours, [rig.key(1)], [rig.thing(1)]).is_successful()
    for params in ({"domain": "other"}, {"domain_key_file": str(secret)}, {"weights": "v2"}):
        assert rig.look_up(opened(valkey, **params), [rig.key(1)], rig.desc()) == []


def test_a_look_up_without_a_layout_finds_what_this_server_has_met(
    rig: Any, opened: Open, valkey: Server
) -> None:
    one, other = opened(valkey), opened(valkey)
    assert rig.store(one, [rig.key(1)], [rig.thing(1)]).is_successful()
    assert rig.look_up(one, [rig.key(1), rig.key(2)]) == [0]
    assert rig.look_up(other, [rig.key(1)]) == [], "nobody has told it what the objects are"


def test_a_damaged_value_fails_its_object_alone_and_is_removed(
    rig: Any, opened: Open, valkey: Server
) -> None:
    one = opened(valkey)
    keys = [rig.key(n) for n in range(3)]
    assert rig.store(one, keys[:2], [rig.thing(0), rig.thing(1)]).is_successful()
    before = set(valkey.key_names())
    assert rig.store(one, keys[2:], [rig.thing(2)]).is_successful()
    (victim,) = [name for name in set(valkey.key_names()) - before if name.endswith(b":0")]
    value = bytearray(_value(valkey, victim))
    value[-1] ^= 1
    valkey.ask("SET", victim, bytes(value))
    into = [rig.thing(None) for _ in keys]
    assert rig.load(opened(valkey), keys, into) == [0, 1]
    assert [rig.content(thing) for thing in into[:2]] == [rig.content(rig.thing(n)) for n in (0, 1)]
    assert rig.look_up(one, keys, rig.desc()) == [0, 1]


def test_a_value_of_another_size_or_name_is_a_miss(rig: Any, opened: Open, valkey: Server) -> None:
    one = opened(valkey)
    keys = [rig.key(n) for n in range(2)]
    assert rig.store(one, keys, [rig.thing(0), rig.thing(1)]).is_successful()
    heads = [name for name in valkey.key_names() if name.endswith(b":0")]
    short, swapped = (_value(valkey, head) for head in heads)
    valkey.ask("SET", heads[0], short[:-1])
    valkey.ask("SET", heads[1], short)
    assert len(short) == len(swapped)
    assert rig.load(one, keys, [rig.thing(None), rig.thing(None)]) == []


def test_an_object_of_which_a_stripe_is_gone_is_absent(rig: Any, opened: Open, valkey: Server) -> None:
    one, shape = opened(valkey), (3, 1000, 1024)
    assert rig.store(one, [rig.key(1)], [rig.thing(1, shape)]).is_successful()
    stripes = valkey.key_names()
    assert len(stripes) > 1
    valkey.ask("UNLINK", next(name for name in stripes if name.endswith(b":1")))
    assert rig.look_up(one, [rig.key(1)], rig.desc(shape)) == []
    assert rig.load(one, [rig.key(1)], [rig.thing(None, shape)]) == []
    assert rig.store(one, [rig.key(1)], [rig.thing(1, shape)]).is_successful()
    into = rig.thing(None, shape)
    assert rig.load(one, [rig.key(1)], [into]) == [0]
    assert rig.content(into) == rig.content(rig.thing(1, shape))


def test_only_the_layouts_bytes_of_an_allocation_are_stored_and_written(
    rig: Any, opened: Open, valkey: Server
) -> None:
    one = opened(valkey)
    sent, into = rig.thing(1, room=4096), rig.thing(None, room=512)
    assert rig.store(one, [rig.key(1)], [sent]).is_successful()
    assert rig.load(one, [rig.key(1)], [into]) == [0]
    nbytes = sent.get_size()
    assert rig.content(into)[:nbytes] == rig.content(sent)[:nbytes]
    assert not any(rig.content(into)[nbytes:])


def test_an_empty_task_ends_at_once(rig: Any, opened: Open, valkey: Server) -> None:
    one = opened(valkey)
    assert rig.store(one, [], []).is_successful()
    assert rig.look_up(one, []) == []
    assert rig.load(one, [], []) == []


def test_a_store_that_is_refused_says_so_and_the_rest_is_kept(rig: Any, opened: Open) -> None:
    from kvferry.testing.servers import running_server

    with running_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as full:
        one = opened(full)
        keys = [rig.key(n) for n in range(24)]
        result = rig.store(one, keys, [rig.thing(n) for n in range(24)])
        assert not result.is_successful()
        assert result.bytes_transferred() == 0
        present = rig.look_up(one, keys, rig.desc())
        assert 0 < len(present) < 24
        into = [rig.thing(None) for _ in keys]
        assert rig.load(one, keys, into) == present
        assert all(rig.content(into[n]) == rig.content(rig.thing(n)) for n in present)
        one.close()


def _value(server: Server, name: bytes) -> bytes:
    reply = server.ask("GET", name)
    assert isinstance(reply, bytes)
    return reply


def eventually(condition: Callable[[], bool], what: str, *, within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, f"never happened: {what}"
        time.sleep(0.05)
