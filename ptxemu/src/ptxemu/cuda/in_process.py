"""Python scripts whose packages call CUDA: the stand-in in this process, when it is first needed.

Packages such as Triton and CuPy load libcuda and libcudart by name when they are imported. An
import hook loads the stand-in before them, under these names, and sets the variables by which they
leave PTX as it is instead of making machine code of it.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ptxemu.cuda.build import SOURCES, Standin, standin
from ptxemu.cuda.client import Client, HostMemory
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.driver.rules import Status
from ptxemu.launch_log import Log
from ptxemu.patching import Patches

PACKAGES = ("triton", "cupy", "cupy_backends", "torch.utils.cpp_extension", "numba.cuda", "pycuda")
"""Packages that need the stand-in."""
_LIBRARIES = ("libcuda.so.1", "libcudart.so.12", "libcudart.so.13")
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
PTXAS = """\
#!/bin/sh
# In the place of ptxas: PTX stays PTX, for the emulator runs that.
output=; input=; next=
for word in "$@"; do
  if [ "$next" = o ]; then output=$word; next=; continue; fi
  case $word in
    --version|-V) echo "ptxas: NVIDIA (R) Ptx optimizing assembler"
      echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;;
    -o) next=o;;
    *.ptx) input=$word;;
  esac
done
cp "$input" "$output" && printf '\\000' >> "$output"
"""


_CXX = """\
#!/bin/sh
# The C++ compiler, with the tensors of `ptxemu exec`.
exec c++ {options} "$@"
"""
_TORCH_HEADERS = SOURCES / "torch_headers"


class InProcess:
    """A context in which importing one of PACKAGES brings the stand-in."""

    def __init__(self, log: Log, arch: str, host_memory: HostMemory | None = None) -> None:
        """Args:
        host_memory: finds memory of this process that kernels get addresses of, such as tensors.
        """
        self._log = log
        self._arch = arch
        self._host_memory = host_memory
        self._hook = _Hook(self._load)
        self._keep: list[Any] = []
        self._patches = Patches()

    def __enter__(self) -> InProcess:
        """Watch imports."""
        sys.meta_path.insert(0, self._hook)
        if any(name in sys.modules for name in PACKAGES):
            self._load()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more; the stand-in stays loaded, as a library does."""
        if self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)
        self._patches.undo()

    def _load(self) -> None:
        if self._keep:
            return
        made = standin()
        library = ctypes.CDLL(str(made.library), mode=ctypes.RTLD_GLOBAL)
        memory = EmulatedMemory()
        client = Client(
            self._log, self._arch, memory, on_print=_print, host_memory=self._host_memory
        )
        callback = _CALLBACK(_answering(self._log, client, library))
        library.ptxemu_connect.argtypes = (_CALLBACK, ctypes.c_int)
        library.ptxemu_connect(callback, memory.file)
        named = [ctypes.CDLL(str(made.folder / name)) for name in _LIBRARIES]
        self._keep = [library, memory, client, callback, *named]
        self._hide_linker()
        self._redirect_extensions(library)
        self._set_variables(made)

    def _redirect_extensions(self, library: ctypes.CDLL) -> None:
        """Extension modules that have the runtime linked in call the stand-in once loaded."""
        original = ExtensionFileLoader.create_module

        def create_module(loader: ExtensionFileLoader, spec: ModuleSpec) -> ModuleType:
            module = original(loader, spec)
            library.ptxemu_redirect()
            return module

        self._patches.replace(ExtensionFileLoader, "create_module", create_module)

    def _hide_linker(self) -> None:
        """Packages that link machine code with nvJitLink ask the driver, which keeps PTX."""
        try:
            import cuda.pathfinder as pathfinder
        except ImportError:
            return
        original = pathfinder.load_nvidia_dynamic_lib

        def load(name: str) -> Any:
            if name == "nvJitLink":
                raise pathfinder.DynamicLibNotFoundError("nvJitLink: ptxemu runs PTX")
            return original(name)

        self._patches.replace(pathfinder, "load_nvidia_dynamic_lib", load)

    def _set_variables(self, made: Standin) -> None:
        ptxas = _script(made.folder / "ptxas", PTXAS)
        compiler = _script(made.folder / "c++", _CXX.format(options=_torch_options()))
        number = self._arch.removeprefix("sm_")
        for name, value in {
            # C++ extensions of torch: PTX, lines, and headers and libraries of its CUDA build.
            "TORCH_CUDA_ARCH_LIST": f"{number[:-2]}.{number[-2:]}+PTX",
            "TORCH_EXTENSIONS_DIR": made.folder / "torch" / self._arch,
            "NVCC_PREPEND_FLAGS": f"-lineinfo {_torch_options()}",
            "CXX": compiler,
            "LIBRARY_PATH": _first(made.folder, "LIBRARY_PATH"),
            "TRITON_LIBCUDA_PATH": made.folder,
            "TRITON_PTXAS_PATH": ptxas,
            "TRITON_PTXAS_BLACKWELL_PATH": ptxas,
            "TRITON_CACHE_DIR": made.folder / "triton",  # no machine code of other runs
            "CUPY_COMPILE_WITH_PTX": "1",
            "CUPY_CACHE_DIR": made.folder / "cupy",
            "CUPY_ACCELERATORS": "",  # CUB comes as machine code
        }.items():
            self._patches.set_variable(name, str(value))


class _Hook(importlib.abc.MetaPathFinder):
    """Calls a function before one of PACKAGES is imported; finds nothing itself."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Implement a finder's method: call the function for PACKAGES, find nothing."""
        if fullname in PACKAGES:
            self._before()


def _answering(
    log: Log, client: Client, library: ctypes.CDLL
) -> Callable[[int, int | None, int], int]:
    library.ptxemu_reply.argtypes = (ctypes.c_char_p, ctypes.c_size_t)

    def answer(operation: int, data: int | None, size: int) -> int:
        try:
            request = ctypes.string_at(data, size) if data else b""
            status, reply = client.handle(operation, request)
            library.ptxemu_reply(reply, len(reply))
        except KeyboardInterrupt as stop:  # C cannot pass it on
            log.interrupted(stop)
            return int(Status.UNKNOWN)
        except Exception as error:  # nor any other
            log.fail(f"{type(error).__name__}: {error}")
            return int(Status.UNKNOWN)
        return status

    return answer


def _script(path: Path, text: str) -> Path:
    """Make a file that can be executed, at once, for other processes may run it."""
    draft = path.with_name(f".building-{secrets.token_hex(8)}")
    draft.write_text(text)
    draft.chmod(0o755)
    return draft.replace(path)


def _torch_options() -> str:
    """Return options for both compilers: our headers come first."""
    return f"-I{_TORCH_HEADERS} -include {_TORCH_HEADERS / 'ptxemu_torch.h'}"


def _first(folder: Path, variable: str) -> str:
    """A search path that starts with `folder`."""
    rest = os.environ.get(variable)
    return f"{folder}:{rest}" if rest else str(folder)


def _print(text: str) -> None:
    sys.stdout.write(text)
