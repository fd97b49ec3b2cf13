"""TVM-FFI functions that were exported to object files, as libraries do to cache compilations.

An object file holds no PTX. While an emulation is active the PTX of what is exported is written
beside it (`NAME.o.ptx`), and what is loaded is emulated with that; a file without is refused, for
calling it would need the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptxemu.cutedsl.driver import PtxImage
from ptxemu.cutedsl.host_function import FfiHostFunction, MissingPtxError, ptx_of

Call = Callable[[FfiHostFunction, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a host function with (its keyword wrapper, args, kwargs)."""


def _ptx_path(path: str | Path) -> Path:
    return Path(f"{path}.ptx")


def keep_ptx(compiled: Any, object_path: str | Path) -> None:
    """Write the PTX of an exported function beside its object file."""
    _ptx_path(object_path).write_text(ptx_of(compiled))


class ExportedModule:
    """What `cute.runtime.load_module` returns while an emulation is active."""

    def __init__(self, path: str | Path, call: Call) -> None:
        """Load an object file.

        Raises:
            MissingPtxError: it was exported without its PTX.
        """
        ptx_path = _ptx_path(path)
        if not ptx_path.is_file():
            raise MissingPtxError(
                f"{path} holds a compiled function without PTX: delete it (or switch the cache it "
                "is from off), so that it is compiled again inside ptxemu.cutedsl.emulate(...)"
            )
        self._path = Path(path)
        self._image = PtxImage(ptx_path.read_text(), self._path.name)
        self._call = call
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The exported function `name`."""
        if name not in self._functions:
            runnable = FfiHostFunction(name, self._path.read_bytes(), self._image)
            self._functions[name] = lambda *args, **kwargs: self._call(runnable, None, args, kwargs)
        return self._functions[name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The exported function `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]
