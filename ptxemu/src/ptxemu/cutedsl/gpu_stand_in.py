"""`pretend_gpu`: lets code that was written for a machine with a GPU run on one without.

Tensors asked for on "cuda" are CPU tensors that say "cuda"; torch.cuda and the cuda.bindings answer
as the emulated device would; timing helpers run what they time once. Everything is put back when
the block ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ptxemu.cutedsl.cuda_bindings import CudaBindings
from ptxemu.cutedsl.session import Emulation
from ptxemu.machine.device import Device, device_for
from ptxemu.patching import Patches

_CUDA_VERSION = "13.0"
_TOTAL_MEMORY = 180 * 2**30


@contextmanager
def pretend_gpu(arch: str = "sm_100a") -> Iterator[None]:
    """Pretend that this machine has one GPU of architecture `arch`, for torch and CuTe DSL."""
    import torch

    from ptxemu.cutedsl.device_tensors import DeviceTensors

    device = device_for(arch)
    patches = Patches()
    with contextlib.ExitStack() as stack:
        stack.callback(patches.undo)
        mode = DeviceTensors()
        _patch_torch(patches, torch, mode)
        _patch_torch_cuda(patches, torch, device)
        with contextlib.suppress(ImportError):
            CudaBindings(device).install(
                patches,
                importlib.import_module("cuda.bindings.driver"),
                importlib.import_module("cuda.bindings.runtime"),
            )
        with contextlib.suppress(ImportError):
            _patch_timing(patches)
        patches.replace(DeviceTensors, "is_pretending", True)
        stack.enter_context(mode)
        yield


class _Done:
    """Work that has finished when its launch returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream(_Done):
    """The only stream."""

    cuda_stream = stream_id = device_index = priority = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(_Done):
    """An event that has always happened; no time passes between two of them."""

    cuda_event = 1

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Graph:
    """A CUDA graph of emulated launches; torch operations ran once, while it was captured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._nodes: list[Callable[[], None]] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        Emulation.active().begin_capture()

    def capture_end(self) -> None:
        self._nodes = Emulation.active().end_capture()

    def replay(self) -> None:
        for launch in self._nodes:
            launch()

    def reset(self) -> None:
        self._nodes = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextmanager
def _capture(graph: _Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """torch.cuda.graph"""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _same(value: Any, *names: str) -> dict[str, Callable[..., Any]]:
    """Functions of these names that give a value, whatever they are called with.

    Each is a function of its own: torch.compile has a rule for each, some different.
    """
    return {name: lambda *_, **__: value for name in names}


def _patch_torch_cuda(patches: Patches, torch: Any, device: Device) -> None:
    properties = SimpleNamespace(
        name=f"ptxemu {device.arch}",
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=_TOTAL_MEMORY,
        multi_processor_count=device.num_sms,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=device.registers_per_sm,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=device.shared_bytes_per_cta,
        shared_memory_per_multiprocessor=device.shared_bytes_per_cta + 1024,
        L2_cache_size=126 * 2**20,
    )
    generator = torch.default_generator
    values: dict[str, Any] = {
        **_same(True, "is_available", "is_initialized", "_is_compiled", "is_bf16_supported"),
        **_same(False, "can_device_access_peer"),
        **_same(None, "init", "_lazy_init", "set_device", "synchronize", "empty_cache"),
        **_same(None, "reset_max_memory_allocated", "reset_peak_memory_stats", "ipc_collect"),
        **_same(None, "set_stream"),
        **_same(0, "current_device", "memory_allocated", "memory_reserved"),
        **_same(0, "max_memory_allocated", "max_memory_reserved"),
        **_same(1, "device_count"),
        **_same(properties.name, "get_device_name"),
        **_same(device.capability, "get_device_capability"),
        **_same(properties, "get_device_properties"),
        **_same((_TOTAL_MEMORY, _TOTAL_MEMORY), "mem_get_info"),
        **_same((0, 0), "graph_pool_handle"),
        "is_current_stream_capturing": lambda: Emulation.active().is_capturing,
        "default_generators": (generator,),
        **dict.fromkeys(("seed", "seed_all"), generator.seed),
        "initial_seed": generator.initial_seed,
        **dict.fromkeys(("manual_seed", "manual_seed_all"), generator.manual_seed),
        "memory_stats": lambda *_: {},
        "get_arch_list": lambda: [device.arch],
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "get_stream_from_external": lambda *_: _Stream(),
        **dict.fromkeys(("stream", "device"), lambda _: contextlib.nullcontext()),
        **dict.fromkeys(("Stream", "ExternalStream"), _Stream),
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _capture,
    }
    for name, value in values.items():
        patches.replace(torch.cuda, name, value)
    patches.replace(torch.cuda.random, "current_device", lambda: 0)
    for name in ("range", "range_push", "range_pop", "mark"):
        patches.replace(torch.cuda.nvtx, name, lambda *_, **__: contextlib.nullcontext())
    patches.replace(torch.version, "cuda", _CUDA_VERSION)
    patches.replace(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def _patch_torch(patches: Patches, torch: Any, mode: Any) -> None:
    """Patch what torch does below its function modes: generators, streams, custom operators."""
    generator = torch.Generator

    class CpuGenerator(generator):  # type: ignore[misc, valid-type]
        """A generator for "cuda" is one for the CPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return generator.__new__(generator, device="cpu")

    patches.replace(torch, "Generator", CpuGenerator)
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patches.replace(torch, "compile", _uncompiled)
    _patch_custom_operators(patches, torch.library, mode)
    backward = torch.autograd.function.BackwardCFunction
    patches.replace(backward, "apply", _under(mode, backward.apply))


def _uncompiled(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch.compile without compiling: references run eagerly."""
    return function if callable(function) else lambda compiled: compiled


def _under(mode: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run with the function mode on: torch calls it with all modes off."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch.overrides import _get_current_function_mode_stack

        is_on = any(entered is mode for entered in _get_current_function_mode_stack())
        with contextlib.nullcontext() if is_on else mode:
            return function(*args, **kwargs)

    return run


def _patch_custom_operators(patches: Patches, library: Any, mode: Any) -> None:
    """Operators registered for "cuda" run, for torch takes these tensors for CPU ones."""

    original = library.custom_op

    def custom_op(
        name: str, fn: Any = None, /, *, mutates_args: Any, device_types: Any = None, **rest: Any
    ) -> Any:
        def register(function: Callable[..., Any]) -> Any:
            # Annotations that are strings are names of the function's own module.
            if rest.get("schema") is None:
                rest["schema"] = library.infer_schema(function, mutates_args=mutates_args)
            return original(name, _under(mode, function), mutates_args=mutates_args, **rest)

        return register if fn is None else register(fn)

    patches.replace(library, "custom_op", custom_op)


def _patch_timing(patches: Patches) -> None:
    """Benchmarks run once: on an emulator their time means nothing."""
    testing = importlib.import_module("cutlass.testing")

    def benchmark(
        callable: Callable[..., Any],
        *,
        kernel_arguments: Any = None,
        workspace_generator: Any = None,
        **_: Any,
    ) -> float:
        arguments = workspace_generator() if workspace_generator is not None else kernel_arguments
        callable(*arguments.args, **arguments.kwargs)
        return 1.0

    patches.replace(testing, "benchmark", benchmark)
    cute_testing = importlib.import_module("cutlass.cute.testing")
    patches.replace(cute_testing, "benchmark", benchmark)
