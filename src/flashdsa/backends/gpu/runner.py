"""The runner of a CUDA device."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.gpu import workspaces
from flashdsa.backends.gpu.occupancy import DriverError, clusters_at_once
from flashdsa.backends.gpu.workspaces import Workspaces
from flashdsa.backends.reasons import Explain
from flashdsa.backends.runner import TRITON_ALIGNMENT, Allocate
from flashdsa.jit.loader import load
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from flashdsa.problem import INT32_MAX

logger = logging.getLogger("flashdsa.gpu")

_NOTHING = nullcontext()
_empty_strided: Any = None
"""Allocation on the current device, past torch's dispatcher, as Inductor's code allocates: after a
pause of the process `torch.empty` takes 60 us. None if torch has no such function, or no CUDA."""
_current_device: Callable[[], int] = torch.cuda.current_device
"""Current device of a process whose CUDA has begun, as it has once a tensor exists: without the
check."""
if hasattr(torch._C, "_cuda_getDevice"):
    _current_device = torch._C._cuda_getDevice
    _empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class _Thread(threading.local):
    """State of each thread: whether it is known to have a context. Compiled functions launch by the
    driver, which has none for a new thread, and refuses a launch without one (error 201)."""

    has_context = False


THREAD = _Thread()


def make_current(device: int) -> None:
    """Make the device's primary context this thread's, unless it has one; once a thread.

    CUDA's runtime, through which torch launches, does so with a thread's first call.
    """
    THREAD.has_context = True
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    # Errors and results of calls are ignored: a launch without a context reports the error.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if context.value is None:
        driver.cuDeviceGet(ctypes.byref(handle), device)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        driver.cuCtxSetCurrent(context)


def _specialization(value: Any) -> Any:
    """At least what Triton compiles an argument for: type, alignment, 1 and numbers of 64 bits."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % TRITON_ALIGNMENT == 0
    if type(value) is int:
        return value == 1, value % TRITON_ALIGNMENT == 0, abs(value) > INT32_MAX
    return type(value)


class Gpu:
    """A `flashdsa.backends.runner.Runner`; `gpu` gives the one of a device."""

    def __init__(self, index: int) -> None:
        """Start without asking the device."""
        self.index = index
        self.device = torch.device("cuda", index)
        self._capacities: dict[tuple[int, int], Mapping[int, int]] = {}
        self._workspaces: dict[int, Workspaces] = defaultdict(Workspaces)
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    @cached_property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Clusters by size as the driver says, asked once. If it does not say: a warning, and one
        CTA an SM, and pairs of them."""
        key = threads, smem_bytes
        if key not in self._capacities:
            try:
                self._capacities[key] = clusters_at_once(self.index, threads, smem_bytes)
            except (OSError, AttributeError, DriverError) as error:
                logger.warning("the driver does not say how many clusters run at once: %s", error)
                self._capacities[key] = {1: self.num_sms, 2: self.num_sms // 2}
        return self._capacities[key]

    def explain(self, choice: Explain) -> None:
        """Nobody asks."""

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """Loaded, or compiled first."""
        return load(spec, plan)

    @cached_property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability."""
        return torch.cuda.get_device_capability(self.index)

    def launch_triton(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], **options: Any
    ) -> None:
        """Triton compiles a kernel at its first launch, and keeps it on disk.

        Its own search for the compiled one costs more than the launch; a call that Triton would
        compile alike takes what it found before.
        """
        key = id(kernel), *options.values(), *map(_specialization, arguments)
        found = self._compiled.get(key)
        if found is not None:
            compiled, constants = found
            compiled[grid](*arguments, *constants)
            return
        compiled = kernel[grid](*arguments, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            constants = [options[one.name] for one in kernel.params[len(arguments) :]]
            self._compiled[key] = compiled, constants

    def launching(self) -> AbstractContextManager[Any]:
        """The device is torch's current one, where a function's first call loads the kernel, and
        the thread has its context."""
        if _current_device() == self.index:
            if not THREAD.has_context:
                make_current(self.index)
            return _NOTHING
        return torch.cuda.device(self.index)

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """Same as `Runner.on_device`; no context manager if the device is the current one."""
        index = self.index

        def run(operands: Any) -> Any:
            if _current_device() == index:
                if not THREAD.has_context:
                    make_current(index)
                return serve(operands)
            with torch.cuda.device(index):
                return serve(operands)

        return run

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Not initialised."""
        if _empty_strided is None or _current_device() != self.index:
            return torch.empty(shape, dtype=dtype, device=self.device)
        made: Tensor = _empty_strided(shape, _strides(shape), dtype)
        return made

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`empty` as a function; past torch's dispatcher if that is possible."""
        if _empty_strided is None:
            return partial(torch.empty, shape, dtype=dtype, device=self.device)
        return partial(_empty_strided, shape, _strides(shape), dtype)

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Any, ...]:
        """Workspace of the device's current stream, or of the capture on it."""
        if _current_device() != self.index:
            with self.launching():
                return self.workspace(key, allocate, counters)
        known = self._workspaces[key]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_isCurrentStreamCapturing():
            return known.of_capture(stream, partial(self._make, allocate, counters))
        kept = known.of_stream.get(stream)
        if kept is None:
            if counters and not known.of_stream:
                known.spare.extend(self._zeros(workspaces.GRAPHS, counters))
                # Graphs may replay on any stream, and none waits for this one.
                torch.cuda.current_stream().synchronize()
            kept = known.of_stream[stream] = self._make(allocate, counters, None)
        return kept

    def _make(self, allocate: Allocate, counters: int, cleared: Tensor | None) -> tuple[Any, ...]:
        """Make a new workspace; its counters, if any, are `cleared` if given."""
        import tvm_ffi

        first: tuple[Tensor, ...] = ()
        if counters:
            first = (self._zeros(counters) if cleared is None else cleared,)
        return tuple(map(tvm_ffi.from_dlpack, (*first, *allocate(self))))

    def _zeros(self, *shape: int) -> Tensor:
        return self.empty(*shape, dtype=torch.int32).zero_()


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@cache
def gpu(device: torch.device) -> Gpu:
    """The runner of a tensor's device."""
    return Gpu(device.index)
