"""Answers the requests of one program: its modules, kernels and launches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptxemu.api import Module
from ptxemu.cuda.fatbin import ImageError, ptx_for
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.cuda.protocol import Operation, int32, read_launch, read_numbers, read_tensor_map
from ptxemu.descriptors.tensor_map import encode_tiled
from ptxemu.driver import rules
from ptxemu.driver.attributes import device_attribute, memory_bytes
from ptxemu.errors import (
    ExecutionError,
    LaunchError,
    PtxEmuError,
    StoppedError,
    UnsupportedInstructionError,
)
from ptxemu.launch_log import Log
from ptxemu.launch_setup import LaunchSetup
from ptxemu.machine.device import Device, device_for
from ptxemu.machine.layout import Layout
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.syntax.ast import Function

# cudaDeviceProp: the structure that cudaGetDeviceProperties fills, from the device's facts.
#
# CUDA 13 has other offsets than CUDA 12. The rows name what both have, with the attribute of the
# driver (CUdevice_attribute) that holds the value.

_SIZES = {12: 1032, 13: 1008}
# (field, offset in CUDA 13, offset in CUDA 12 (None: not there), format, attribute)
_ROWS: tuple[tuple[str, int | None, int | None, str, int], ...] = (
    ("sharedMemPerBlock", 296, 296, "Q", 8),
    ("regsPerBlock", 304, 304, "i", 12),
    ("warpSize", 308, 308, "i", 10),
    ("memPitch", 312, 312, "Q", 11),
    ("maxThreadsPerBlock", 320, 320, "i", 1),
    ("maxThreadsDim[0]", 324, 324, "i", 2),
    ("maxThreadsDim[1]", 328, 328, "i", 3),
    ("maxThreadsDim[2]", 332, 332, "i", 4),
    ("maxGridSize[0]", 336, 336, "i", 5),
    ("maxGridSize[1]", 340, 340, "i", 6),
    ("maxGridSize[2]", 344, 344, "i", 7),
    ("clockRate", None, 348, "i", 13),
    ("totalConstMem", 352, 352, "Q", 9),
    ("major", 360, 360, "i", 75),
    ("minor", 364, 364, "i", 76),
    ("textureAlignment", 368, 368, "Q", 14),
    ("texturePitchAlignment", 376, 376, "Q", 51),
    ("deviceOverlap", None, 384, "i", 15),
    ("multiProcessorCount", 384, 388, "i", 16),
    ("integrated", 388, 396, "i", 18),
    ("canMapHostMemory", 392, 400, "i", 19),
    ("surfaceAlignment", 552, 568, "Q", 30),
    ("concurrentKernels", 560, 576, "i", 31),
    ("asyncEngineCount", 584, 600, "i", 40),
    ("unifiedAddressing", 588, 604, "i", 41),
    ("memoryClockRate", None, 608, "i", 36),
    ("memoryBusWidth", 592, 612, "i", 37),
    ("l2CacheSize", 596, 616, "i", 38),
    ("persistingL2CacheMaxSize", 600, 620, "i", 108),
    ("maxThreadsPerMultiProcessor", 604, 624, "i", 39),
    ("streamPrioritiesSupported", 608, 628, "i", 78),
    ("globalL1CacheSupported", 612, 632, "i", 79),
    ("localL1CacheSupported", 616, 636, "i", 80),
    ("sharedMemPerMultiprocessor", 624, 640, "Q", 81),
    ("regsPerMultiprocessor", 632, 648, "i", 82),
    ("managedMemory", 636, 652, "i", 83),
    ("pageableMemoryAccess", 652, 672, "i", 88),
    ("concurrentManagedAccess", 656, 676, "i", 89),
    ("computePreemptionSupported", 660, 680, "i", 90),
    ("canUseHostPointerForRegisteredMem", 664, 684, "i", 91),
    ("cooperativeLaunch", 668, 688, "i", 95),
    ("sharedMemPerBlockOptin", 672, 696, "Q", 97),
    ("maxBlocksPerMultiProcessor", 688, 712, "i", 106),
    ("reservedSharedMemPerBlock", 696, 720, "Q", 111),
    ("hostRegisterSupported", 704, 728, "i", 99),
    ("memoryPoolsSupported", 720, 744, "i", 115),
    ("clusterLaunch", 748, 772, "i", 120),
)
_TOTAL_MEMORY_OFFSET = 288


def device_name(device: Device) -> str:
    """Return the name that cudaDeviceProp.name and cuDeviceGetName give."""
    return f"ptxemu {device.arch}"


def device_properties(device: Device, version: int) -> bytes:
    """The structure of CUDA `version` (12 or 13)."""
    block = bytearray(_SIZES[version])
    name = device_name(device).encode()
    block[: len(name)] = name
    struct.pack_into("<Q", block, _TOTAL_MEMORY_OFFSET, memory_bytes(device))
    for _, in_13, in_12, code, attribute in _ROWS:
        offset = in_13 if version == 13 else in_12
        if offset is not None:
            struct.pack_into(f"<{code}", block, offset, device_attribute(device, attribute) or 0)
    return bytes(block)


Printer = Callable[[str], None]
HostMemory = Callable[[Function, Sequence[bytes]], GlobalMemory]
"""Memory of the host's process that values of a kernel's parameters lead to."""


@dataclass(frozen=True, slots=True)
class _Library:
    """An image that the program has loaded."""

    handle: rules.LibraryHandle
    number: int
    module: Module


class Client:
    """One program."""

    def __init__(
        self,
        log: Log,
        arch: str,
        memory: EmulatedMemory,
        *,
        on_print: Printer | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Args:
        on_print: takes what kernels print; None: the stand-in prints it when the program waits.
        host_memory: finds what kernels may use beside the emulated memory; None: nothing.
        """
        self._log = log
        self._arch = arch
        self._memory = memory
        self._on_print = on_print
        self._host_memory = host_memory
        self._driver = rules.Driver()
        self._libraries: list[_Library] = []

    def handle(self, operation: int, data: bytes) -> tuple[int, bytes]:
        """The answer to a request, from the method of the operation's name: a status and bytes."""
        answer: Callable[[bytes], bytes] = getattr(self, f"_{Operation(operation).name.lower()}")
        try:
            return rules.Status.SUCCESS, answer(data)
        except ImageError as error:
            self._log.fail(str(error))
            return rules.Status.NO_BINARY_FOR_GPU, b""
        except LaunchError as error:
            self._log.note(f"refused, as CUDA does: {error}")
            return rules.status_of(error), b""
        except UnsupportedInstructionError:
            return rules.Status.NOT_SUPPORTED, b""
        except StoppedError as error:
            self._log.fail(str(error))
            return rules.Status.UNKNOWN, b""
        except PtxEmuError as error:
            self._log.fail(f"{type(error).__name__}: {error}")
            return rules.Status.INVALID_PTX, b""

    def _hello(self, data: bytes) -> bytes:
        return struct.pack("<5Q", *self._memory.layout, memory_bytes(device_for(self._arch)))

    def _module(self, data: bytes) -> bytes:
        """The id of a loaded image; its variables get their addresses."""
        number = len(self._libraries) + 1
        image = rules.PtxImage(ptx_for(data, self._arch), f"module {number}")
        module = image.module(self._arch)
        self._place_variables(module)
        id_, handle = self._driver.load_library(image)
        self._libraries.append(_Library(handle, id_, module))
        return struct.pack("<Q", number)

    def _place_variables(self, module: Module) -> None:
        syntax = module.syntax
        variables = [v for v in syntax.variables if v.space in ("const", "global")]
        for variable in variables:
            module.placed[variable.name] = self._memory.place_variable(
                variable.name, b"", variable.size, is_managed=variable.is_managed
            )
        if not any(variable.initial for variable in variables):
            return
        layout = Layout(syntax, next(iter(syntax.kernels.values()), _NO_KERNEL), 0, module.placed)
        for variable in variables:  # with addresses of other variables, now that all are known
            data = layout.initial_bytes(variable)
            if data:
                view = self._memory.view(module.placed[variable.name], len(data))
                view[:] = memoryview(data)

    def _library(self, number: int) -> _Library:
        return self._libraries[number - 1]

    def _function(self, data: bytes) -> bytes:
        (number,) = read_numbers(data, 1)
        library = self._library(number)
        name = data[8:].decode()
        handle = self._driver.get_kernel(library.number, name, self._arch)
        parameters = library.module.syntax.kernels[name].parameters
        size = parameters[-1].offset + parameters[-1].size if parameters else 0
        found = struct.pack("<QII", handle, len(parameters), size)
        return found + b"".join(struct.pack("<II", p.offset, p.size) for p in parameters)

    def _launch(self, data: bytes) -> bytes:
        """The error that the kernel ran into (0: none), then what it printed."""
        message = read_launch(data)
        kernel = self._driver.kernel(message.function)
        function = kernel.image.module(self._arch).syntax.kernels[kernel.name]
        values = tuple(
            message.parameters[p.offset : p.offset + p.size].ljust(p.size, b"\0")
            for p in function.parameters
        )
        request = rules.LaunchRequest(
            kernel,
            message.grid,
            message.block,
            message.cluster,
            message.shared_bytes,
            values,
            message.is_cooperative,
        )
        module = self._driver.check_launch(request, self._arch)
        memory = GlobalMemory()
        if self._host_memory is not None:
            memory = self._host_memory(function, values)
        self._memory.register_in(memory)
        try:
            setup = LaunchSetup.of(request, module, memory)
            result = self._log.run(setup, is_programmatic=message.is_programmatic)
        except ExecutionError as error:
            return int32(rules.execution_status(error))
        text = "".join(result.printed)
        if self._on_print is not None:
            self._on_print(text)
            text = ""
        return int32(rules.Status.SUCCESS) + text.encode(errors="surrogateescape")

    def _symbol(self, data: bytes) -> bytes:
        (number,) = read_numbers(data, 1)
        module = self._library(number).module
        name = data[8:].decode()
        if name not in module.placed:
            raise rules.DriverError(rules.Status.NOT_FOUND, f"no variable {name!r} in the module")
        size = next(v.size for v in module.syntax.variables if v.name == name)
        return struct.pack("<QQ", module.placed[name], size)

    def _get_function_attribute(self, data: bytes) -> bytes:
        function, attribute = read_numbers(data, 2)
        return int32(self._driver.kernel_attribute(function, attribute, self._arch))

    def _set_function_attribute(self, data: bytes) -> bytes:
        function, attribute, value = read_numbers(data, 3)
        self._driver.set_kernel_attribute(function, attribute, value, self._arch)
        return b""

    def _occupancy(self, data: bytes) -> bytes:
        function, is_clusters, threads, shared_bytes, cluster = read_numbers(data, 5)
        kernel: rules.KernelHandle = self._driver.kernel(function)
        per_sm = self._driver.occupancy(kernel, threads, shared_bytes, self._arch)
        if not is_clusters:
            return int32(per_sm)
        return int32(device_for(self._arch).num_sms * per_sm // max(cluster, 1))

    def _device_attribute(self, data: bytes) -> bytes:
        (attribute,) = read_numbers(data, 1)
        value = device_attribute(device_for(self._arch), attribute)
        if value is None:
            raise rules.DriverError(
                rules.Status.INVALID_VALUE, f"device attribute {attribute} is not known"
            )
        return int32(value)

    def _device_properties(self, data: bytes) -> bytes:
        (version,) = read_numbers(data, 1)
        return device_properties(device_for(self._arch), version)

    def _tensor_map(self, data: bytes) -> bytes:
        return encode_tiled(**read_tensor_map(data)._asdict())

    def _allocated(self, data: bytes) -> bytes:
        base, size, kind = read_numbers(data, 3)
        self._memory.allocated(base, size, kind)
        return b""

    def _freed(self, data: bytes) -> bytes:
        (base,) = read_numbers(data, 1)
        self._memory.freed(base)
        return b""

    def _unsupported(self, data: bytes) -> bytes:
        name = data.decode()
        self._log.note(f"{name} is not emulated: the program got cudaErrorNotSupported")
        return b""


_NO_KERNEL = Function("", True, ())
