"""The fault proxy does what it says, at the byte where it says it, and leaves nothing behind."""

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.errors import ClosedError, RefusedError
from kvferry.testing.faults import Corrupt, Cut, Ending, Insert
from kvferry.testing.proxy import Proxy, obey
from kvferry.testing.relay import Side

WAIT_S = 60.0
DATA = bytes(range(256)) * 400


class Echo:
    """Sends every byte back and keeps what it got; ``ended`` says how its connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.got: list[bytearray] = []
        self.ended: list[str] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            self.got.append(bytearray())
            self._threads.append(threading.Thread(target=self._serve, args=(sock, self.got[-1])))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket, got: bytearray) -> None:
        try:
            while data := sock.recv(1 << 16):
                got += data
                sock.sendall(data)
            self.ended.append("end")
        except OSError as error:
            self.ended.append(type(error).__name__)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", echo.port)) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as made:
        yield made


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)


def fate(proxy: Proxy) -> str:
    """How a connection ends that is reset before it carries anything."""
    try:
        with connect(proxy) as sock:
            return read_to_end(sock)[1]
    except ConnectionResetError as error:  # so early that connecting already fails
        return type(error).__name__


def read(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or those before the end."""
    found = bytearray()
    while len(found) < nbytes and (more := sock.recv(nbytes - len(found))):
        found += more
    return bytes(found)


def read_to_end(sock: socket.socket) -> tuple[bytes, str]:
    """All bytes, and how it ended."""
    found = b""
    try:
        while more := sock.recv(1 << 16):
            found += more
    except OSError as error:
        return found, type(error).__name__
    return found, "end"


def until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.005)


def test_untouched_it_passes_every_byte_and_the_end_both_ways(client: socket.socket, echo: Echo) -> None:
    client.sendall(DATA)
    client.shutdown(socket.SHUT_WR)
    assert read_to_end(client) == (DATA, "end")
    assert bytes(echo.got[0]) == DATA


def test_many_megabytes_pass_while_nobody_reads_for_a_while(client: socket.socket) -> None:
    big = DATA * 400
    sender = threading.Thread(target=client.sendall, args=(big,))
    sender.start()
    assert read(client, len(big)) == big
    sender.join()


@pytest.mark.parametrize("after", [0, 1, 999, 65_536, 100_000])
@pytest.mark.parametrize(
    ("how", "seen"), [(Ending.CLOSE, "end"), (Ending.RESET, "ConnectionResetError")], ids=["close", "reset"]
)
def test_a_cut_of_replies_lets_exactly_so_many_bytes_pass(
    proxy: Proxy, client: socket.socket, after: int, how: Ending, seen: str
) -> None:
    armed = proxy.replies.once(Cut(after, how))
    client.sendall(DATA)
    assert read_to_end(client) == (DATA[:after], seen)
    assert armed.fired == 1


@pytest.mark.parametrize("after", [0, 1, 70_000])
def test_a_cut_of_requests_lets_exactly_so_many_bytes_reach_the_server(
    proxy: Proxy, client: socket.socket, echo: Echo, after: int
) -> None:
    proxy.requests.once(Cut(after, Ending.RESET))
    client.sendall(DATA)
    until(lambda: bool(echo.ended))
    assert bytes(echo.got[0]) == DATA[:after]


def test_a_cut_happens_once_and_counts_over_connections(proxy: Proxy) -> None:
    armed = proxy.replies.once(Cut(150))
    with connect(proxy) as first, connect(proxy) as second:
        first.sendall(DATA[:100])
        assert read(first, 100) == DATA[:100]
        second.sendall(DATA[:100])
        assert read_to_end(second)[0] == DATA[:50]
        first.sendall(DATA[:100])
        assert read(first, 100) == DATA[:100]
    assert armed.fired == 1


def test_a_fault_of_every_connection_counts_from_its_first_byte(proxy: Proxy) -> None:
    armed = proxy.replies.always(Cut(7))
    for _ in range(3):
        with connect(proxy) as sock:
            sock.sendall(DATA)
            assert read_to_end(sock)[0] == DATA[:7]
    proxy.heal()
    with connect(proxy) as sock:
        sock.sendall(DATA)
        assert read(sock, len(DATA)) == DATA
    assert armed.fired == 3


@pytest.mark.parametrize(("after", "nbytes"), [(0, 1), (5, 3), (65_530, 100), (102_399, 1)])
def test_corruption_changes_exactly_those_bytes(
    proxy: Proxy, client: socket.socket, after: int, nbytes: int
) -> None:
    armed = proxy.replies.once(Corrupt(after, nbytes))
    client.sendall(DATA)
    found = read(client, len(DATA))
    changed = [at for at in range(len(DATA)) if found[at] != DATA[at]]
    assert changed == list(range(after, min(after + nbytes, len(DATA))))
    assert armed.fired == 1


def test_inserted_bytes_come_between_and_none_is_lost(proxy: Proxy, client: socket.socket) -> None:
    proxy.requests.once(Insert(1000, 16))
    client.sendall(DATA)
    found = read(client, len(DATA) + 16)
    assert found[:1000] + found[1016:] == DATA


def test_random_bytes_are_a_function_of_the_seed(echo: Echo) -> None:
    def inserted(seed: int) -> bytes:
        with Proxy(("127.0.0.1", echo.port), seed=seed) as proxy, connect(proxy) as sock:
            proxy.replies.once(Insert(0, 16))
            sock.sendall(b"x")
            return read(sock, 16)

    assert inserted(3) == inserted(3) != inserted(4)


def test_a_black_hole_holds_bytes_and_gives_them_when_it_ends(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    client.sendall(b"before")
    assert read(client, 6) == b"before"
    proxy.black_hole = True
    client.sendall(b"after")
    assert not select.select([client], [], [], 0.2)[0]
    assert bytes(echo.got[0]) == b"before"
    proxy.black_hole = False
    assert read(client, 5) == b"after"


def test_one_way_can_be_a_black_hole_alone(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.replies.black_hole = True
    client.sendall(b"heard")
    until(lambda: bytes(echo.got[0] if echo.got else b"") == b"heard")
    assert not select.select([client], [], [], 0.1)[0]
    proxy.heal()
    assert read(client, 5) == b"heard"


@pytest.mark.parametrize("ends", [Proxy.heal, Proxy.release])
def test_a_stall_at_a_byte_lasts_until_it_is_healed_or_released(
    proxy: Proxy, client: socket.socket, ends: Callable[[Proxy], None]
) -> None:
    proxy.replies.once(Cut(10, Ending.STALL))
    client.sendall(DATA)
    assert read(client, 10) == DATA[:10]
    assert not select.select([client], [], [], 0.1)[0]
    ends(proxy)
    assert read(client, len(DATA) - 10) == DATA[10:]


def test_a_release_leaves_all_else_as_it_is(proxy: Proxy, client: socket.socket) -> None:
    proxy.requests.latency_s = 0.05
    armed = proxy.replies.once(Corrupt(0, 1))
    proxy.release()
    assert (proxy.requests.latency_s, armed.fired) == (0.05, 0)
    client.sendall(b"x")
    assert read(client, 1) != b"x"


def test_a_server_that_vanishes_leaves_the_client_half_open(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    client.sendall(b"x")
    assert read(client, 1) == b"x"
    proxy.vanish(Side.SERVER)
    until(lambda: bool(echo.ended))
    client.sendall(DATA)
    assert not select.select([client], [], [], 0.2)[0]
    client.close()
    until(lambda: proxy.connections == 0)


def test_a_client_that_vanishes_leaves_the_server_half_open(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert read(sock, 1) == b"x"
        proxy.vanish(Side.CLIENT)
        assert read_to_end(sock) == (b"", "ConnectionResetError")
    assert echo.ended == []
    assert proxy.connections == 1


def test_vanishing_at_a_byte_lets_those_before_pass(proxy: Proxy, client: socket.socket) -> None:
    proxy.replies.once(Cut(10, Ending.VANISH))
    client.sendall(DATA[:100])
    assert read(client, 10) == DATA[:10]
    assert not select.select([client], [], [], 0.2)[0]


def test_latency_delays_bytes_and_does_not_limit_their_rate(proxy: Proxy, client: socket.socket) -> None:
    proxy.replies.latency_s = 0.3
    began = time.monotonic()
    client.sendall(DATA * 20)
    assert read(client, 1) == DATA[:1]
    assert time.monotonic() - began >= 0.3
    assert read(client, len(DATA) * 20 - 1) == (DATA * 20)[1:]


def test_a_rate_holds_over_all_connections_together(proxy: Proxy) -> None:
    proxy.replies.rate_bytes_s = 200_000.0
    with connect(proxy) as first, connect(proxy) as second:
        began = time.monotonic()
        for sock in (first, second):
            sock.sendall(DATA)
        for sock in (first, second):
            assert read(sock, len(DATA)) == DATA
        # The last chunk of each may pass at once: what is left takes at least so long.
        assert time.monotonic() - began >= (2 * len(DATA) - 2 * 65_536) / 200_000 - 0.05


def test_a_slow_close_delays_the_end_and_not_the_bytes(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.replies.close_delay_s = 0.3
    client.sendall(b"x")
    assert read(client, 1) == b"x"
    began = time.monotonic()
    client.shutdown(socket.SHUT_WR)
    until(lambda: bool(echo.ended))
    assert read_to_end(client) == (b"", "end")
    assert time.monotonic() - began >= 0.3


def test_reset_reaches_both_sides_and_later_connections_work(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    client.sendall(b"x")
    assert read(client, 1) == b"x"
    proxy.reset()
    assert read_to_end(client) == (b"", "ConnectionResetError")
    until(lambda: echo.ended == ["ConnectionResetError"])
    with connect(proxy) as sock:
        sock.sendall(b"y")
        assert read(sock, 1) == b"y"
    assert proxy.accepted == 2


def test_while_refusing_no_connection_lives(proxy: Proxy, echo: Echo) -> None:
    proxy.refusing = True
    assert fate(proxy) == "ConnectionResetError"
    assert not echo.got
    proxy.refusing = False
    with connect(proxy) as sock:
        sock.sendall(b"y")
        assert read(sock, 1) == b"y"


def test_a_server_that_is_not_there_resets_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with Proxy(("127.0.0.1", port)) as proxy:
        assert fate(proxy) == "ConnectionResetError"
        until(lambda: proxy.connections == 0)


def test_after_close_nothing_is_accepted_and_orders_are_refused(echo: Echo) -> None:
    proxy = Proxy(("127.0.0.1", echo.port))
    proxy.close()
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    with pytest.raises(ClosedError):
        proxy.reset()


def test_a_fault_before_the_first_byte_is_refused(proxy: Proxy) -> None:
    with pytest.raises(RefusedError):
        proxy.replies.once(Cut(-1))


@pytest.mark.parametrize(
    "line", ["", "explode", "replies", "replies cut", "both cut x", "vanish nobody", "refusing maybe"]
)
def test_a_command_that_is_not_understood_is_refused(proxy: Proxy, line: str) -> None:
    with pytest.raises(RefusedError, match="--help"):
        obey(proxy, line)


def test_commands_set_what_they_name(proxy: Proxy) -> None:
    for line in (
        "both latency_s 0.5",
        "replies rate_bytes_s 1e6",
        "requests close_delay_s 2",
        "requests black_hole on",
        "replies cut 5 reset",
        "replies corrupt 5 2",
        "requests insert 5",
        "refusing on",
        "vanish client",
        "release",
        "reset",
    ):
        obey(proxy, line)
    requests, replies = proxy.requests, proxy.replies
    assert (requests.latency_s, replies.latency_s, requests.close_delay_s) == (0.5, 0.5, 2.0)
    assert (requests.black_hole, replies.black_hole, replies.rate_bytes_s) == (True, False, 1e6)
    assert proxy.refusing
    obey(proxy, "heal")
    assert (requests.latency_s, requests.black_hole, proxy.refusing) == (0.0, False, False)


def test_the_command_line_serves_obeys_and_ends_with_its_input(echo: Echo) -> None:
    command = [sys.executable, "-m", "kvferry.testing.proxy", "--target", f"127.0.0.1:{echo.port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
            for line, answer in (("replies cut 3\n", "ok\n"), ("nonsense\n", "error: ")):
                process.stdin.write(line)
                process.stdin.flush()
                assert process.stdout.readline().startswith(answer)
            sock.sendall(DATA)
            assert read_to_end(sock)[0] == DATA[:3]
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
