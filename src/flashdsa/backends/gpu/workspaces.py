"""Device memory that launches share: those of a stream, and those that a graph captures on one."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

logger = logging.getLogger("flashdsa.gpu")

GRAPHS = 64
"""CUDA graphs whose counters are 0 before they are captured; later graphs clear theirs."""

Workspace = tuple[Any, ...]
Make = Callable[["Tensor | None"], Workspace]
"""Makes a workspace with these counters, which are 0, or with its own: None."""


class _Captured(NamedTuple):
    capture: int
    stream: int
    workspace: Workspace


class Workspaces:
    """Workspaces of one device and one key. Launches of a workspace follow each other, and each
    leaves its counters at 0.

    So launches of a stream share one, and so do those that one graph captures on a stream. Nobody
    knows when a graph ends: counters that it got are never given to another one.
    """

    def __init__(self) -> None:
        """Start without a workspace."""
        self.of_stream: dict[int, Workspace] = {}
        self.spare: list[Tensor] = []
        """Counters for graphs; 0."""
        self._given: list[Tensor] = []
        """Counters that graphs have: a graph does not keep memory alive that existed before it."""
        self._captured: _Captured | None = None

    def of_capture(self, stream: int, make: Make) -> Workspace:
        """Workspace of the launches that are captured on this stream now."""
        capture, kept = capture_id(stream), self._captured
        if kept is not None and capture and kept[:2] == (capture, stream):
            return kept.workspace
        if self.spare:
            self._given.append(self.spare.pop())
            workspace = make(self._given[-1])
        else:
            workspace = make(None)
        self._captured = _Captured(capture, stream, workspace)
        return workspace


def capture_id(stream: int) -> int:
    """The driver's number of the capture on this stream; 0 if it does not say."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError) as error:
        logger.warning("the driver does not tell captures apart: %s", error)
        return 0
    ask.argtypes = [ctypes.c_void_p] * 6
    code = ask(stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None)
    return 0 if code else number.value
