"""Compiled kernels that tests keep between processes: host code and PTX, all that ptxemu needs.

A compilation takes longer than most tests' emulation. What is kept is found by a hash of the
kernel's sources, plan and compiler, as the library finds what it has compiled for a GPU.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from flashdsa.jit.sources import source_hash
from flashdsa.plan import Barrier
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant

Compile = Callable[[KernelSpec, KernelPlan], Any]
ARRIVALS = Barrier.arrivals
"""The right counts. Tests that replace them have their kernels compiled."""
MOST_KERNELS = 500
"""Twice as many as the tests compile: some 40 MB."""


class KeptKernel:
    """A compiled kernel from a file: a function for ptxemu's emulations."""

    def __init__(self, path: Path, compile_it: Callable[[], Any]) -> None:
        """Read `path`; `compile_it` is called for what the file does not have."""
        record = pickle.loads(zlib.decompress(path.read_bytes()))
        self._name, self._code, self.__ptx__ = record
        self._compile, self._host_function = compile_it, None

    def __call__(self, *args: Any) -> Any:
        """Run the host code, whose launches go to the emulation that is under way."""
        from ptxemu.cutedsl import Emulation
        from ptxemu.cutedsl.host_function import FfiHostFunction
        from ptxemu.driver.rules import PtxImage

        if self._host_function is None:
            image = PtxImage(self.__ptx__, self._name)
            self._host_function = FfiHostFunction(self._name, self._code, image)
        call = Emulation.active()._interception._call_ffi
        return call(self._host_function, None, args, {})

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the kernel, compiled now."""
        return getattr(self._compile(), name)


def keeping(folder: Path, compile_plan: Compile) -> Compile:
    """`compile_plan` that compiles what is not in `folder`, once, also if processes share it."""

    def find(spec: KernelSpec, plan: KernelPlan) -> Any:
        if Barrier.arrivals is not ARRIVALS:
            return compile_plan(spec, plan)
        name = f"{spec.backend}-{plan.name}"
        path = folder / f"{name}-{_key(Variant(spec, plan))}.kernel"
        with FileLock(folder / f"{name}.lock"):
            if not path.exists():
                compiled = compile_plan(spec, plan)
                _keep(compiled, path)
                return compiled
        os.utime(path)
        return KeptKernel(path, lambda: compile_plan(spec, plan))

    return find


def _key(variant: Variant) -> str:
    from ptxemu.cutedsl import retention

    compilers = [version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    options = Path(retention.__file__).read_text(), retention._Settings.line_info
    text = f"{source_hash([variant])} {compilers} {options}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep(compiled: Any, path: Path) -> None:
    """Write what `KeptKernel` reads; the caller holds the file's lock."""
    from ptxemu.cutedsl.host_function import _ffi_object_code, ptx_of

    record = str(compiled.function_name), _ffi_object_code(compiled), ptx_of(compiled)
    made = path.with_suffix(".new")
    made.write_bytes(zlib.compress(pickle.dumps(record), level=1))
    os.replace(made, path)
    _forget_old(path.parent)


def _forget_old(folder: Path) -> None:
    """Leave the kernels that were used last; another process may do the same."""
    used = []
    for path in folder.glob("*.kernel"):
        with suppress(FileNotFoundError):
            used.append((path.stat().st_mtime, path))
    for _, path in sorted(used)[:-MOST_KERNELS]:
        path.unlink(missing_ok=True)
