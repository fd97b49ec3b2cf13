"""The C functions that CuTe DSL's compiled host code calls, as callbacks into the emulated driver.

Signatures are those of the CUDA runtime and driver API, with the prefix "_" under which
libcute_dsl_runtime exports them. An exception never crosses C: it is kept in the running HostCall
and the function returns the code that a driver would.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.driver import rules

_LAUNCH_CONFIG_BYTES = 56
_LAUNCH_ATTRIBUTE_BYTES = 72
_COOPERATIVE_ATTRIBUTE = 2
_CLUSTER_DIMENSION_ATTRIBUTE = 4
_PROGRAMMATIC_ATTRIBUTE = 6
_TENSOR_MAP_BYTES = 128

_pointer = ctypes.c_void_p
_i32 = ctypes.c_int32
_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64


@dataclass
class HostCall:
    """One call of a compiled host function, from entry to return."""

    image: rules.PtxImage
    arch: str | None
    libraries: list[rules.LibraryHandle]
    """Libraries that the function has loaded; the list lives as long as its machine code."""
    launch: Callable[[HostCall, rules.LaunchRequest], None]
    failure: BaseException | None = None
    """The first error; the C code only sees its number."""
    allocations: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    """Device memory that the host code has allocated, by address."""
    on_failure: Callable[[BaseException], None] | None = None
    """Called with the first error, before the C code sees its number."""

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        if self.failure is None:
            self.failure = error
            if self.on_failure is not None:
                self.on_failure(error)


class _Running(threading.local):
    call: HostCall | None = None


_running = _Running()
_driver = rules.Driver()
_callbacks: dict[str, Any] = {}


@contextmanager
def running(call: HostCall) -> Iterator[HostCall]:
    """The C functions that this thread calls meanwhile act for `call`."""
    before = _running.call
    _running.call = call
    try:
        yield call
    finally:
        _running.call = before


def address_of(name: str) -> int | None:
    """The address of an emulated C function; None where it is not emulated."""
    callback = _callbacks.get(name)
    if callback is None:
        return None
    return int(ctypes.cast(callback, _pointer).value or 0)


def _emulates(
    name: str, *argument_types: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the body of a C function that returns a status."""

    def register(body: Callable[..., None]) -> Callable[..., None]:
        def callback(*arguments: Any) -> int:
            call = _running.call
            if call is None:
                return int(rules.Status.INVALID_HANDLE)
            if call.failure is not None:
                return int(rules.status_of(call.failure))
            try:
                body(call, *arguments)
            except BaseException as error:
                call.fail(error)
                return int(rules.status_of(error))
            return int(rules.Status.SUCCESS)

        _callbacks[name] = ctypes.CFUNCTYPE(_i32, *argument_types)(callback)
        return body

    return register


def _write_i32(address: int, value: int) -> None:
    _i32.from_address(address).value = value


def _write_pointer(address: int, value: int) -> None:
    _u64.from_address(address).value = value


@_emulates("_cudaLibraryLoadData", *[_pointer] * 4, _u32, *[_pointer] * 2, _u32)
def _load_library(call: HostCall, library: int, *_: Any) -> None:
    number, handle = _driver.load_library(call.image)
    call.libraries.append(handle)
    _write_pointer(library, number)


@_emulates("_cudaLibraryGetKernel", _pointer, _pointer, ctypes.c_char_p)
def _get_kernel(call: HostCall, kernel: int, library: int, name: bytes) -> None:
    _write_pointer(kernel, _driver.get_kernel(library, name.decode(), call.arch))


def _set_attribute(call: HostCall, kernel: int, attribute: int, value: int, *_: int) -> None:
    _driver.set_kernel_attribute(kernel, attribute, value, call.arch)


@_emulates("_cudaSetDevice", _i32)
def _set_device(call: HostCall, device: int) -> None:
    if device != 0:
        raise rules.DriverError(
            rules.Status.INVALID_VALUE, f"device: there is only device 0; got {device}"
        )


_SHORT: tuple[tuple[str, tuple[Any, ...], Callable[..., None]], ...] = (
    ("_cudaGetDevice", (_pointer,), lambda call, device: _write_i32(device, 0)),
    ("_cuDeviceGet", (_pointer, _i32), lambda call, device, number: _write_i32(device, number)),
    ("_cudaGetDeviceCount", (_pointer,), lambda call, count: _write_i32(count, 1)),
    (
        "_cudaDeviceGetAttribute",
        (_pointer, _i32, _i32),
        lambda call, to, which, _: _write_i32(
            to, _driver.device_attribute(call.image, which, call.arch)
        ),
    ),
    (
        "_cuKernelGetAttribute",
        (_pointer, _i32, _pointer, _i32),
        lambda call, to, which, kernel, _: _write_i32(
            to, _driver.kernel_attribute(kernel, which, call.arch)
        ),
    ),
    ("_cudaKernelSetAttributeForDevice", (_pointer, _i32, _i32, _i32), _set_attribute),
    ("_cudaFuncSetAttribute", (_pointer, _i32, _i32), _set_attribute),
)
for _name, _types, _body in _SHORT:
    _emulates(_name, *_types)(_body)


def _nothing(call: HostCall, *_: Any) -> None:
    """Launches are complete when they return: there is nothing to wait for.

    Handles of libraries end with the code that holds them. Nor does an error end the process: once
    a call has failed all others do, and the host function raises when it returns.
    """


for _name, _types in (
    ("_cudaLibraryUnload", (_pointer,)),
    ("cuda_dialect_unload_library_once", (_pointer,)),
    ("_cudaDeviceSynchronize", ()),
    ("_cudaStreamSynchronize", (_pointer,)),
    ("_cudaStreamWaitEvent", (_pointer, _pointer, _u32)),
    ("_cudaStreamDestroy", (_pointer,)),
    ("_cudaEventRecord", (_pointer, _pointer)),
    ("_cudaEventDestroy", (_pointer,)),
    ("_cudaProfilerStart", ()),
    ("cuda_dialect_assert_success", (_i32,)),
    ("cuda_dialect_print_on_error", (_i32,)),
    ("_cudaProfilerStop", ()),
):
    _emulates(_name, *_types)(_nothing)


@_emulates("_cudaStreamCreate", _pointer)
@_emulates("_cudaEventCreate", _pointer)
def _create_handle(call: HostCall, handle: int) -> None:
    _write_pointer(handle, 1)


@_emulates("_cudaMallocAsync", _pointer, _u64, _pointer)
@_emulates("_cudaMalloc", _pointer, _u64)
def _allocate(call: HostCall, result: int, size: int, *_: Any) -> None:
    block = np.zeros(max(size, 1), dtype=np.uint8)
    call.allocations[int(block.ctypes.data)] = block
    _write_pointer(result, int(block.ctypes.data))


@_emulates("_cudaFreeAsync", _pointer, _pointer)
@_emulates("_cudaFree", _pointer)
def _free(call: HostCall, address: int | None, *_: Any) -> None:
    call.allocations.pop(address or 0, None)


@_emulates("_cudaMemcpyAsync", _pointer, _pointer, _u64, _i32, _pointer)
@_emulates("_cudaMemcpy", _pointer, _pointer, _u64, _i32)
def _copy(call: HostCall, target: int, source: int, size: int, *_: Any) -> None:
    ctypes.memmove(target, source, size)


@_emulates("_cudaMemsetAsync", _pointer, _i32, _u64, _pointer)
@_emulates("_cudaMemset", _pointer, _i32, _u64)
def _set_bytes(call: HostCall, target: int, value: int, size: int, *_: Any) -> None:
    ctypes.memset(target, value, size)


@_emulates("_cudaLaunchKernelEx", _pointer, _pointer, _pointer)
def _launch(call: HostCall, config: int, kernel: int, arguments: int) -> None:
    raw = ctypes.string_at(config, _LAUNCH_CONFIG_BYTES)
    gx, gy, gz, bx, by, bz = struct.unpack_from("<6I", raw, 0)
    shared_bytes, _stream, attributes, count = struct.unpack_from("<QQQI", raw, 24)
    cluster, is_cooperative, is_programmatic = None, False, False
    for index in range(count):
        at = attributes + index * _LAUNCH_ATTRIBUTE_BYTES
        attribute = _u32.from_address(at).value
        x, y, z = struct.unpack("<3I", ctypes.string_at(at + 8, 12))
        if attribute == _CLUSTER_DIMENSION_ATTRIBUTE:
            cluster = (x, y, z)
        elif attribute == _COOPERATIVE_ATTRIBUTE:
            is_cooperative = x != 0
        elif attribute == _PROGRAMMATIC_ATTRIBUTE:
            is_programmatic = x != 0
    handle = _driver.kernel(kernel)
    request = rules.LaunchRequest(
        handle,
        (gx, gy, gz),
        (bx, by, bz),
        cluster,
        shared_bytes,
        _read_arguments(call, handle, arguments),
        is_cooperative,
        is_programmatic,
    )
    _driver.check_launch(request, call.arch)
    call.launch(call, request)


def _read_arguments(
    call: HostCall, kernel: rules.KernelHandle, arguments: int
) -> tuple[bytes, ...]:
    function = kernel.image.module(call.arch).syntax.kernels[kernel.name]
    return tuple(
        ctypes.string_at(_u64.from_address(arguments + 8 * index).value, parameter.size)
        for index, parameter in enumerate(function.parameters)
    )


@_emulates("_cuTensorMapEncodeTiled", _pointer, _i32, _u32, _pointer, *[_pointer] * 4, *[_i32] * 4)
def _encode_tensor_map(
    call: HostCall, tensor_map: int, data_type: int, rank: int, address: int, *rest: int
) -> None:
    from ptxemu.descriptors.tensor_map import encode_tiled

    dims, strides, box, element_strides, interleave, swizzle, l2_promotion, fill = rest
    if not 1 <= rank <= 5:
        raise rules.DriverError(
            rules.Status.INVALID_VALUE, f"tensor map: rank {rank} is not in 1..5"
        )

    def array(at: int, count: int, code: str) -> tuple[int, ...]:
        size = struct.calcsize(code)
        return struct.unpack(f"<{count}{code}", ctypes.string_at(at, count * size))

    encoded = encode_tiled(
        data_type=data_type,
        address=address or 0,
        dims=array(dims, rank, "Q"),
        strides=array(strides, rank - 1, "Q") if rank > 1 else (),
        box=array(box, rank, "I"),
        element_strides=array(element_strides, rank, "I"),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        fill=fill,
    )
    ctypes.memmove(tensor_map, encoded, _TENSOR_MAP_BYTES)


_INITIALISE = ctypes.CFUNCTYPE(_i32, _pointer)
_LOAD_TO_DEVICE = ctypes.CFUNCTYPE(_i32, _pointer, _i32)


@_emulates("cuda_dialect_init_library_once", *[_pointer] * 4)
def _initialise_once(
    call: HostCall, state: int, initialise: int, load_to_device: int | None, _: int | None
) -> None:
    """TVM-FFI functions load their library at their first call, and remember it in `state`."""
    if _u64.from_address(state).value != 0:
        return
    library = _u64(0)
    where = ctypes.addressof(library)
    status = _INITIALISE(initialise)(where)
    if status == 0 and load_to_device:
        status = _LOAD_TO_DEVICE(load_to_device)(where, 0)
    if status != 0:
        raise call.failure or rules.DriverError(
            rules.Status(status), "the host code could not load its library"
        )
    _write_pointer(state, library.value)
