"""What a real node says, shows and listens on: nothing of a key, prompt, salt, password or token."""

import base64
import contextlib
import re
import socket
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.domains import CHUNK_TOKENS
from tests.node.fleet import PART_BYTES, Engine, NodeProcess, eventually
from tests.servers import Server, free_ports, must, running_server

from kvferry import __version__
from kvferry.cli.main import main
from kvferry.client.admin import AdminClient
from kvferry.client.handshake import open_socket
from kvferry.client.messages import LoadEnd, NamespaceInfo, Reason
from kvferry.config import load_node_settings
from kvferry.frames import LENGTH
from kvferry.identity.chunks import ChunkChain, Extras
from kvferry.identity.domain import DomainKey, domain_tag
from kvferry.node.framing import encode
from kvferry.node.wire import PROTOCOL, Hello, Role

PASSWORD = "swordfish-at-valkey"
TOKEN = "opensesame-at-the-node"
WRONG = "abracadabra-at-nobody"
SALT = "cinnamon-of-a-user"
DOMAIN_KEY = b"vermilion-key-of-the-domain\x00\xff\xfe\xfd\xfc"
SEALING_KEY = b"turquoise-key-of-the-node\x00\xff\xfe\xfd\xfc\xfb\xfa"
PROMPT = 4_123_456_789  # a token id, as text and as the bytes that are hashed
LIMIT_S = 60.0


def _forms() -> dict[str, str]:
    """Every mark as it could show up, by what it is a mark of."""
    found: dict[str, str] = {"prompt": str(PROMPT), "prompt, hex": struct.pack("<I", PROMPT).hex()}
    secrets = {"password": PASSWORD, "token": TOKEN, "wrong token": WRONG, "salt": SALT}
    raw = {name: text.encode() for name, text in secrets.items()}
    raw |= {"domain key": DOMAIN_KEY, "encryption key": SEALING_KEY}
    for name, data in raw.items():
        found[name] = data[:8].decode()
        found[f"{name}, hex"] = data[:8].hex()
        found[f"{name}, base64"] = base64.b64encode(data)[:10].decode()
    return found


def shown(text: str) -> list[str]:
    """The marks in ``text``."""
    return [name for name, form in _forms().items() if form.lower() in text.lower()]


def test_a_mark_would_be_found() -> None:
    assert shown(f"AUTH kvferry {PASSWORD}") == ["password"]
    assert shown(f"key {SEALING_KEY.hex()}") == ["encryption key, hex"]
    assert shown(f"tokens [{PROMPT}]") == ["prompt"]


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as started:
        must(started.ask("ACL", "SETUSER", "kvferry", "on", f">{PASSWORD}", "~kvf1:*", "+@all"))
        yield started


class Guarded:
    """A node with every secret that there is, and an engine that knows them too."""

    def __init__(self, directory: Path, server: Server, stack: ExitStack) -> None:
        self.path = directory / "node.sock"
        self.port = free_ports(1)[0]
        files = {"token": TOKEN, "encryption": SEALING_KEY.hex(), "domain": DOMAIN_KEY.hex()}
        for name, text in files.items():
            (directory / name).write_text(f"{text}\n")
            (directory / name).chmod(0o600)
        self.arguments = (
            *("--valkey", f"valkey://kvferry@127.0.0.1:{server.port}"),
            *("--token-file", str(directory / "token"), "--metrics-port", str(self.port)),
            *("--encryption-key-file", str(directory / "encryption")),
        )
        self.node = NodeProcess(self.path, extra=self.arguments)
        stack.callback(self.node.close)
        eventually(self.path.exists, "the socket")
        self.key = DomainKey.from_file(directory / "domain")
        self.namespace = NamespaceInfo(
            domain_tag("payments", self.key.key_id) + b"one model...", (PART_BYTES,), CHUNK_TOKENS, "payments"
        )
        self.engine = Engine(self.path, self.namespace, name="vllm", token=TOKEN)
        stack.callback(self.engine.close)
        self.engine.connected()

    def digests(self) -> list[bytes]:
        """Of a prompt of marked tokens under a marked salt."""
        chain = ChunkChain(
            self.key,
            self.namespace.namespace,
            chunk_tokens=CHUNK_TOKENS,
            extras=Extras(cache_salt=SALT),
        )
        return chain.extend([PROMPT] * (2 * CHUNK_TOKENS))

    def metrics(self) -> str:
        """What Prometheus gets."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=LIMIT_S) as page:
            text: str = page.read().decode()
        return text


@pytest.fixture
def guarded(tmp_path: Path, server: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setenv("KVFERRY_VALKEY_PASSWORD", PASSWORD)
    started = Guarded(tmp_path, server, stack)
    monkeypatch.setenv("KVFERRY_TOKEN", TOKEN)  # for what people ask
    return started


def _attack(path: Path) -> str:
    """Connections that show marks in every place where they do not belong; what the node says to each."""
    hello = {"protocol": PROTOCOL, "version": __version__, "role": Role.WORKER, "token": TOKEN}
    frames = [
        encode(Hello(protocol=PROTOCOL, version=__version__, role=Role.WORKER, token=WRONG)),
        encode(Hello(protocol=PROTOCOL, version=__version__, role=Role.WORKER)),
        encode(Hello(protocol=PROTOCOL + 1, version="9", role=Role.WORKER, token=TOKEN)),
        LENGTH.pack(40) + WRONG.encode().ljust(40, b"\xc1"),
        encode(Hello(**hello)) + LENGTH.pack(3) + b"\xc1\xc1\xc1",  # type: ignore[arg-type]
    ]
    said = b""
    for frame in frames:
        with open_socket(path, LIMIT_S) as sock, contextlib.suppress(OSError):
            sock.sendall(frame)
            while data := sock.recv(1 << 16):
                said += data
    return said.decode("utf-8", "replace")


def test_no_output_shows_a_secret_or_a_prompt(
    guarded: Guarded,
    server: Server,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = guarded.digests()
    caplog.set_level("DEBUG")
    assert guarded.engine.save(chunks) == 2
    assert guarded.engine.load(guarded.engine.lookup(chunks, "request"), chunks) == [
        LoadEnd(Reason.COMPLETE, 2)
    ]
    with AdminClient(guarded.path, token=TOKEN) as admin:
        eventually(lambda: admin.status()["counters"]["stored_parts"] == 2, "stored in Valkey")
    process = Path(f"/proc/{guarded.node.process.pid}")
    said = {"refusals": _attack(guarded.path), "arguments": (process / "cmdline").read_text()}
    assert "token" in said["refusals"]

    def ask(when: str) -> None:
        said[f"metrics {when}"] = guarded.metrics()
        for question in (
            ["status"],
            ["status", "--json"],
            ["explain", "request"],
            ["explain", "r", "--json"],
        ):
            assert main([*question, "--socket", str(guarded.path)]) == 0
            said[f"{question} {when}"] = "".join(capsys.readouterr())

    ask("when all is well")
    must(server.ask("ACL", "SETUSER", "kvferry", "resetpass", f">{WRONG}"))
    must(server.ask("CLIENT", "KILL", "TYPE", "normal"))

    def refused_by_valkey() -> bool:
        main(["drop", "memory", "--socket", str(guarded.path)])
        guarded.engine.scheduler.end(guarded.engine.lookup(chunks, "refused").load_id)
        main(["status", "--socket", str(guarded.path)])
        return "WRONGPASS" in capsys.readouterr().out

    eventually(refused_by_valkey, "the refusal in the status")
    ask("when Valkey refuses the password")
    monkeypatch.setenv("KVFERRY_TOKEN", WRONG)
    assert main(["status", "--socket", str(guarded.path)]) == 2
    said["a wrong token"] = "".join(capsys.readouterr())

    guarded.node.process.terminate()
    assert guarded.node.process.stderr is not None
    said["the node's log"] = guarded.node.process.stderr.read().decode()
    assert "kvferry" in said["the node's log"]
    said["the engine's log"] = caplog.text
    assert {name: marks for name, text in said.items() if (marks := shown(text))} == {}


def test_what_holds_settings_does_not_show_secrets(guarded: Guarded) -> None:
    flags = dict(zip(guarded.arguments[::2], guarded.arguments[1::2], strict=True))
    settings = load_node_settings(
        {name[2:].replace("-", "_"): text for name, text in flags.items()},
        environ={"KVFERRY_VALKEY_PASSWORD": PASSWORD},
    )
    assert settings.token is not None
    assert settings.encryption_keys is not None
    things = [settings, settings.valkey, settings.token, settings.encryption_keys, guarded.key]
    things += [*settings.encryption_keys.keys, guarded.engine.worker, guarded.namespace]
    assert [thing for thing in things if shown(f"{thing!r}{thing}")] == []


def _inodes(pid: int) -> set[int]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                found.add(int(match[1]))
    return found


def _listening(pid: int) -> list[str]:
    """Addresses of TCP listeners and bound UDP sockets of a process."""
    mine = _inodes(pid)
    found = []
    for table, wanted in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == wanted and int(words[9]) in mine:
                address, port = words[1].split(":")
                host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                found.append(f"{table} {host}:{int(port, 16)}")
    return found


def test_a_node_listens_on_loopback_for_metrics_and_nowhere_else(guarded: Guarded) -> None:
    guarded.engine.save(guarded.digests())
    assert "kvferry_" in guarded.metrics()
    assert _listening(guarded.node.process.pid) == [f"tcp 127.0.0.1:{guarded.port}"]


def test_without_metrics_a_node_listens_at_its_socket_alone(tmp_path: Path, stack: ExitStack) -> None:
    node = NodeProcess(tmp_path / "node.sock")
    stack.callback(node.close)
    eventually((tmp_path / "node.sock").exists, "the socket")
    assert _listening(node.process.pid) == []
    mine = _inodes(node.process.pid)
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [words[7:] for words in unix if int(words[6]) in mine and int(words[3], 16) & 0x10000]
    assert listening == [[str(tmp_path / "node.sock")]]


def test_metrics_are_served_at_another_address_when_told_so(tmp_path: Path, stack: ExitStack) -> None:
    port = free_ports(1)[0]
    extra = ("--metrics-port", str(port), "--metrics-host", "127.0.0.2")
    node = NodeProcess(tmp_path / "node.sock", extra=extra)
    stack.callback(node.close)
    eventually(lambda: _listening(node.process.pid) == [f"tcp 127.0.0.2:{port}"], "the metrics")
