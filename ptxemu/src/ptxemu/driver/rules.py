"""The emulated CUDA driver: libraries, kernels, their attributes, and launches.

It keeps the rules of a driver that a launch can break and reports them with the driver's error
codes. It knows handles and values only; `c_functions` moves them through C memory.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from dataclasses import dataclass, field
from enum import IntEnum

from ptxemu.api import Module, load
from ptxemu.driver.attributes import SHARED_WITHOUT_OPT_IN, KernelAttribute, device_attribute
from ptxemu.errors import DeadlockError, ExecutionError, LaunchError, StepLimitError
from ptxemu.machine.device import ctas_per_sm, runs_on
from ptxemu.machine.layout import Layout

PORTABLE_CLUSTER = 8
_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)


class Status(IntEnum):
    """The cudaError_t and CUresult values that the emulated driver returns (same numbers)."""

    SUCCESS = 0
    INVALID_VALUE = 1
    INVALID_CONFIGURATION = 9
    NO_BINARY_FOR_GPU = 209
    INVALID_PTX = 218
    INVALID_HANDLE = 400
    NOT_FOUND = 500
    ILLEGAL_ADDRESS = 700
    LAUNCH_TIMEOUT = 702
    ASSERT = 710
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILED = 719
    COOPERATIVE_LAUNCH_TOO_LARGE = 720
    NOT_SUPPORTED = 801
    INVALID_CLUSTER_SIZE = 912
    UNKNOWN = 999


class DriverError(LaunchError):
    """A refusal of the driver: `status` is the code, the text says why."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(f"{message} (CUDA_ERROR_{status.name})")
        self.status = status


def status_of(error: BaseException) -> Status:
    """The code that a driver would return for `error`."""
    if isinstance(error, DriverError):
        return error.status
    named = re.search(r"\(CUDA_ERROR_(\w+)\)", str(error))
    if named is not None and named[1] in Status.__members__:
        return Status[named[1]]
    if isinstance(error, LaunchError):
        return Status.INVALID_VALUE
    return Status.LAUNCH_FAILED


def execution_status(error: ExecutionError) -> Status:
    """The error that a kernel leaves on a GPU, for what stopped it here.

    A kernel that never ends has no status of its own: the watchdog of a display is what ends one.
    """
    text = str(error)
    if isinstance(error, DeadlockError | StepLimitError):
        return Status.LAUNCH_TIMEOUT
    if "assertion `" in text:
        return Status.ASSERT
    if re.search(r"expected \d+-byte alignment|aligned to \d+ bytes|misaligned", text):
        return Status.MISALIGNED_ADDRESS
    if "illegal " in text and " address 0x" in text:
        return Status.ILLEGAL_ADDRESS
    return Status.LAUNCH_FAILED


class PtxImage:
    """The PTX of one compiled function, parsed when it is first needed."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self._modules: dict[str | None, Module] = {}

    def module(self, arch: str | None) -> Module:
        """The loaded module for the device `arch` (None: what the text's .target says).

        Raises:
            DriverError: the text was compiled for another architecture.
        """
        if arch not in self._modules:
            self.check_target(arch)
            self._modules[arch] = load(self.text, arch=arch)
        return self._modules[arch]

    def check_target(self, arch: str | None) -> None:
        """Look whether the text is for the device `arch`, without parsing it.

        Raises:
            DriverError: it was compiled for another architecture.
        """
        found = _TARGET.search(self.text)
        target = "" if found is None else found[1]
        if arch is not None and not runs_on(target, arch):
            raise DriverError(
                Status.NO_BINARY_FOR_GPU,
                f"{self.name}: compiled for {target}, but emulated on {arch}",
            )


@dataclass(eq=False)
class KernelHandle:
    """A kernel of a loaded library with the attributes that the host has set."""

    image: PtxImage
    name: str
    max_dynamic_shared: int | None = None
    allows_nonportable_cluster: bool = False


@dataclass(eq=False)
class LibraryHandle:
    """A library that the host has loaded."""

    image: PtxImage
    kernels: dict[int, KernelHandle] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchRequest:
    """One call of cudaLaunchKernelEx, read out of C memory."""

    kernel: KernelHandle
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    dynamic_shared_bytes: int
    arguments: tuple[bytes, ...]
    is_cooperative: bool = False
    is_programmatic: bool = False
    """It may begin before the end of the launch before it."""


class Driver:
    """Handles that stay valid as long as the function whose code holds them does."""

    def __init__(self) -> None:
        self._numbers = itertools.count(0x1000)
        self._libraries: weakref.WeakValueDictionary[int, LibraryHandle] = (
            weakref.WeakValueDictionary()
        )
        self._kernels: weakref.WeakValueDictionary[int, KernelHandle] = (
            weakref.WeakValueDictionary()
        )

    def load_library(self, image: PtxImage) -> tuple[int, LibraryHandle]:
        """A handle; the caller keeps the LibraryHandle alive."""
        number = next(self._numbers)
        library = LibraryHandle(image)
        self._libraries[number] = library
        return number, library

    def get_kernel(self, library: int, name: str, arch: str | None) -> int:
        """A handle of the kernel `name` of a library."""
        owner = self._libraries.get(library)
        if owner is None:
            raise DriverError(Status.INVALID_HANDLE, f"library handle 0x{library:x} is not valid")
        kernels = owner.image.module(arch).kernels
        if name not in kernels:
            raise DriverError(
                Status.NOT_FOUND, f"no kernel {name!r}; the PTX has {', '.join(kernels)}"
            )
        number = next(self._numbers)
        owner.kernels[number] = self._kernels[number] = KernelHandle(owner.image, name)
        return number

    def kernel(self, number: int) -> KernelHandle:
        """The kernel of a handle."""
        kernel = self._kernels.get(number)
        if kernel is None:
            raise DriverError(Status.INVALID_HANDLE, f"kernel handle 0x{number:x} is not valid")
        return kernel

    def kernel_attribute(self, number: int, attribute: int, arch: str | None) -> int:
        """cuKernelGetAttribute."""
        kernel = self.kernel(number)
        module = kernel.image.module(arch)
        static = _static_shared_bytes(module, kernel.name)
        device = module.device
        directives = module.syntax.kernels[kernel.name].directives
        required = directives.get("reqnctapercluster", ())
        cluster = (*required, *(1,) * (3 - len(required))) if required else (0, 0, 0)
        name = KernelAttribute
        answers = {
            name.MAX_THREADS_PER_BLOCK: math.prod(
                directives.get("maxntid", (device.max_threads_per_cta,))
            ),
            name.SHARED_SIZE_BYTES: static,
            name.CONST_SIZE_BYTES: 0,
            name.LOCAL_SIZE_BYTES: 0,
            name.NUM_REGS: 255,
            name.PTX_VERSION: module.syntax.version[0] * 10 + module.syntax.version[1],
            name.BINARY_VERSION: device.capability[0] * 10 + device.capability[1],
            name.CACHE_MODE_CA: 0,
            name.MAX_DYNAMIC_SHARED_SIZE_BYTES: _dynamic_limit(kernel, static),
            name.PREFERRED_SHARED_MEMORY_CARVEOUT: -1,
            name.CLUSTER_SIZE_MUST_BE_SET: int("reqnctapercluster" in directives),
            name.REQUIRED_CLUSTER_WIDTH: cluster[0],
            name.REQUIRED_CLUSTER_HEIGHT: cluster[1],
            name.REQUIRED_CLUSTER_DEPTH: cluster[2],
            name.CLUSTER_SCHEDULING_POLICY_PREFERENCE: 0,
            name.NON_PORTABLE_CLUSTER_SIZE_ALLOWED: int(kernel.allows_nonportable_cluster),
        }
        if attribute not in KernelAttribute.__members__.values():
            raise DriverError(Status.INVALID_VALUE, f"kernel attribute {attribute} is not known")
        return answers[KernelAttribute(attribute)]

    def set_kernel_attribute(
        self, number: int, attribute: int, value: int, arch: str | None
    ) -> None:
        """cudaKernelSetAttributeForDevice, cudaFuncSetAttribute."""
        kernel = self.kernel(number)
        if attribute == KernelAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES:
            module = kernel.image.module(arch)
            limit = module.device.shared_bytes_per_cta - _static_shared_bytes(module, kernel.name)
            if not 0 <= value <= limit:
                raise DriverError(
                    Status.INVALID_VALUE,
                    f"{kernel.name}: at most {limit} bytes of dynamic shared memory; got {value}",
                )
            kernel.max_dynamic_shared = value
        elif attribute == KernelAttribute.NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            kernel.allows_nonportable_cluster = value != 0

    def device_attribute(self, image: PtxImage, attribute: int, arch: str | None) -> int:
        """cudaDeviceGetAttribute, for the device that `image` runs on."""
        value = device_attribute(image.module(arch).device, attribute)
        if value is None:
            raise DriverError(Status.INVALID_VALUE, f"device attribute {attribute} is not known")
        return value

    def occupancy(
        self, kernel: KernelHandle, threads: int, dynamic_shared_bytes: int, arch: str | None
    ) -> int:
        """CTAs of the kernel that an SM holds at once; 0: one has no room.

        Args:
            threads: of a CTA.
        """
        module = kernel.image.module(arch)
        used = _static_shared_bytes(module, kernel.name) + dynamic_shared_bytes
        device = module.device
        if used > device.shared_bytes_per_cta or threads > device.max_threads_per_cta:
            return 0
        directives = module.syntax.kernels[kernel.name].directives
        return ctas_per_sm(device, threads, used, directives)

    def check_launch(self, request: LaunchRequest, arch: str | None) -> Module:
        """The rules that depend on kernel attributes; the others are the launch's own.

        Raises:
            DriverError: the launch is refused.
        """
        kernel = request.kernel
        module = kernel.image.module(arch)
        for name, extent in (("grid", request.grid), ("block", request.block)):
            if 0 in extent:
                raise DriverError(Status.INVALID_CONFIGURATION, f"{name}: {extent} is empty")
        limit = _dynamic_limit(kernel, _static_shared_bytes(module, kernel.name))
        if request.dynamic_shared_bytes > limit:
            raise DriverError(
                Status.INVALID_VALUE,
                f"smem: {kernel.name} may use {limit} bytes of dynamic shared memory; "
                f"got {request.dynamic_shared_bytes}",
            )
        per_sm = self.occupancy(
            kernel, math.prod(request.block), request.dynamic_shared_bytes, arch
        )
        resident = module.device.num_sms * max(per_sm, 1)
        if request.is_cooperative and math.prod(request.grid) > resident:
            raise DriverError(
                Status.COOPERATIVE_LAUNCH_TOO_LARGE,
                f"grid: at most {resident} CTAs are resident at once; got {request.grid}",
            )
        ctas = math.prod(request.cluster or (1,))
        if ctas > PORTABLE_CLUSTER and not kernel.allows_nonportable_cluster:
            raise DriverError(
                Status.INVALID_CLUSTER_SIZE,
                f"cluster: {request.cluster} has {ctas} CTAs; more than {PORTABLE_CLUSTER} need "
                "the kernel's non-portable cluster attribute",
            )
        return module


def _static_shared_bytes(module: Module, kernel: str) -> int:
    return Layout(module.syntax, module.syntax.kernels[kernel], 0).static_shared_bytes


def _dynamic_limit(kernel: KernelHandle, static: int) -> int:
    if kernel.max_dynamic_shared is not None:
        return kernel.max_dynamic_shared
    return max(SHARED_WITHOUT_OPT_IN - static, 0)
