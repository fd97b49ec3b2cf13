"""Turns calls of compiled CuTe DSL functions into calls of their host code on this CPU.

The patches stand while an emulation is active. They sit where CuTe DSL 4.8 hands over from Python
to machine code: the compiled functions' `__call__`, `run_compiled_program` (which direct calls of
jit functions use) and `to`, and the functions that TVM-FFI wraps.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ptxemu.cutedsl import dlpack
from ptxemu.cutedsl.arguments import Arguments, collect
from ptxemu.cutedsl.host_function import (
    FfiHostFunction,
    HostFunction,
    Launcher,
    MissingPtxError,
    as_device_tensor,
    ffi_object_code,
    host_function,
    ptx_of,
)
from ptxemu.driver.rules import PtxImage, status_of
from ptxemu.errors import LaunchError, PtxEmuError
from ptxemu.patching import Patches
from ptxemu.private_cache import DRAFT, cache_folder, delete_unused, require_own

logger = logging.getLogger("ptxemu.cutedsl")

_KEPT_SECONDS = 30 * 86_400
"""Time after which PTX that nobody has loaded is deleted.

Its object is refused then, as one without PTX."""

# TVM-FFI functions that were exported to object files, as libraries do to cache compilations.
#
# An object file holds no PTX. While an emulation is active the PTX of what is exported is kept in
# ptxemu's own cache directory, under the hash of the object file, wherever that is moved to; what
# is loaded is emulated with it. A file without PTX is refused: calling it would need the GPU.


def _ptx_path(code: bytes) -> Path:
    """Return the path of an object file's PTX in ptxemu's cache.

    Raises:
        OSError: there is no cache.
    """
    return cache_folder() / "exported" / f"{hashlib.sha256(code).hexdigest()}.ptx"


def keep_ptx(compiled: Any, object_path: str | Path) -> None:
    """Keep the PTX of a function that has been exported to `object_path`.

    Where it cannot be kept that is logged, and the object is refused when it is loaded.
    """
    text = ptx_of(compiled)
    try:
        path = _ptx_path(Path(object_path).read_bytes())
        path.parent.mkdir(0o700, exist_ok=True)
        delete_unused(path.parent, "", _KEPT_SECONDS)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=DRAFT) as folder:
            draft = Path(folder, path.name)
            draft.write_text(text + _digest_line(text))
            draft.chmod(0o600)
            draft.replace(path)
    except OSError as error:
        logger.warning("the PTX of %s is not kept: %s", object_path, error)


def _kept_ptx(code: bytes) -> str | None:
    """Return the PTX of an object file; None if none is kept, or not as it was written."""
    try:
        path = _ptx_path(code)
        require_own(path.parent, stat.S_ISDIR)
        require_own(path)
        with suppress(OSError):
            os.utime(path)
        kept = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("PTX is not used: %s", error)
        return None
    text = kept[: -len(_digest_line(""))]
    return text if kept == text + _digest_line(text) else None


def _digest_line(text: str) -> str:
    """Return the last line of a kept text: the SHA-256 of all before it."""
    return f"// {hashlib.sha256(text.encode()).hexdigest()}\n"


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
        text = _kept_ptx(self._code)
        if text is None:
            raise MissingPtxError(
                f"{path} holds a compiled function without PTX: delete it (or switch the cache it "
                "is from off), so that it is compiled again inside ptxemu.cutedsl.emulate(...)"
            )
        self._ptx = text
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


_DIRECT_CALLS_KEPT = 8


class Target(Protocol):
    """Who runs the launches: an emulation."""

    arch: str | None

    def launcher(self, arguments: Arguments) -> Launcher:
        """Return what acts as cudaLaunchKernelEx during one host call with these arguments."""


class Interception:
    """The patches of one emulation."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._patches = Patches()
        self._direct: deque[tuple[list[Any], Arguments]] = deque(maxlen=_DIRECT_CALLS_KEPT)
        """Marshalled arguments of the latest compilations, and the tensors among them."""

    def install(self) -> None:
        """Patch CuTe DSL (importing it) and, where it is installed, its TVM-FFI support."""
        executor = _module("cutlass.cutlass_dsl.cuda_jit_executor")
        dsl = _module("cutlass.base_dsl.dsl")
        runtime = _module("cutlass.cute.runtime")
        compiled = executor.CudaDialectJitCompiledFunction
        self._patches.replace(compiled, "__call__", self._call_method())
        self._patches.replace(compiled, "run_compiled_program", self._run_method())
        self._patches.replace(compiled, "to", lambda function, device=None: function)
        self._patches.replace(executor.JitExecutor, "run_compiled_program", _refuse_bound_executor)
        self._patch_direct_calls(dsl.BaseDSL)
        self._patches.replace(dsl.BaseDSL, "_runtime_can_run_compiled", lambda *_: True)
        for dsl_class in dsl.DSLSingletonMeta._instances:
            if "_runtime_can_run_compiled" in vars(dsl_class):
                self._patches.replace(dsl_class, "_runtime_can_run_compiled", lambda *_: True)
        self._patch_tensors(runtime._Tensor)
        if importlib.util.find_spec("tvm_ffi") is not None:
            self._patch_ffi(_module("cutlass.cutlass_dsl.tvm_ffi_provider"))
            self._patch_loading(runtime, _module("cutlass.runtime"))

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()
        self._direct.clear()

    def _call_method(self) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> int:
            pointers, adapted = function.execution_args.generate_execution_args(args, kwargs)
            self._run(host_function(function), pointers, _named(function, args, kwargs))
            del adapted  # the marshalled arguments live until the call has returned
            return 0

        return call

    def _run_method(self) -> Callable[..., Any]:
        def run_compiled_program(function: Any, exe_args: list[Any]) -> int:
            found = (tensors for pointers, tensors in self._direct if pointers is exe_args)
            self._run(host_function(function), exe_args, next(found, collect(())))
            return 0

        return run_compiled_program

    def _run(self, function: HostFunction, pointers: list[Any], arguments: Arguments) -> None:
        with _driver_errors():
            function.call(self._target.arch, self._target.launcher(arguments), pointers)

    def _patch_direct_calls(self, dsl_class: Any) -> None:
        """A direct call of a jit function compiles and runs: remember the tensors by the list of
        marshalled arguments that `run_compiled_program` gets later.

        INVARIANT: no patched function is on the stack while a kernel is traced, for source lines
        are found by looking for the first frame outside of CuTe DSL.
        """
        original = dsl_class.generate_mlir_function_types

        def generate_mlir_function_types(
            dsl: Any, func: Any, name: str, args: Any, kwargs: Any, *rest: Any, **options: Any
        ) -> Any:
            result = original(dsl, func, name, args, kwargs, *rest, **options)
            named = [*enumerate(args), *kwargs.items()]
            arguments = collect((f"argument {key}", value) for key, value in named)
            self._direct.append((result[0], arguments))
            return result

        self._patches.replace(
            dsl_class, "generate_mlir_function_types", generate_mlir_function_types
        )

    def _patch_tensors(self, tensor_class: Any) -> None:
        """Tensors made meanwhile are device tensors to the compiler, as on a GPU machine."""
        original = tensor_class.__init__

        def init(tensor: Any, *args: Any, **kwargs: Any) -> None:
            original(tensor, *args, **kwargs)
            if not dlpack.stands_on_device(args[0] if args else kwargs["tensor"]):
                return
            own = getattr(tensor, "_tvm_ffi_tensor", None)
            if own is not None:
                tensor._tvm_ffi_tensor = as_device_tensor(own)
                tensor._dlpack_data = tensor._tvm_ffi_tensor.__dlpack__()
            elif type(tensor._dlpack_data).__name__ == "PyCapsule":
                dlpack.mark_as_device(tensor._dlpack_data)

        self._patches.replace(tensor_class, "__init__", init)

    def _patch_ffi(self, provider: Any) -> None:
        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
            self._patches.replace(getattr(provider, name), "__call__", self._call_ffi_method())
        base = provider.TVMFFIJitCompiledFunctionBase
        self._patches.replace(
            base, "run_compiled_program", lambda function, exe_args: function(*exe_args)
        )

        export = base.export_to_c

        def export_to_c(function: Any, object_file_path: str, *args: Any, **kwargs: Any) -> None:
            export(function, object_file_path, *args, **kwargs)
            keep_ptx(function, object_file_path)

        self._patches.replace(base, "export_to_c", export_to_c)

    def _patch_loading(self, *modules: Any) -> None:
        """Object files that libraries have exported come with their PTX, or are refused.

        So are those of another architecture.
        """
        original = modules[0].load_module

        def load_module(file_path: str, *, enable_tvm_ffi: bool = False) -> Any:
            if not enable_tvm_ffi:
                return original(file_path)
            return ExportedModule(file_path, self._target.arch)

        def call(function: ExportedFunction, *args: Any, **kwargs: Any) -> Any:
            return self._call_ffi(function.runnable, None, args, kwargs)

        self._patches.replace(ExportedFunction, "__call__", call)
        for module in modules:
            self._patches.replace(module, "load_module", load_module)

    def _call_ffi(
        self, runnable: FfiHostFunction, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        named = [*enumerate(args), *kwargs.items()]
        arguments = collect((f"argument {key}", value) for key, value in named)
        launcher = self._target.launcher(arguments)
        with _driver_errors():
            return runnable.call_ffi(self._target.arch, launcher, wrapper, args, kwargs)

    def _call_ffi_method(self) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            runnable = host_function(function)
            assert isinstance(runnable, FfiHostFunction)
            if function.execution_args.has_pointer_address_arg_specs:
                args, kwargs = function.execution_args.convert_python_pointer_args_for_tvm_ffi(
                    args, kwargs
                )
            wrapper = getattr(function, "_kwargs_wrapper", None)
            return self._call_ffi(runnable, wrapper, args, kwargs)

        return call


def _refuse_bound_executor(executor: Any, exe_args: list[Any]) -> int:
    raise PtxEmuError(
        "this executor was bound to a GPU before the emulation began: call compiled.to() (or the "
        "compiled function itself) inside ptxemu.cutedsl.emulate(...)"
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PtxEmuError(
            f"CuTe DSL is needed, and version 4.8 is supported: {error} "
            "(pip install 'nvidia-cutlass-dsl>=4.8,<5')"
        ) from error


def _named(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The tensors in a call's arguments, by parameter name."""
    names = list(function.execution_args.signature.parameters)
    positional = [
        (names[index] if index < len(names) else f"argument {index}", value)
        for index, value in enumerate(args)
    ]
    return collect([*positional, *kwargs.items()])


@contextmanager
def _driver_errors() -> Iterator[None]:
    """Turn what a driver would refuse into the exception that CuTe DSL raises for its code."""
    try:
        yield
    except LaunchError as error:
        cuda = _module("cutlass.base_dsl.runtime.cuda")
        status = int(status_of(error))
        name = cuda.get_cuda_error_name_from_code(status, cuda.cudart.cudaError_t)
        raise cuda.DSLCudaRuntimeError(status, name, runtime_detail=str(error)) from error
