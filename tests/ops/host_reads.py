"""Notes the operations of torch at which a host waits for a GPU, seen on tensors of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READING = (
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique", "_unique",
    "_unique2", "unique_dim", "unique_consecutive",
)  # fmt: skip
"""What gives a number to Python, or a tensor as long as values say."""


class HostReads(TorchDispatchMode):
    """Within it, `found` has the name of each operation that would wait, one a call.

    Copies to the host (`cpu`, `tolist`, `numpy`) are none on the CPU, and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in _READING or masks or counted:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
