"""TVM-FFI functions that were exported to object files, as libraries do to cache compilations.

An object file holds no PTX. While an emulation is active the PTX of what is exported is kept in
ptxemu's own cache directory, under the hash of the object file, wherever that is moved to; what is
loaded is emulated with it. A file without PTX is refused, for calling it would need the GPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptxemu.cutedsl.host_function import FfiHostFunction, MissingPtxError, ptx_of
from ptxemu.driver.rules import PtxImage

Call = Callable[[FfiHostFunction, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a host function with (its keyword wrapper, args, kwargs)."""


def _ptx_path(code: bytes) -> Path:
    """Return the path of an object file's PTX in $PTXEMU_CACHE_DIR, by default ~/.cache/ptxemu."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("PTXEMU_CACHE_DIR") or Path(home, "ptxemu")
    return Path(root, "exported", f"{hashlib.sha256(code).hexdigest()}.ptx")


def keep_ptx(compiled: Any, object_path: str | Path) -> None:
    """Keep the PTX of a function that has been exported to `object_path`."""
    path = _ptx_path(Path(object_path).read_bytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ptx_of(compiled))


class ExportedModule:
    """The module that `cute.runtime.load_module` returns while an emulation is active."""

    def __init__(self, path: str | Path, arch: str | None, call: Call) -> None:
        """Load an object file for the device `arch`; None: for the one that it is of.

        A cache may know nothing of architectures and serve an object of another one. That is
        refused here and not at the first call: a cache compiles again what cannot be loaded.

        Raises:
            MissingPtxError: it was exported without its PTX.
            DriverError: it was compiled for another architecture.
        """
        self._code = Path(path).read_bytes()
        ptx_path = _ptx_path(self._code)
        if not ptx_path.is_file():
            raise MissingPtxError(
                f"{path} holds a compiled function without PTX: delete it (or switch the cache it "
                "is from off), so that it is compiled again inside ptxemu.cutedsl.emulate(...)"
            )
        self._image = PtxImage(ptx_path.read_text(), Path(path).name)
        self._image.check_target(arch)
        self._call = call
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The exported function `name`."""
        if name not in self._functions:
            runnable = FfiHostFunction(name, self._code, self._image)
            self._functions[name] = lambda *args, **kwargs: self._call(runnable, None, args, kwargs)
        return self._functions[name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The exported function `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]
