"""TVM-FFI functions that were exported to object files, as libraries do to cache compilations.

An object file holds no PTX. While an emulation is active the PTX of what is exported is kept in
ptxemu's own cache directory, under the hash of the object file, wherever that is moved to; what is
loaded is emulated with it. A file without PTX is refused, for calling it would need the GPU.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from ptxemu.cutedsl.host_function import FfiHostFunction, MissingPtxError, ffi_object_code, ptx_of
from ptxemu.driver.rules import PtxImage
from ptxemu.errors import PtxEmuError


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


class ExportedFunction:
    """A TVM-FFI function as machine code and PTX, which can be pickled for other processes.

    It runs on the emulation that is active when it is called.
    """

    def __init__(self, name: str, code: bytes, ptx: str) -> None:
        self._name, self._code = name, code
        self.__ptx__ = ptx
        """The PTX, by the name that CuTe DSL's own functions have for it."""

    @classmethod
    def of(cls, compiled: Any) -> ExportedFunction:
        """The function that `cute.compile` returned, without what CuTe DSL keeps of it.

        Raises:
            MissingPtxError: it has no PTX.
        """
        return cls(str(compiled.function_name), ffi_object_code(compiled), ptx_of(compiled))

    def __reduce__(self) -> tuple[Any, ...]:
        """The arguments that make it."""
        return ExportedFunction, (self._name, self._code, self.__ptx__)

    @cached_property
    def runnable(self) -> FfiHostFunction:
        """The host code, linked at the first use."""
        return FfiHostFunction(self._name, self._code, PtxImage(self.__ptx__, self._name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error; an active emulation puts its own method in this one's place."""
        raise PtxEmuError(f"{self._name}: call it inside ptxemu.cutedsl.emulate(...)")


class ExportedModule:
    """The module that `cute.runtime.load_module` returns while an emulation is active."""

    def __init__(self, path: str | Path, arch: str | None) -> None:
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
        self._ptx = ptx_path.read_text()
        PtxImage(self._ptx, Path(path).name).check_target(arch)
        self._functions: dict[str, ExportedFunction] = {}

    def __getitem__(self, name: str) -> ExportedFunction:
        """The exported function `name`."""
        if name not in self._functions:
            self._functions[name] = ExportedFunction(name, self._code, self._ptx)
        return self._functions[name]

    def __getattr__(self, name: str) -> ExportedFunction:
        """The exported function `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]
