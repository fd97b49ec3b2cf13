"""Answers of the cuda.bindings driver and runtime modules on a machine without a GPU.

Host code in Python (CuTe DSL's HardwareInfo, scripts) asks the driver for contexts, attributes,
occupancy, events and memory. The answers are those of the emulated device; memory is host memory;
whatever was launched has finished, so there is nothing to wait for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.driver.attributes import device_attribute
from ptxemu.machine.device import Device
from ptxemu.patching import Patches

_DRIVER_VERSION = 13000
_TOTAL_MEMORY = 180 * 2**30
_HANDLE = 1
_NOTHING = (
    *("cuInit", "cuCtxSetCurrent", "cuCtxSynchronize", "cuCtxDestroy", "cuDevicePrimaryCtxRelease"),
    *("cuStreamSynchronize", "cuStreamDestroy", "cuStreamWaitEvent", "cudaStreamSynchronize"),
    *("cuEventRecord", "cuEventSynchronize", "cuEventDestroy", "cudaStreamDestroy"),
    *("cuFuncSetAttribute", "cuKernelSetAttribute", "cuLibraryUnload", "cuModuleUnload"),
    *("cudaDeviceSynchronize", "cudaSetDevice", "cudaLibraryUnload"),
    *("cudaEventRecord", "cudaEventSynchronize", "cudaEventDestroy"),
)
_CONTEXTS = ("cuCtxCreate", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuStreamGetCtx")


class CudaBindings:
    """The functions that are replaced, and the device memory that they have handed out."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[int, NDArray[np.uint8]] = {}

    def install(self, patches: Patches, driver: ModuleType, runtime: ModuleType) -> None:
        """Replace functions of `cuda.bindings.driver` and `cuda.bindings.runtime`."""
        for name, answer in self._answers(driver).items():
            module = runtime if name.startswith("cuda") else driver
            if not hasattr(module, name):
                continue
            ok = (
                runtime.cudaError_t.cudaSuccess
                if module is runtime
                else driver.CUresult.CUDA_SUCCESS
            )
            patches.replace(module, name, _answering(ok, answer))

    def _answers(self, driver: ModuleType) -> dict[str, Callable[..., Any]]:
        """Return functions by name: each gives a result without the status; None for nothing."""
        device = self._device

        def attribute(attribute: Any, *_: Any) -> int:
            return device_attribute(device, int(attribute)) or 0

        def max_active_clusters(_: Any, config: Any) -> int:
            size = 1
            for entry in config.attrs:
                if entry.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                    shape = entry.value.clusterDim
                    size = shape.x * shape.y * shape.z
            return device.num_sms // max(size, 1)

        answers: dict[str, Callable[..., Any]] = {
            "cuDriverGetVersion": lambda: _DRIVER_VERSION,
            "cudaDriverGetVersion": lambda: _DRIVER_VERSION,
            "cudaRuntimeGetVersion": lambda: _DRIVER_VERSION,
            "cuDeviceGetCount": lambda: 1,
            "cudaGetDeviceCount": lambda: 1,
            "cudaGetDevice": lambda: 0,
            "cuDeviceGet": lambda ordinal: driver.CUdevice(int(ordinal)),
            "cuCtxGetDevice": lambda *_: driver.CUdevice(0),
            "cuStreamGetDevice": lambda *_: driver.CUdevice(0),
            "cuDeviceGetName": lambda length, _: f"ptxemu {device.arch}".encode()[:length],
            "cuDeviceTotalMem": lambda _: _TOTAL_MEMORY,
            "cuDeviceGetAttribute": attribute,
            "cudaDeviceGetAttribute": attribute,
            "cuStreamCreate": lambda *_: driver.CUstream(0),
            "cuStreamCreateWithPriority": lambda *_: driver.CUstream(0),
            "cuCtxGetStreamPriorityRange": lambda: (0, 0),
            "cuEventCreate": lambda *_: driver.CUevent(_HANDLE),
            "cuEventElapsedTime": lambda *_: 0.0,
            "cuLibraryLoadData": lambda *_: driver.CUlibrary(_HANDLE),
            "cuLibraryEnumerateKernels": lambda *_: [driver.CUkernel(_HANDLE)],
            "cuKernelGetFunction": lambda _: driver.CUfunction(_HANDLE),
            "cuOccupancyAvailableDynamicSMemPerBlock": lambda *_: device.shared_bytes_per_cta,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda *_: 1,
            "cuOccupancyMaxActiveClusters": max_active_clusters,
        }
        answers.update(self._memory_functions(driver))
        answers.update({name: lambda *_: None for name in _NOTHING})
        answers.update({name: lambda *_: driver.CUcontext(_HANDLE) for name in _CONTEXTS})
        return answers

    def _memory_functions(self, driver: ModuleType) -> dict[str, Callable[..., Any]]:
        """Allocation, copies and memsets, on host memory; streams and kinds of copy are ignored."""

        def allocate(size: int, *_: Any) -> Any:
            return driver.CUdeviceptr(self._allocate(size))

        def set_words(width: int) -> Callable[..., None]:
            return lambda at, value, count, *_: _fill(at, value.to_bytes(width, "little"), count)

        functions: dict[str, Callable[..., Any]] = {
            "cuMemAlloc": allocate,
            "cuMemAllocAsync": allocate,
            "cudaMalloc": self._allocate,
            "cudaMallocAsync": lambda size, _: self._allocate(size),
            "cudaMemset": set_words(1),
            "cudaMemsetAsync": set_words(1),
            "cudaMemcpy": _copy,
            "cudaMemcpyAsync": _copy,
        }
        for name in ("cuMemFree", "cuMemFreeAsync", "cudaFree", "cudaFreeAsync"):
            functions[name] = self._free
        for direction in ("DtoD", "HtoD", "DtoH"):
            functions[f"cuMemcpy{direction}"] = functions[f"cuMemcpy{direction}Async"] = _copy
        for width in (1, 2, 4):
            name = f"cuMemsetD{8 * width}"
            functions[name] = functions[f"{name}Async"] = set_words(width)
        return functions

    def _allocate(self, size: int) -> int:
        block = np.zeros(max(int(size), 1), dtype=np.uint8)
        address = int(block.ctypes.data)
        self._memory[address] = block
        return address

    def _free(self, pointer: Any, *_: Any) -> None:
        self._memory.pop(int(pointer), None)


def _answering(ok: Any, answer: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The binding's calling convention: a tuple that starts with the status."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value = answer(*args, **kwargs)
        if value is None:
            return (ok,)
        return (ok, *value) if isinstance(value, tuple) else (ok, value)

    return call


def _fill(pointer: Any, pattern: bytes, count: int) -> None:
    ctypes.memmove(int(pointer), pattern * count, len(pattern) * count)


def _copy(target: Any, source: Any, size: int, *_: Any) -> None:
    ctypes.memmove(int(target), int(source), size)
