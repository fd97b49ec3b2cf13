"""A device that is not there: tensors of the CPU that say, to some folders, that they are on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda")
_TORCH = str(Path(torch.__file__).parent)
_ANY_DEVICE = ("copy_", "__getitem__", "__setitem__", "type_as")
"""Functions that take an index, or what is copied, from the host."""


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for one in x:
            yield from _tensors(one)
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))


def is_there(x: Tensor) -> bool:
    """Whether the tensor is on the device."""
    return getattr(x, "is_elsewhere", False)


class Elsewhere(TorchFunctionMode):
    """While this is entered, code of `folders` sees tensors on `DEVICE` that other code made, or
    that were moved or made there; to all other code they are the CPU's.

    Attributes:
        found: places in `folders` that take a tensor from the device to the host, that holds more
            than a number, or that mix tensors of both, which a GPU refuses.
    """

    def __init__(self, *folders: Path) -> None:
        """Watch the code of these folders."""
        super().__init__()
        self.folders = tuple(map(str, folders))
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and say where its results are."""
        kwargs = dict(kwargs or {})
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        name = getattr(func, "__name__", "")
        if frame is None or not frame.f_code.co_filename.startswith(self.folders):
            return self._mark(func(*args, **kwargs), True)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}: {name}"
        given = list(_tensors((args, kwargs)))
        there = any(map(is_there, given))
        if name == "__get__" and func.__self__ is Tensor.device:
            return DEVICE if there else torch.device("cpu")
        wanted, args = self._destination(name, args, kwargs)
        if wanted is None:
            sized = {is_there(x) for x in given if x.dim()}
            if len(sized) > 1 and name not in _ANY_DEVICE:
                self.found.add(f"{place} mixes devices")
            return self._mark(func(*args, **kwargs), there)
        if there and not wanted and given[0].numel() > 1:
            self.found.add(f"{place} moves to the host")
        result = func(*args, **kwargs)
        return self._mark(result.clone() if any(result is x for x in given) else result, wanted)

    def _destination(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool | None, tuple[Any, ...]]:
        """Whether the results are wanted on the device, None: where the operands are; and the
        arguments with the CPU in its place."""
        if name == "cpu":
            return False, args
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            return is_there(args[1]), args
        devices = [kwargs["device"]] if kwargs.get("device") is not None else []
        if name == "to" and len(args) > 1 and isinstance(args[1], str | torch.device):
            devices, args = [args[1]], (args[0], "cpu", *args[2:])
        if not devices:
            return None, args
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return torch.device(devices[0]).type == DEVICE.type, args

    def _mark(self, result: Any, there: bool) -> Any:
        for x in _tensors(result):
            x.is_elsewhere = there  # type: ignore[attr-defined]
        return result
