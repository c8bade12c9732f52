"""Who gets to a node's socket: its own user, and the members of a group when there is one."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.users import WAIT_S, User

from kvferry.client.handshake import open_socket
from kvferry.errors import RefusedError

GROUP = 54100
OWNER = User(54001, 54001, (GROUP,))
MEMBER = User(54002, 54002, (54007, GROUP))
MEMBER_BY_ITS_OWN_GROUP = User(54003, GROUP)
ROOT = User(0, 0)
STRANGER = User(54004, 54004, (54007,))

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="needs root, to be several users: ./test names the missing check and fails in CI",
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everyone can enter and the node's user owns."""
    path = Path(tempfile.mkdtemp(prefix="kvferry-access-"))
    path.chmod(0o755)
    os.chown(path, OWNER.uid, OWNER.gid)
    yield path
    shutil.rmtree(path)


StartNode = Callable[..., Path]


@pytest.fixture
def start_node(place: Path, stack: ExitStack) -> StartNode:
    """Starts ``kvferry node`` as OWNER; returns its socket once it serves."""

    def start(*arguments: str, user: User = OWNER) -> Path:
        path = place / "run" / "node.sock"
        process = stack.enter_context(
            user.start(
                *("kvferry", "node", "--socket", str(path), "--pool", "64MiB", "--metrics-port", "0"),
                *arguments,
            )
        )
        stack.callback(process.wait, WAIT_S)
        stack.callback(process.terminate)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"at {path}" in line, line
        return path

    return start


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _open_up(path: Path) -> None:
    """What a careless administrator would do."""
    path.parent.chmod(0o777)
    path.chmod(0o777)


def test_without_a_group_nobody_else_can_enter_the_directory(start_node: StartNode) -> None:
    path = start_node()
    assert (_mode(path.parent), _mode(path)) == (0o700, 0o600)
    for user in (MEMBER, STRANGER):
        assert user.run("knock", str(path))[:2] == (1, "PermissionError\n")


def test_a_group_can_enter_and_connect_and_no_more(start_node: StartNode) -> None:
    path = start_node("--group", str(GROUP))
    assert (_mode(path.parent), _mode(path)) == (0o750, 0o660)
    assert path.parent.stat().st_gid == path.stat().st_gid == GROUP
    assert path.parent.stat().st_uid == path.stat().st_uid == OWNER.uid
    assert _mode(path.with_name("node.sock.lock")) == 0o600
    assert STRANGER.run("knock", str(path))[:2] == (1, "PermissionError\n")


@pytest.mark.parametrize("user", [MEMBER, MEMBER_BY_ITS_OWN_GROUP, OWNER], ids=lambda user: str(user.uid))
def test_an_engine_of_a_member_shares_the_pool(start_node: StartNode, user: User) -> None:
    path = start_node("--group", str(GROUP))
    code, out, err = user.run("engine", str(path), str(GROUP))
    assert (code, out) == (0, "complete\n"), err


def test_a_node_of_root_serves_the_members_of_a_group(start_node: StartNode, place: Path) -> None:
    os.chown(place, 0, 0)
    path = start_node("--group", str(GROUP), user=ROOT)
    code, out, err = MEMBER.run("engine", str(path), str(GROUP))
    assert (code, out) == (0, "complete\n"), err
    assert STRANGER.run("knock", str(path))[:2] == (1, "PermissionError\n")


def test_a_member_asks_for_the_status_by_naming_the_group(start_node: StartNode) -> None:
    path = start_node("--group", str(GROUP))
    question = ("kvferry", "status", "--socket", str(path))
    assert MEMBER.run(*question, "--group", str(GROUP))[0] == 0
    assert MEMBER.run(*question, KVFERRY_GROUP=str(GROUP))[0] == 0
    code, out, err = MEMBER.run(*question)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--group" in err


def test_an_engine_that_was_not_told_of_the_group_does_not_trust_the_node(start_node: StartNode) -> None:
    path = start_node("--group", str(GROUP))
    code, out, _ = MEMBER.run("engine", str(path), "")
    assert code == 1
    assert f"belongs to user {OWNER.uid}, not to user {MEMBER.uid}" in out


@pytest.mark.parametrize("user", [STRANGER, MEMBER], ids=["stranger", "member of a group not named"])
def test_the_kernels_word_counts_where_the_modes_let_everyone_in(start_node: StartNode, user: User) -> None:
    path = start_node(*(("--group", str(GROUP)) if user is STRANGER else ()))
    _open_up(path)
    code, out, _ = user.run("knock", str(path))
    assert code == 0
    assert f"not user {user.uid}" in out
    code, out, err = OWNER.run("kvferry", "status", "--json", "--socket", str(path))
    assert code == 0, err
    assert '"foreign-user": 1' in out


def test_a_socket_of_somebody_outside_the_group_is_not_trusted(place: Path, stack: ExitStack) -> None:
    place.chmod(0o777)
    for user, trusted in ((STRANGER, False), (MEMBER, True)):
        path = place / str(user.uid)
        pretender = stack.enter_context(user.start("pretend", str(path)))
        stack.callback(pretender.terminate)
        assert pretender.stdout is not None
        assert pretender.stdout.readline() == "listening\n"
        if trusted:
            open_socket(path, WAIT_S, group=GROUP).close()
            with pytest.raises(RefusedError, match="not trusted"):
                open_socket(path, WAIT_S)
        else:
            with pytest.raises(RefusedError, match=f"belongs to user {user.uid}"):
                open_socket(path, WAIT_S, group=GROUP)


def test_a_node_outside_the_group_does_not_start(place: Path) -> None:
    path = place / "run" / "node.sock"
    node = ("kvferry", "node", "--socket", str(path), "--pool", "64MiB", "--metrics-port", "0")
    code, _, err = OWNER.run(*node, "--group", "54999")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is not a member of it" in err
    assert not path.exists()


def test_a_directory_that_the_group_cannot_enter_is_refused_with_the_way_out(place: Path) -> None:
    place.chmod(0o700)
    node = ("kvferry", "node", "--socket", str(place / "node.sock"), "--pool", "64MiB", "--metrics-port", "0")
    code, _, err = OWNER.run(*node, "--group", str(GROUP))
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"chgrp {GROUP}" in err


def test_a_group_that_does_not_exist_is_named(place: Path) -> None:
    for argv in (("node", "--pool", "64MiB"), ("status", "--socket", str(place / "x"))):
        code, _, err = OWNER.run("kvferry", *argv, "--group", "no-such-group")
        assert (code, len(err.splitlines())) == (2, 1)
        assert "no-such-group" in err


def test_the_group_that_stands_for_unknown_ones_is_refused(place: Path) -> None:
    overflow = Path("/proc/sys/kernel/overflowgid").read_text().strip()
    code, _, err = OWNER.run("kvferry", "status", "--socket", str(place / "x"), "--group", overflow)
    assert (code, len(err.splitlines())) == (2, 1)
