"""A compiled CuTe DSL function whose host code runs on this CPU against the emulated driver."""

from __future__ import annotations

import ctypes
import importlib
import os
import tempfile
from collections.abc import Callable
from io import BytesIO
from types import FunctionType
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from ptxemu.cutedsl import c_functions, dlpack
from ptxemu.cutedsl.c_functions import HostCall
from ptxemu.driver.rules import LaunchRequest, LibraryHandle, PtxImage, Status
from ptxemu.errors import PtxEmuError

# A compiled host object linked, in memory, against functions that are given by address.


def undefined_symbols(elf: bytes) -> list[str]:
    """Names that a 64-bit little-endian object expects from elsewhere: linking fails by name.

    Raises:
        ValueError: not such an object.
    """
    try:
        file: Any = ELFFile(BytesIO(elf))
    except ELFError as error:
        raise ValueError(f"elf: expected an ELF object: {error}") from error
    if file.elfclass != 64 or not file.little_endian:
        raise ValueError("elf: expected a 64-bit little-endian ELF object")
    return [
        symbol.name
        for table in file.iter_sections("SHT_SYMTAB")
        for symbol in table.iter_symbols()
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_LOCAL"
        and symbol.name
    ]


_LINKER_SUPPLIED = {"_GLOBAL_OFFSET_TABLE_"}


class LinkError(PtxEmuError):
    """The host code calls functions that nobody supplies."""


class LinkedObject:
    """Machine code ready to run; it lives as long as this object does."""

    def __init__(self, elf: bytes, resolve: Callable[[str], int | None]) -> None:
        """Link.

        Args:
            elf: the object file.
            resolve: the address of a function by name, or None.

        Raises:
            LinkError: naming every function that `resolve` does not know.
        """
        llvm = _llvm()
        missing = []
        for name in undefined_symbols(elf):
            if name in _LINKER_SUPPLIED:
                continue
            address = resolve(name)
            if address is None:
                missing.append(name)
            else:
                llvm.add_symbol(name, address)
        if missing:
            raise LinkError(
                "the compiled host code calls functions that ptxemu does not emulate: "
                + ", ".join(sorted(missing))
            )
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(elf))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return the address of the function `name`.

        Raises:
            LinkError: the object has no such function.
        """
        address = int(self._engine.get_function_address(name))
        if address == 0:
            raise LinkError(f"the compiled host code has no function {name}")
        return address


def _llvm() -> Any:
    """llvmlite's binding, ready to make code for this machine."""
    try:
        llvm: Any = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        raise PtxEmuError(
            "running CuTe DSL host code needs llvmlite: pip install 'llvmlite>=0.43'"
        ) from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


_ATTRIBUTE = "_ptxemu_host_function"
_TARGET_IN_WRAPPER = "__i_target_func"
_PACKED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_INITIALISE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_LOAD_TO_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)

Launcher = Callable[[HostCall, LaunchRequest], None]


class MissingPtxError(PtxEmuError):
    """A function was compiled without keeping its PTX."""


class HostFunctionError(PtxEmuError):
    """The host code returned an error that no emulated call had given it."""


def host_function(compiled: Any) -> HostFunction:
    """The runnable form of what `cute.compile` returned, made at the first use.

    Raises:
        MissingPtxError: it has no PTX.
    """
    found = vars(compiled).get(_ATTRIBUTE)
    if found is None:
        name = str(compiled.function_name)
        image = PtxImage(ptx_of(compiled), name)
        made = (
            FfiHostFunction(name, ffi_object_code(compiled), image)
            if any(
                cls.__name__ == "TVMFFIJitCompiledFunctionBase" for cls in type(compiled).__mro__
            )
            else HostFunction(name, _object_code(compiled), image)
        )
        setattr(compiled, _ATTRIBUTE, made)
        return made
    assert isinstance(found, HostFunction)
    return found


def ptx_of(compiled: Any) -> str:
    """The PTX of what `cute.compile` returned; "" for a function without kernels.

    Raises:
        MissingPtxError: it was not kept.
    """
    artifacts = getattr(compiled, "artifacts", None)
    text = getattr(artifacts, "PTX", None)
    if isinstance(text, str) and ".entry" not in text and os.path.isfile(text):
        with open(text) as file:
            text = file.read()
    if not isinstance(text, str) or ".target" not in text:
        if not getattr(compiled, "has_gpu_module", True):
            return ""
        raise MissingPtxError(
            f"{compiled.function_name} was compiled without keeping its PTX: import ptxemu.cutedsl "
            "before it is compiled (before or after cutlass), or compile it with "
            "options='--keep-ptx'"
        )
    return text.replace("\0", "")


def _object_code(compiled: Any) -> bytes:
    engine = compiled.engine
    if engine is None or not hasattr(engine, "dump_to_object_file"):
        raise PtxEmuError(
            f"{compiled.function_name} has no host code for this machine (it was compiled for "
            "another architecture than CUTE_DSL_ARCH, or loaded from a file): compile it inside "
            "ptxemu.cutedsl.emulate(...)"
        )
    with tempfile.TemporaryDirectory(prefix="ptxemu-") as folder:
        path = os.path.join(folder, "host.o")
        engine.dump_to_object_file(path)
        with open(path, "rb") as file:
            return file.read()


def ffi_object_code(compiled: Any) -> bytes:
    """The object file of a TVM-FFI function's host code."""
    mlir: Any = importlib.import_module("cutlass._mlir._mlir_libs._cutlass_ir")
    code = mlir._aot_support.export_module_to_bytes(
        compiled.ir_module, format="o", opt_level=3, enable_pic=True
    )
    return bytes(code)


class HostFunction:
    """A function that `cute.compile` made with its own calling convention."""

    def __init__(self, name: str, code: bytes, image: PtxImage) -> None:
        self.image = image
        self.name = name
        self._libraries: list[LibraryHandle] = []
        self._code = LinkedObject(code, self._resolve)
        self._is_loaded = False

    def _resolve(self, name: str) -> int | None:
        return (
            c_functions.address_of(name)
            or _in_library(_runtime_library(), name)
            or _in_library(None, name)
        )

    def call(self, arch: str | None, launch: Launcher, arguments: list[Any]) -> None:
        """Run the host code.

        Args:
            arch: the device; None for what the PTX was compiled for.
            launch: does what cudaLaunchKernelEx asks for.
            arguments: addresses of the arguments, as CuTe DSL marshals them.

        Raises:
            whatever an emulated call raised first.
        """
        result = ctypes.c_int32(0)
        addresses = [*map(_address, arguments), ctypes.addressof(result)]
        packed = (ctypes.c_void_p * len(addresses))(*addresses)
        host_call = HostCall(self.image, arch, self._libraries, launch)
        with c_functions.running(host_call):
            if self.image.text and not self._is_loaded:
                self._load_library(host_call)
                self._is_loaded = True
            entry = self._code.address(f"_mlir__mlir_ciface_{self.name}")
            _PACKED(entry)(ctypes.addressof(packed))
        self._raise_failure(host_call, result.value)

    def _load_library(self, host_call: HostCall) -> None:
        """Do the host code's one-time part: it keeps the handles in variables of its own."""
        library = ctypes.c_void_p()
        where = ctypes.addressof(library)
        status = _INITIALISE(self._code.address("cuda_init"))(where)
        self._raise_failure(host_call, status)
        status = _LOAD_TO_DEVICE(self._code.address("cuda_load_to_device"))(where, 0)
        self._raise_failure(host_call, status)

    def _raise_failure(self, host_call: HostCall, status: int) -> None:
        if host_call.failure is not None:
            raise host_call.failure
        if status != 0:
            name = Status(status).name if status in Status.__members__.values() else "?"
            raise HostFunctionError(f"{self.name} returned error {status} ({name})")


class FfiHostFunction(HostFunction):
    """A function compiled with --enable-tvm-ffi: it takes its arguments through TVM-FFI."""

    def __init__(self, name: str, code: bytes, image: PtxImage) -> None:
        super().__init__(name, code, image)
        tvm_ffi: Any = importlib.import_module("tvm_ffi")
        self._function = tvm_ffi.Function.__from_extern_c__(
            self._code.address(f"__tvm_ffi_{self.name}"), keep_alive_object=self._code
        )

    def _resolve(self, name: str) -> int | None:
        return super()._resolve(name) or _in_library(_ffi_library(), name)

    def call_ffi(
        self,
        arch: str | None,
        launch: Launcher,
        wrapper: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the host code on Python arguments; CPU tensors pass as device tensors.

        `wrapper` is what CuTe DSL puts around the function to bind keyword arguments, or None.
        """
        host_call = HostCall(self.image, arch, self._libraries, launch, on_failure=_set_ffi_error)

        def target(*arguments: Any) -> Any:
            return self._function(*[as_device_argument(argument) for argument in arguments])

        function: Callable[..., Any] = target
        if isinstance(wrapper, FunctionType) and _TARGET_IN_WRAPPER in wrapper.__globals__:
            function = FunctionType(
                wrapper.__code__,
                {**wrapper.__globals__, _TARGET_IN_WRAPPER: target},
                wrapper.__name__,
                wrapper.__defaults__,
                wrapper.__closure__,
            )
            function.__kwdefaults__ = wrapper.__kwdefaults__
        with c_functions.running(host_call):
            try:
                result = function(*args, **kwargs)
            except BaseException:
                if host_call.failure is not None:
                    raise host_call.failure from None
                raise
        if host_call.failure is not None:
            raise host_call.failure
        return result


def _ffi_library() -> str:
    info: Any = importlib.import_module("tvm_ffi.libinfo")
    return str(info.find_libtvm_ffi())


def _set_ffi_error(error: BaseException) -> None:
    """Leave an error where TVM-FFI looks for it when a function says that it failed.

    Host code leaves one for most calls, but not where its library cannot be loaded: CuTe DSL's own
    runtime does that then. TVM-FFI ends the process where it finds none.
    """
    set_raised = ctypes.CDLL(_ffi_library()).TVMFFIErrorSetRaisedFromCStr
    set_raised.argtypes, set_raised.restype = (ctypes.c_char_p, ctypes.c_char_p), None
    set_raised(b"RuntimeError", str(error).encode())


def as_device_argument(argument: Any) -> Any:
    """`argument` with CPU tensors in it turned into TVM-FFI tensors that say "cuda"."""
    if isinstance(argument, tuple | list):
        items = [as_device_argument(item) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else type(argument)(items)
    own = getattr(argument, "_tvm_ffi_tensor", None)
    if own is not None:
        argument = own
    is_tensor = hasattr(argument, "__dlpack__") and hasattr(argument, "__dlpack_device__")
    if is_tensor and dlpack.stands_on_device(argument):
        return as_device_tensor(argument)
    return argument


def as_device_tensor(tensor: Any) -> Any:
    """A TVM-FFI tensor that shares a tensor's memory and says "cuda"."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
    capsule = tensor.__dlpack__()
    dlpack.mark_as_device(capsule)
    tvm_ffi: Any = importlib.import_module("tvm_ffi")
    return tvm_ffi.from_dlpack(_Capsule(capsule))


class _Capsule:
    """A DLPack capsule as the object that from_dlpack expects."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def _address(argument: Any) -> int:
    value = argument.value if isinstance(argument, ctypes.c_void_p) else argument
    return int(value or 0)


def _in_library(path: str | None, name: str) -> int | None:
    library = ctypes.CDLL(path)
    try:
        function = getattr(library, name)
    except AttributeError:
        return None
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0) or None


def _runtime_library() -> str | None:
    environment: Any = importlib.import_module("cutlass.base_dsl.env_manager")
    libraries = environment.get_prefix_dsl_libs("CUTE_DSL")
    first = libraries.split(os.pathsep)[0] if libraries else ""
    return first or None
