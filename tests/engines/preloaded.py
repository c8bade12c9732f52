"""Starts Python processes that have torch and vLLM imported already.

Most of an engine's start is imports, in each of its processes. Here one process imports once, and forks a
copy of itself for each process that is asked for. The copy takes descriptors, environment, directory and
process group from whoever asked, and runs what ``python ARGUMENTS`` would. What it starts in turn with the
start method "spawn" is a copy of the same process.

    a test ------------- Request --> the preloaded process == fork ==> an engine's driver
    an engine's driver - Request -->          "            == fork ==> its core
    its core ----------- Request -->          "            == fork ==> its workers

A copy differs from a new interpreter in this: what torch and vLLM do at import happened once for all copies,
all have one seed of ``hash()``, OpenMP has one thread, and modules are not taken apart at the end. kvferry is
imported after the fork. ``start_new`` is for tests to which this matters; the soak starts its servers as a
user does, too.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import socket as socketlib
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import popen_spawn_posix, resource_tracker, util
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from unittest.mock import patch

MODULES = (
    "compressed_tensors",
    "torch",
    "transformers.modeling_layers",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # read as the libraries are loaded
INSPECTION = ("-m", "vllm.model_executor.models.registry")
STREAMS = (0, 1, 2)
FIRST_OF_OURS = 512  # no descriptor that is asked for is as high
MAX_DESCRIPTORS = 64
NUMBER = struct.Struct("q")


class Request(NamedTuple):
    """What goes over the socket, beside the descriptors.

    arguments: of ``python``, from -m or -c on. numbers: that the descriptors are to have. group: the process
    group to join; 0: one of its own.
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    numbers: list[int]
    group: int = 0


class Copy:
    """A process that was asked for. Its parent is the preloaded process, which tells when it ends."""

    def __init__(self, address: str, request: Request, descriptors: Sequence[int]) -> None:
        self._connection = socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM)
        self._connection.connect(address)
        body = json.dumps(request).encode()
        socketlib.send_fds(self._connection, [NUMBER.pack(len(body))], list(descriptors))
        self._connection.sendall(body)
        self._request = request
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self, timeout_s: float | None = 0) -> int | None:
        """Its exit status, negative: a signal; None while it runs. timeout_s: None waits for its end."""
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            self.returncode = self._number()
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As ``subprocess.Popen`` has it."""
        status = self.poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._request.arguments, timeout or 0)
        return status

    def _number(self) -> int:
        data = self._connection.recv(NUMBER.size, socketlib.MSG_WAITALL)
        if len(data) != NUMBER.size:
            raise RuntimeError("the preloaded process ended")
        number: int = NUMBER.unpack(data)[0]
        return number


class Piped(NamedTuple):
    """A process with pipes. It leads a group of its own."""

    process: "Copy | subprocess.Popen[bytes]"
    stdin: IO[bytes]
    stdout: IO[bytes]


class Preloaded:
    """Starts the process at once; who asks waits for its imports. ``close`` ends it, copies live on."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvferry-preloaded-")
        self._address = f"{self._directory.name}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.preloaded", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env={**environment, **ONE_THREAD},
            start_new_session=True,
        )
        self._is_ready = False

    def start(
        self, arguments: Sequence[str], *, errors: int, environment: Mapping[str, str], directory: Path
    ) -> Piped:
        """A copy with pipes. errors: the descriptor that it writes standard error to."""
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        try:
            streams = (its_input, its_output, errors)
            copy = self.copy(arguments, streams=streams, environment=environment, directory=directory)
        finally:
            os.close(its_input)
            os.close(its_output)
        return Piped(copy, open(our_output, "wb"), open(our_input, "rb"))

    def copy(
        self,
        arguments: Sequence[str],
        *,
        streams: Sequence[int],
        environment: Mapping[str, str],
        directory: Path,
    ) -> Copy:
        """A copy that leads a group of its own. streams: its standard input, output and error."""
        if not self._is_ready:
            assert self._process.stdout is not None
            assert self._process.stdout.readline(), "torch and vLLM could not be imported"
            self._is_ready = True
        request = Request(list(arguments), dict(environment), str(directory), list(STREAMS))
        return Copy(self._address, request, streams)

    def close(self) -> None:
        """End it."""
        self._process.communicate()
        self._directory.cleanup()


def start_new(
    arguments: Sequence[str], *, errors: int, environment: Mapping[str, str], directory: Path
) -> Piped:
    """A new interpreter, as a user starts it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=directory,
        env=dict(environment),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return Piped(process, process.stdin, process.stdout)


# -- in the preloaded process --------------------------------------------------------------------------


class Nursery:
    """Forks for whoever asks. alive: at its end when nobody will ask any more."""

    def __init__(self, listener: socketlib.socket, alive: int) -> None:
        self._listener, self._alive = listener, alive
        self._copies: dict[int, tuple[int, socketlib.socket]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(alive, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Returns in each copy, with what it is to do, and at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._alive:
                    return None
                if key.fd in self._copies:
                    self._ended(key.fd)
                elif (request := self._fork()) is not None:
                    return request

    def _fork(self) -> Request | None:
        """In the copy: what was asked for."""
        connection = self._listener.accept()[0]
        request, descriptors = _received(connection)
        pid = os.fork() if request is not None else -1
        if request is not None:
            with contextlib.suppress(OSError):  # both do, so that neither goes on before it is done
                os.setpgid(pid, request.group)
        if not pid:
            connection.close()
            self._close()
            _take_place(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        if request is None:
            connection.close()
            return None
        end = os.pidfd_open(pid)
        self._copies[end] = pid, connection
        self._selector.register(end, selectors.EVENT_READ)
        _tell(connection, pid)
        return None

    def _ended(self, end: int) -> None:
        pid, connection = self._copies.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        connection.close()

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        os.close(self._alive)
        for end, (_, connection) in self._copies.items():
            os.close(end)
            connection.close()


def _received(connection: socketlib.socket) -> tuple[Request | None, list[int]]:
    """What is asked for, and its descriptors; None: whoever asked was killed meanwhile."""
    head, descriptors, _, _ = socketlib.recv_fds(connection, NUMBER.size, MAX_DESCRIPTORS)
    length = NUMBER.unpack(head)[0] if len(head) == NUMBER.size else 0
    body = connection.recv(length, socketlib.MSG_WAITALL)
    return Request(*json.loads(body)) if length and len(body) == length else None, list(descriptors)


def _tell(connection: socketlib.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked may have been killed
        connection.sendall(NUMBER.pack(number))


# -- in its copies -------------------------------------------------------------------------------------


def _ask(address: str, arguments: Sequence[str], descriptors: Collection[int]) -> Copy:
    """A copy in the place of a process that this one would have started."""
    numbers = sorted(descriptors)
    request = Request(list(arguments), dict(os.environ), os.getcwd(), numbers, os.getpgrp())
    return Copy(address, request, numbers)


def _take_place(request: Request, descriptors: Sequence[int]) -> None:
    """Of the interpreter that would have been started."""
    if os.getpgrp() != (request.group or os.getpid()):  # it was killed meanwhile
        os._exit(1)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_OF_OURS) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, request.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    if "GOMP_CPU_AFFINITY" in request.environment:  # which OpenMP heeds as it is loaded
        os.sched_setaffinity(0, set(map(int, request.environment["GOMP_CPU_AFFINITY"].split())))


class CopyingPopen(popen_spawn_posix.Popen):
    """How the start method "spawn" makes processes: copies instead of new interpreters."""

    address = ""

    def _launch(self, process_obj: Any) -> None:
        resource_tracker.ensure_running()  # an interpreter, which the next line would prevent
        with patch.object(util, "spawnv_passfds", self._ask):
            super()._launch(process_obj)

    def _ask(self, program: Any, command: Sequence[Any], descriptors: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in command]
        self._copy = _ask(self.address, words[words.index("-c") :], {*STREAMS, *descriptors})
        return self._copy.pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._copy.poll(0 if flag == os.WNOHANG else None)
        return self.returncode


def run(arguments: Sequence[str]) -> None:
    """As ``python ARGUMENTS``."""
    kind, what, *words = arguments
    sys.argv = [kind, *words]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(what, main.__dict__)  # noqa: S102  this is what -c means


def _end(act: Callable[[], None]) -> NoReturn:
    """Act, and end as an interpreter does but for taking every module apart, which takes seconds."""
    status: Any = None
    try:
        act()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else status is not None)


def main(address: str, *arguments: str) -> None:
    """Import, and serve until standard input ends. arguments: ask it to run these instead."""
    if arguments:
        sys.exit(_ask(address, arguments, STREAMS).wait())
    alive = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, FIRST_OF_OURS)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be copied"
    assert not any(name.partition(".")[0] == "kvferry" for name in sys.modules)
    gc.freeze()  # else each collection of a copy would have to copy all memory
    CopyingPopen.address = address
    popen_spawn_posix.Popen = CopyingPopen
    registry = sys.modules["vllm.model_executor.models.registry"]  # which looks at a model in a process
    registry._SUBPROCESS_COMMAND = [sys.executable, "-m", "tests.engines.preloaded", address, *INSPECTION]
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        request = Nursery(listener, alive).serve()
    if request is not None:
        run(request.arguments)


if __name__ == "__main__":
    _end(lambda: main(*sys.argv[1:]))
