"""Runs a program as a process of its own, with the stand-in in the place of CUDA."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ptxemu.cuda.build import Standin, standin
from ptxemu.cuda.client import Client
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.cuda.protocol import ANSWER_HEAD, HEAD
from ptxemu.errors import UnreadableFileError
from ptxemu.launch_log import Log

# Serves programs over a socket: each connection is a program with memory of its own.

_MOST_PROGRAMS = 60
"""Maximum programs whose memories fit into the address space at once."""


class Server:
    """A socket, open inside a `with` block; launches of all programs run one after the other.

    Attributes:
        path: of the socket, for PTXEMU_SOCKET.
    """

    def __init__(self, log: Log, arch: str) -> None:
        self._log = log
        self._arch = arch
        self._folder = tempfile.TemporaryDirectory(prefix="ptxemu-")
        self.path = Path(self._folder.name) / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._one_at_a_time = threading.Lock()
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Server:
        """Start to listen."""
        self._socket.bind(str(self.path))
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Answer what is still being asked, and close."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._one_at_a_time:
            self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            number = next(self._numbers) % _MOST_PROGRAMS
            threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        """Answer one program until it ends."""
        with connection, contextlib.closing(EmulatedMemory(number)) as memory:
            client = Client(self._log, self._arch, memory)
            with contextlib.suppress(OSError, EOFError):
                files = array.array("i", [memory.file])
                connection.sendmsg([b"m"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
                while True:
                    self._answer(connection, client)

    def _answer(self, connection: socket.socket, client: Client) -> None:
        operation, size = HEAD.unpack(_receive(connection, HEAD.size))
        data = _receive(connection, size)
        with self._one_at_a_time:
            status, answer = client.handle(operation, data)
        connection.sendall(ANSWER_HEAD.pack(status, len(answer)) + answer)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


_PATIENCE_SECONDS = 0.5
"""Time that a program has to end after it is told to."""


def run_program(
    log: Log, command: Sequence[str], *, arch: str, output: IO[str] | None = None
) -> int:
    """Run `command` and whatever it starts; the launches of all go to `log`.

    Args:
        output: where the program's stdout goes; None: to this process's.

    Returns:
        its exit code; of one that a signal ended 128 + the signal's number, as a shell says.

    Raises:
        UnreadableFileError: there is no such program.
        NoCompilerError: the stand-in cannot be compiled.
    """
    program = _path_of(command[0])
    made = standin()
    with Server(log, arch) as server:
        environment = environment_for(made, str(server.path), os.environ)
        process = subprocess.Popen([program, *command[1:]], env=environment, stdout=output)
        try:
            code = process.wait()
        except KeyboardInterrupt as stop:
            log.interrupted(stop)
            _end(process)
            code = 0
        if code < 0:
            log.stop("stopped, for its program has ended")  # a launch that it waited for
    if log.interruption is not None:
        return log.interruption.exit_code
    if code < 0:
        log.note(f"the program was ended by {signal.Signals(-code).name}{_reason(-code)}")
        return 128 - code
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program, whatever it does about it."""
    process.terminate()
    try:
        process.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment_for(
    made: Standin, socket_path: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment in which programs find the stand-in."""
    found = dict(environment)
    found["PTXEMU_SOCKET"] = socket_path
    for name, first in (("LD_PRELOAD", made.library), ("LD_LIBRARY_PATH", made.folder)):
        rest = environment.get(name)
        found[name] = f"{first}:{rest}" if rest else str(first)
    return found


def _path_of(name: str) -> str:
    if os.sep not in name and os.path.isfile(name):  # a program of this folder, as in an IDE
        return os.path.abspath(name)
    found = shutil.which(name)
    if found is not None:
        return found
    if os.path.isdir(name):
        raise UnreadableFileError(f"{name}: a folder; expected a file of a program or Python")
    if os.path.isfile(name):
        raise UnreadableFileError(f"{name}: not a program that may be executed, nor a .py or .cu")
    raise UnreadableFileError(f"{name}: no such file")


def _reason(number: int) -> str:
    if number == signal.SIGSEGV:
        return " (does the host read or write device memory?)"
    return ""
