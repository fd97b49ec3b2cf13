"""Serves programs over a socket: each connection is a program with memory of its own."""

from __future__ import annotations

import array
import contextlib
import itertools
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from ptxemu.cuda.client import Client
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.cuda.protocol import ANSWER_HEAD, HEAD
from ptxemu.launch_log import Log

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
