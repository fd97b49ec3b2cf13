"""torch.cuda and libcuda that answer as on a machine with one H200, and tensors on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRIVER = """
cuGetProcAddress_v2 cuGetProcAddress cuPointerGetAttribute cuTensorMapEncodeTiled cuInit
cuDriverGetVersion cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain
cuGetErrorString cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity
cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap
cuMemRetainAllocationHandle cuMemGetAddressRange_v2
"""
GIB = 2**30
NAME, CAPABILITY = "NVIDIA H200", (9, 0)
SIZES = SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=140 * GIB, multi_processor_count=132,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, warp_size=32,
    L2_cache_size=60 << 20, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    uuid="GPU-0", gcnArchName="", is_integrated=0,
)  # fmt: skip


class Stream:
    """A stream or an event that does nothing."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def pretend_a_gpu() -> None:
    """Let torch.cuda and libcuda answer as on a machine with one H200."""
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in DRIVER.split()))
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    answers = {
        "is_available": True, "device_count": 1, "_device_count_nvml": 1, "current_device": 0,
        "is_initialized": False, "get_device_capability": CAPABILITY, "get_device_name": NAME,
        "get_device_properties": SIZES, "mem_get_info": (130 * GIB, 140 * GIB),
        "is_current_stream_capturing": False, "current_stream": Stream(), "memory_stats": {},
        **dict.fromkeys(
            ("_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats",
             "set_stream")
        ),
    }  # fmt: skip
    answer_with(torch.cuda, answers)
    answer_with(
        torch.accelerator, {"is_available": True, "device_count": 1, "current_stream": Stream()}
    )
    for module in (torch, torch.cuda):
        module.Stream = module.Event = Stream  # type: ignore[assignment,attr-defined,misc]
    torch.cuda.stream = lambda stream: stream  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment]


def answer_with(module: Any, answers: dict[str, Any]) -> None:
    """Replace functions of a module by ones that return these values."""
    for name, value in answers.items():
        setattr(module, name, lambda *_, value=value, **__: value)


class OnTheCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call with other devices, and pin no memory."""
        if getattr(function, "__name__", "") in ("cuda", "pin_memory"):
            return args[0]
        named = {key: _cpu(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return function(*map(_cpu, args), **named)


def _cpu(value: Any) -> Any:
    """The CPU for a GPU, and other values as they are."""
    is_name = isinstance(value, str) and value.partition(":")[0] == "cuda"
    if is_name or (isinstance(value, torch.device) and value.type == "cuda"):
        return torch.device("cpu")
    return value
