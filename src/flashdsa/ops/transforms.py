"""torch's transforms of a call other than gradients: vmap and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.ops.spec import OpSpec

AUTOCAST_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
"""Dispatch key of autocast -> device type."""
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(
    torch._C.DispatchKey.AutocastCUDA
)
_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts; as in torch's own operations, fp64 stays as it is."""


def one_by_one(spec: OpSpec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The operation under vmap: a call for each element of the batch, its results stacked."""

    def run(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        for operand, dim, value in zip(spec.operands, in_dims, arguments, strict=False):
            if operand.written and dim is None and value is not None:
                raise UnsupportedError(
                    f"{operand.name}: {spec.operation} under vmap writes it once an element of the "
                    "batch; it must have the batch's dimension"
                )

        def element(number: int) -> list[Any]:
            chosen = list(arguments)
            for place, (value, dim) in enumerate(zip(arguments, in_dims, strict=True)):
                if dim is not None:
                    view = value.select(dim, number)
                    written = spec.operands[place].written
                    chosen[place] = view if written else view.contiguous()
            return chosen

        results = [op(*element(number)) for number in range(info.batch_size)]
        if not spec.outputs:
            return None, None
        if len(spec.outputs) == 1:
            return torch.stack(results), 0
        return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0,) * len(
            spec.outputs
        )

    return run


def autocast(spec: OpSpec, op: torch._ops.OpOverload, device: str) -> Callable[..., Any]:
    """The operation under torch.autocast: operands of q's dtype are cast to autocast's."""

    def run(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def cast(name: str, value: Any) -> Any:
            is_cast = name in spec.autocast and isinstance(value, Tensor) and value.dtype in _CAST
            return value.to(dtype) if is_cast else value

        count = len(spec.operands)
        operands = [cast(o.name, x) for o, x in zip(spec.operands, arguments, strict=False)]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return op(*operands, *arguments[count:])

    return run
