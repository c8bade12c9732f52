"""Passwords, users and permissions: whom Valkey turns away learns why in one line, at start or later."""

import contextlib
from collections.abc import Iterator

import pytest
from tests.servers import Cluster, Server, must, running_server
from tests.tiers.admission import OPTIONS, PASSWORD, Refused, round_trip, works

from kvferry.testing.tier_contract import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.acl import COMMANDS
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

# ---- passwords and users


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with a password, and a user of each kind."""
    with running_server(*OPTIONS, password=PASSWORD) as server:
        must(server.ask("ACL", "SETUSER", "kvferry", "on", f">{PASSWORD}", "~kvf1:*", "+@all"))
        must(server.ask("ACL", "SETUSER", "disabled", "off", f">{PASSWORD}", "~kvf1:*", "+@all"))
        yield server


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("", "", ("wants a password", "KVFERRY_VALKEY_PASSWORD")),
        ("", "wrong", ("the default user", "WRONGPASS")),
        ("kvferry@", "wrong", ("'kvferry'", "WRONGPASS")),
        ("kvferry@", "", ("'kvferry'", "without a password")),
        ("nobody@", PASSWORD, ("'nobody'", "check the user")),
        ("disabled@", PASSWORD, ("'disabled'", "check the user")),
    ],
    ids=["none given", "wrong", "wrong of a user", "none of a user", "unknown user", "disabled user"],
)
def test_a_wrong_login_is_named(
    guarded: Server, refused: Refused, user: str, password: str, words: tuple[str, ...]
) -> None:
    line = refused(f"valkey://{user}127.0.0.1:{guarded.port}", password)
    assert f"127.0.0.1:{guarded.port}" in line
    assert not [word for word in words if word not in line]


def test_a_password_that_nobody_asked_for_is_named(server: Server, refused: Refused) -> None:
    assert "the default user has none" in refused(server.url, PASSWORD)


def test_a_mistake_is_tried_once(guarded: Server, refused: Refused) -> None:
    def connections() -> int:
        info = must(guarded.ask("INFO", "stats"))
        assert isinstance(info, bytes)
        return int(info.split(b"total_connections_received:")[1].split()[0])

    before = connections()
    refused(f"valkey://127.0.0.1:{guarded.port}", "wrong")
    assert connections() == before + 2  # that one, and the question


# ---- permissions


@contextlib.contextmanager
def limited(server: Server, *rules: str) -> Iterator[str]:
    """The URL of a user with the documented permissions, but for these."""
    grants = [f"+{name}" for name in COMMANDS]
    must(server.ask("ACL", "SETUSER", "few", "reset", "on", f">{PASSWORD}", "~kvf1:*", *grants, *rules))
    try:
        yield f"valkey://few@127.0.0.1:{server.port}"
    finally:
        server.ask("ACL", "DELUSER", "few")


@pytest.mark.parametrize("name", ["get", "set", "touch", "unlink"])
def test_a_missing_permission_is_named_at_start(server: Server, refused: Refused, name: str) -> None:
    with limited(server, f"-{name}") as url:
        line = refused(url, PASSWORD)
    assert f"user 'few' may not run {name}" in line
    assert "ACL SETUSER" in line
    assert server.key_names() == []


@pytest.mark.parametrize("name", ["psetex", "pexpire"])
def test_a_permission_to_let_values_expire_is_needed_where_the_server_goes_by_that(
    server: Server, refused: Refused, name: str
) -> None:
    with limited(server, f"-{name}") as url:
        works(url, PASSWORD)
        must(server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"))
        try:
            assert f"may not run {name}" in refused(url, PASSWORD)
        finally:
            must(server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))


@pytest.mark.parametrize("name", ["cluster|slots", "asking"])
def test_a_permission_that_a_cluster_needs_is_named_at_start(
    cluster: Cluster, refused: Refused, name: str
) -> None:
    with limited(cluster.servers[0], f"-{name}") as url:
        assert f"may not run {name}" in refused(url, PASSWORD)


def test_every_shard_of_a_cluster_must_know_the_user(cluster: Cluster, refused: Refused) -> None:
    with contextlib.ExitStack() as users:
        urls = [users.enter_context(limited(server)) for server in cluster.servers[:2]]
        line = refused(urls[0], PASSWORD)
        assert f"127.0.0.1:{cluster.servers[2].port}: the server refuses user 'few'" in line
        users.enter_context(limited(cluster.servers[2], "-set"))
        assert f"{cluster.servers[2].port}: user 'few' may not run set" in refused(urls[0], PASSWORD)


def test_all_missing_permissions_are_named_at_once(server: Server, refused: Refused) -> None:
    with limited(server, "-get", "-unlink") as url:
        assert "add +get +unlink there" in refused(url, PASSWORD)


def test_what_a_single_server_does_not_need_is_not_asked_for(server: Server) -> None:
    for rules in (("-cluster|slots", "-asking"), ("-info", "-asking")):
        with limited(server, *rules, "-client|setname", "-ping") as url:
            works(url, PASSWORD)


def test_without_info_a_cluster_is_recognised_by_its_map(cluster: Cluster) -> None:
    with contextlib.ExitStack() as users:
        urls = [users.enter_context(limited(server, "-info")) for server in cluster.servers]
        works(urls[0], PASSWORD)


def test_without_info_and_the_map_nobody_can_tell_a_cluster(server: Server, refused: Refused) -> None:
    with limited(server, "-info", "-cluster|slots") as url:
        assert "may not run cluster|slots" in refused(url, PASSWORD)


@pytest.mark.parametrize(
    ("rules", "stored"),
    [(("-touch",), False), (("-get",), True), (("-set",), False), (("resetkeys", "~other:*"), False)],
    ids=["touch", "get", "set", "keys"],
)
def test_a_permission_lost_later_is_a_failure_with_a_name_and_not_a_miss(
    server: Server, caplog: pytest.LogCaptureFixture, rules: tuple[str, ...], stored: bool
) -> None:
    ref, data = some_ref(1000, 3), some_bytes(1000, 3)
    with limited(server) as url:
        tier = ValkeyTier.connect(ValkeySettings(parse_url(url, password=PASSWORD)))
        try:
            round_trip(tier)
            must(server.ask("ACL", "SETUSER", "few", *rules))
            before = tier.statistics()
            outcomes = store_all(tier, [(ref, data)])
            outcomes += [result.outcome for result, _ in fetch_all(tier, [some_ref(1000, 1)])]
            after = tier.statistics()
        finally:
            tier.close()
    assert Outcome.REFUSED in outcomes
    assert (outcomes[0] is Outcome.OK) is stored
    assert after.failed["not_allowed"] > before.failed.get("not_allowed", 0)
    assert after.missed_parts == before.missed_parts
    assert "NOPERM" in after.detail["denied"]
    denials = [record.message for record in caplog.records if "NOPERM" in record.message]
    assert len(denials) == len(set(denials)) >= 1
