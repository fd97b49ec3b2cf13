"""The CUDA runtime and driver of this process, for objects that are linked with neither."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from flashdsa.errors import UnsupportedError

RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
DRIVER = "libcuda.so.1"
OLDEST = "12.8"
NEEDED = "cudaKernelSetAttributeForDevice"
"""A function that runtimes before `OLDEST` lack."""
FUNCTIONS = (
    "cudaLibraryLoadData",
    "cudaLibraryGetKernel",
    "cudaKernelSetAttributeForDevice",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaDeviceGetAttribute",
    "cudaLaunchKernelExC",
    "cudaGetErrorString",
    "cuKernelGetAttribute",
    "cuTensorMapEncodeTiled",
)
"""Functions of runtime_shim.c."""


def bind_functions(path: Path, functions: Mapping[str, int]) -> None:
    """Hand the functions that the object at `path` names to it; it must have been loaded.

    Args:
        functions: name -> address; those that are lacking stay unbound.
    """
    library = ctypes.CDLL(str(path))
    library.flashdsa_function.restype = ctypes.c_char_p
    library.flashdsa_bind.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    number = 0
    while (name := library.flashdsa_function(number)) is not None:
        address = functions.get(name.decode())
        if address is not None:
            library.flashdsa_bind(name, address)
        number += 1


def cuda_functions() -> Mapping[str, int]:
    """Name -> address of what the shim calls, of the runtime that torch uses and of the driver.

    Raises:
        UnsupportedError: the runtime is older than 12.8.
    """
    return _functions(_torch_cuda())


@lru_cache
def _functions(torch_cuda: str | None) -> Mapping[str, int]:
    found: dict[str, int] = {}
    runtime = _runtime(torch_cuda)
    if runtime is not None and not hasattr(runtime, NEEDED):
        raise UnsupportedError(
            f"flashdsa's kernels need the CUDA {OLDEST} runtime or newer; this process has "
            f"{torch_cuda or 'an older one'}: install a build of torch for CUDA {OLDEST} or newer"
        )
    for library, prefix in ((runtime, "cuda"), (_open(DRIVER), "cu")):
        if library is not None:
            found |= {
                name: address
                for name in FUNCTIONS
                if name.startswith(prefix) and (prefix == "cuda") == name.startswith("cuda")
                for address in [_address(library, name)]
                if address is not None
            }
    return found


def _torch_cuda() -> str | None:
    """The CUDA version of the torch that is loaded; None without one."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda


def _runtime(torch_cuda: str | None) -> ctypes.CDLL | None:
    """The runtime of torch's CUDA version, which a loaded torch has loaded; else the newest."""
    major = torch_cuda.partition(".")[0] if torch_cuda else ""
    for name in sorted(RUNTIMES, key=lambda name: not name.endswith(f".{major}")):
        library = _open(name)
        if library is not None:
            return library
    return None


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
