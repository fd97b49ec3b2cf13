"""Number of clusters of CTAs that run at once on a Hopper GPU, as the driver says."""

from __future__ import annotations

import ctypes
from functools import cache

from flashdsa.backends.gpu.empty_kernel import PTX, cubin
from flashdsa.hw import MAX_CLUSTER_SIZE


class DriverError(Exception):
    """A call of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MORE_THAN_8_CTAS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
NO_BINARY_FOR_GPU = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE


def clusters_at_once(device: int, threads: int, smem_bytes: int) -> dict[int, int]:
    """CTAs of a cluster, 1 to 16 -> clusters that run at once; 0: such ones cannot.

    Asked about a kernel of these threads and bytes of dynamic shared memory that does nothing.

    Raises:
        OSError, AttributeError: the driver is missing, or an old one.
        DriverError: it refuses to say.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    context, function = context_and_kernel(device)
    _call(driver, "cuCtxPushCurrent_v2", context)
    try:
        _call(driver, "cuFuncSetAttribute", function, SHARED_BYTES, smem_bytes)
        _call(driver, "cuFuncSetAttribute", function, MORE_THAN_8_CTAS, 1)
        return {
            size: _count(driver, function, threads, smem_bytes, size)
            for size in range(1, MAX_CLUSTER_SIZE + 1)
        }
    finally:
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def context_and_kernel(device: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The device's primary context, and a kernel in it that does nothing.

    Both are kept: to unload a module while a stream is captured invalidates the capture.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), device)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    _call(driver, "cuCtxPushCurrent_v2", context)
    try:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code = driver.cuModuleLoadData(ctypes.byref(module), cubin())
        if code == NO_BINARY_FOR_GPU:  # not a Hopper GPU
            code = driver.cuModuleLoadData(ctypes.byref(module), PTX)
        if code:
            raise DriverError(f"cuModuleLoadData returned {code}")
        _call(driver, "cuModuleGetFunction", ctypes.byref(function), module, b"k")
    finally:
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    return context, function


def _count(
    driver: ctypes.CDLL, function: ctypes.c_void_p, threads: int, smem_bytes: int, size: int
) -> int:
    """Clusters of `size` CTAs that run at once."""
    attribute = _Attribute(CLUSTER_DIMENSION, 0, (size, 1, 1))
    launch = _Launch((size, 1, 1), (threads, 1, 1), smem_bytes, None, ctypes.pointer(attribute), 1)
    count = ctypes.c_int()
    arguments = (ctypes.byref(count), function, ctypes.byref(launch))
    code = driver.cuOccupancyMaxActiveClusters(*arguments)
    if code == INVALID_CLUSTER_SIZE:
        return 0
    if code:
        raise DriverError(f"cuOccupancyMaxActiveClusters returned {code} for {size} CTAs")
    return count.value


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise DriverError(f"{name} returned {code}")
