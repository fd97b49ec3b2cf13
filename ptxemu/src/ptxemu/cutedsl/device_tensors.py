"""Torch tensors that say they are on a GPU: CPU tensors with a mark, kept by a function mode.

Scripts written for a GPU ask for `device="cuda"`. Under this mode they get CPU tensors in memory
that is known to stand for a GPU's. Such a tensor answers `is_cuda` and `device` as a GPU tensor
would, what is computed from it is in such memory too, and copies between the two "devices" copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from ptxemu.cutedsl import gpu_blocks

ALIGNMENT = 512
"""Bytes: of every block of torch's CUDA allocator."""
_MARK = "_ptxemu_on_gpu"
_GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_COPIES = ("to", "cuda", "cpu")


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it is on the GPU: by its memory, or (empty ones) by a mark."""
    return getattr(tensor, _MARK, False) is True or gpu_blocks.is_start(_start(tensor))


class DeviceTensors(TorchFunctionMode):
    """The mode; enter it around the code that wants a GPU."""

    is_pretending = False
    """Whether such a mode is entered; then the other tensors are the host's."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer for marked tensors, run everything else on the CPU, mark the results."""
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        getter = _GETTERS.get(_getter_key(func))
        if getter is not None and args and is_marked(args[0]):
            return getter(args[0])
        name = getattr(func, "__name__", "")
        wanted = _wanted_device(name, args, kwargs)
        if wanted is None and func in _device_constructors() and _default_device() == "cuda":
            wanted = kwargs["device"] = "cuda"
        if name == "cuda":
            args, kwargs = args[:1], {}
            func = torch.Tensor.clone
        elif name == "pin_memory":
            return args[0]
        args = tuple(_on_cpu(arg) for arg in args)
        kwargs = {key: _on_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
        result = func(*args, **kwargs)
        from_gpu = any(map(is_marked, _tensors((*args, *kwargs.values()))))
        if name in _COPIES and wanted is not None and result is args[0]:
            result = result.clone() if from_gpu != (wanted == "cuda") else result
        if wanted == "cuda" or (wanted is None and from_gpu):
            _moved(result, (*args, *kwargs.values()))
            _mark(result)
            if name == "__set__":
                _mark(args[0])
        return result


def _getter_key(func: Any) -> Any:
    """A property of torch.Tensor reaches the mode as the `__get__` of its descriptor."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(func, "__self__", None)
    return func


_GETTERS: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.device: lambda tensor: _GPU,
    torch.Tensor.is_cuda: lambda tensor: True,
    torch.Tensor.is_cpu: lambda tensor: False,
    torch.Tensor.get_device: lambda tensor: 0,
    torch.Tensor.__dlpack_device__: lambda tensor: (2, 0),
}


def _wanted_device(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> str | None:
    """The device type that a call names: by its name, a device, or a string."""
    if name in ("cuda", "cpu"):
        return name
    named = kwargs.get("device")
    candidates = [named] if named is not None else [*args][1:] if name == "to" else []
    for candidate in candidates:
        kind = _device_type(candidate)
        if kind is not None:
            return kind
    return None


def _default_device() -> str:
    """Return the device that `torch.set_default_device` or `with torch.device(...)` has set."""
    current = torch.utils._device.CURRENT_DEVICE
    return "cpu" if current is None else current.type


def _device_type(value: Any) -> str | None:
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu"):
        return value.split(":")[0]
    if isinstance(value, int) and not isinstance(value, bool):
        return "cuda"
    if isinstance(value, torch.Tensor):
        return "cuda" if is_marked(value) else "cpu"
    return None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _moved(result: Any, inputs: tuple[Any, ...]) -> None:
    """Put fresh tensors of `result` where a GPU's allocator could have put them.

    Kernels rely on that alignment; torch's CPU allocator gives 64 bytes. What shares memory with
    an input is a view or the result of an in-place operation, and stays.
    """
    taken = {_start(tensor) for tensor in _tensors(inputs)}
    for tensor in _tensors([result]):
        start = _start(tensor)
        if start in (0, *taken) or gpu_blocks.is_start(start):
            continue
        storage = tensor.untyped_storage()
        room = np.empty(storage.nbytes() + ALIGNMENT, dtype=np.uint8)
        offset = -int(room.ctypes.data) % ALIGNMENT
        block = room[offset : offset + storage.nbytes()]
        memory = torch.from_numpy(block).untyped_storage()
        memory.copy_(storage)
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=_CPU).set_(memory, *place)
        gpu_blocks.add(block)


def _start(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none on the CPU."""
    if tensor.layout is not torch.strided:
        return 0
    storage = tensor.untyped_storage()  # not tensor.device: the mode answers that
    return storage.data_ptr() if storage.device.type == "cpu" and storage.nbytes() else 0


def _mark(result: Any) -> None:
    for tensor in _tensors([result]):
        setattr(tensor, _MARK, True)
