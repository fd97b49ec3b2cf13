"""A runner that writes down what would be launched, and why; nothing is compiled or run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.reasons import Choice, Explain
from flashdsa.backends.runner import Allocate, DeviceFacts
from flashdsa.jit.loader import require_plan
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant

_SMALL_BYTES = 1 << 20


class Launch(NamedTuple):
    """A launch: the kernel's name, and of Triton's kernels the grid, tile, warps and stages."""

    kernel: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.detail}" if self.detail else self.kernel


class Recorder:
    """A `flashdsa.backends.runner.Runner` whose functions do nothing.

    Attributes:
        launched: the compiled functions that were called, each once, in their order.
        of_triton: the names of Triton's kernels, likewise.
        launches: how often each launch was made, in the order of the first ones.
        choices: what was chosen, in the order of the choices.
    """

    def __init__(self, device: DeviceFacts, memory: str = "cpu") -> None:
        """Record nothing yet.

        Args:
            device: the one whose facts decide.
            memory: device of the tensors; on "meta" they have sizes and no values.
        """
        self._device, self._memory = device, memory
        self.launched: dict[str, Variant] = {}
        self.of_triton: dict[str, None] = {}
        self.launches: Counter[Launch] = Counter()
        self.choices: list[Choice] = []

    @property
    def capability(self) -> tuple[int, int]:
        return self._device.capability

    def launch_triton(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], **options: Any
    ) -> None:
        """Write down the kernel's name, grid, tile, warps and stages."""
        self.of_triton[kernel.__name__] = None
        size = " x ".join(map(str, grid))
        tile = {name: value for name, value in options.items() if name.startswith("BLOCK")}
        tile |= {name[4:]: options[name] for name in ("num_warps", "num_stages") if name in options}
        detail = [f"grid {size}", *(f"{name} {value}" for name, value in tile.items())]
        self.launches[Launch(kernel.__name__, ", ".join(detail))] += 1

    @property
    def num_sms(self) -> int:
        return self._device.num_sms

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Return the device's."""
        return self._device.cluster_capacity(threads, smem_bytes)

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """Takes anything, writes nothing but its name.

        Raises:
            ValueError: the plan is none that the kernel is compiled for.
        """
        require_plan(spec, plan)
        variant = Variant(spec, plan)

        def note(*_: object) -> None:
            self.launched[variant.name] = variant
            self.launches[Launch(variant.name)] += 1

        return note

    def explain(self, choice: Explain) -> None:
        """Keep the choice."""
        self.choices.append(choice())

    def launching(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        return serve

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros if it is small, so that torch's own steps see numbers."""
        small = math.prod(shape) * dtype.itemsize <= _SMALL_BYTES
        return (torch.zeros if small else torch.empty)(shape, dtype=dtype, device=self._memory)

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        return partial(self.empty, *shape, dtype=dtype)

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Tensor, ...]:
        zeros = (self.empty(counters, dtype=torch.int32).zero_(),) if counters else ()
        return (*zeros, *allocate(self))
