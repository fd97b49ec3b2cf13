"""The CUDA driver through ctypes: just enough to run a program of the suite."""

import contextlib
import ctypes
import struct
import time
from typing import Any

import numpy as np
from tests.silicon.programs.case import Array, Bytes, Im2colMap, Program, TensorMap

ARENA_BYTES = 64 << 20
ALIGNMENT = 1024
NOT_READY = 600
INVALID_ARGUMENT_CODES = (1, 912)
CLUSTER_DIMENSION = 4
MAX_DYNAMIC_SHARED = 8
ERROR_LOG_BUFFER, ERROR_LOG_BYTES = 5, 6


class DriverError(RuntimeError):
    """A driver call that failed; the context is still good."""


class StickyError(RuntimeError):
    """A kernel that failed or hangs: this process can run no other."""


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


def _library() -> ctypes.CDLL:
    """The driver, also where the loader's path lacks it."""
    for path in ("libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise OSError("libcuda.so.1: no CUDA driver here")


class Driver:
    """One context on device 0 with one arena of memory."""

    def __init__(self) -> None:
        self._cuda = _library()
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(self._event), ctypes.c_uint(2))
        arena = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(arena), ctypes.c_size_t(ARENA_BYTES))
        self._arena = -(-arena.value // ALIGNMENT) * ALIGNMENT

    def describe(self) -> dict[str, Any]:
        """GPU name, driver version."""
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self._call("cuDeviceGetName", name, 100, self._device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return {"gpu": name.value.decode(), "cuda": version.value}

    def _call(self, function: str, *args: Any, allowed: tuple[int, ...] = (0,)) -> int:
        code = int(getattr(self._cuda, function)(*args))
        if code not in allowed:
            raise DriverError(f"{function}: {self._name(code)}")
        return code

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return f"{code} {text.value.decode() if text.value else '?'}"

    def encode(self, m: TensorMap, address: int) -> tuple[int, bytes]:
        """The code of cuTensorMapEncodeTiled (or -Im2col), and the map's 128 bytes."""
        raw = (ctypes.c_uint64 * 24)()
        start = -ctypes.addressof(raw) % 64 // 8
        array64 = ctypes.c_uint64 * 8
        array32 = ctypes.c_uint32 * 8
        function, shape = self._cuda.cuTensorMapEncodeTiled, [array32(*m.box)]
        if isinstance(m, Im2colMap):
            function, corner = self._cuda.cuTensorMapEncodeIm2col, ctypes.c_int * 3
            shape = [corner(*m.lower), corner(*m.upper)]
            shape += [ctypes.c_uint32(m.channels), ctypes.c_uint32(m.pixels)]
        code = function(
            ctypes.byref(raw, 8 * start),
            ctypes.c_int(m.dtype),
            ctypes.c_uint32(len(m.dims)),
            ctypes.c_void_p(address),
            array64(*m.dims),
            array64(*m.strides),
            *shape,
            array32(*m.steps),
            ctypes.c_int(m.interleave),
            ctypes.c_int(m.swizzle),
            ctypes.c_int(m.l2_promotion),
            ctypes.c_int(m.oob_fill),
        )
        return int(code), struct.pack("<16Q", *raw[start : start + 16])

    def compile(self, ptx: str) -> ctypes.c_void_p:
        """The PTX as a module; the JIT compiler's complaint is the error's text."""
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(ERROR_LOG_BUFFER, ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        text = ctypes.create_string_buffer(ptx.encode())
        code = self._cuda.cuModuleLoadDataEx(
            ctypes.byref(module), text, ctypes.c_uint(2), options, values
        )
        if code:
            detail = log.value.decode(errors="replace").strip()
            raise DriverError(f"cuModuleLoadDataEx: {self._name(code)}: {detail}")
        return module

    def run(self, program: Program, timeout: float = 5.0) -> list[Bytes]:
        """Launch once; the recorded arrays.

        Raises:
            DriverError: it does not compile or cannot be launched.
            StickyError: it failed or did not end.
        """
        offsets, image = self._lay_out(program)
        module, function = self.compile(program.ptx), ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        values = [self._argument(a, i, offsets) for i, a in enumerate(program.args)]
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self._arena), image.ctypes.data_as(
            ctypes.c_void_p), ctypes.c_size_t(len(image)))  # fmt: skip
        self._launch(program, function, values)
        self._wait(timeout)
        self._call("cuMemcpyDtoH_v2", image.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(
            self._arena), ctypes.c_size_t(len(image)))  # fmt: skip
        self._call("cuModuleUnload", module)
        return [
            image[offsets[i] : offsets[i] + len(program.args[i].data)].copy()  # type: ignore[union-attr]
            for i in program.outputs
        ]

    def _lay_out(self, program: Program) -> tuple[dict[int, int], Bytes]:
        offsets, end = {}, 0
        for i, arg in enumerate(program.args):
            if isinstance(arg, Array):
                offsets[i] = end
                end += -(-(len(arg.data) + 1) // ALIGNMENT) * ALIGNMENT
        image = np.zeros(max(end, ALIGNMENT), np.uint8)
        for i, start in offsets.items():
            arg = program.args[i]
            assert isinstance(arg, Array)
            image[start : start + len(arg.data)] = arg.data
        return offsets, image

    def _argument(self, arg: Array | TensorMap | int, index: int, offsets: dict[int, int]) -> bytes:
        if isinstance(arg, Array):
            return struct.pack("<Q", self._arena + offsets[index])
        if isinstance(arg, TensorMap):
            code, words = self.encode(arg, self._arena + offsets[arg.array])
            if code:
                raise DriverError(f"cuTensorMapEncode: {self._name(code)}")
            return words
        return struct.pack("<I", arg & 0xFFFFFFFF)

    def _launch(self, program: Program, function: ctypes.c_void_p, values: list[bytes]) -> None:
        if program.smem > 48 << 10:
            self._call(
                "cuFuncSetAttribute", function, ctypes.c_int(MAX_DYNAMIC_SHARED),
                ctypes.c_int(program.smem),
            )  # fmt: skip
        buffers = [ctypes.create_string_buffer(v, len(v)) for v in values]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*map(ctypes.addressof, buffers))
        attribute = _LaunchAttribute(CLUSTER_DIMENSION, 0)
        attribute.value[:3] = (program.cluster, 1, 1)
        config = _LaunchConfig()
        config.grid[:], config.block[:] = (program.grid, 1, 1), (program.block, 1, 1)
        config.shared_bytes = program.smem
        if program.cluster > 1:
            config.attributes = ctypes.addressof(attribute)
            config.attribute_count = 1
        arguments = (ctypes.byref(config), function, pointers, None)
        code = self._call("cuLaunchKernelEx", *arguments, allowed=(0, *INVALID_ARGUMENT_CODES))
        if code:  # the kernel's own cluster size may be the only one that is wanted
            config.attribute_count = 0
            self._call("cuLaunchKernelEx", *arguments)

    def _wait(self, timeout: float) -> None:
        self._call("cuEventRecord", self._event, None)
        end = time.monotonic() + timeout
        while code := int(self._cuda.cuEventQuery(self._event)):
            if code != NOT_READY:
                raise StickyError(self._name(code))
            if time.monotonic() > end:
                raise StickyError(f"hangs: not finished after {timeout} s")
