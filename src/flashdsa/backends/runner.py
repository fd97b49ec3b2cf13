"""Device that a backend's code runs on: a GPU, or the emulator.

A backend is written once. Its functions are `bind(runner, operands, **parameters)`; the runner
gives them kernels, memory and the facts of the device that decide how a launch is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from flashdsa.backends.reasons import Explain
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec
from flashdsa.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Allocate = Callable[["Runner"], "tuple[Tensor, ...]"]
TRITON_ALIGNMENT = 16
"""Triton compiles for addresses and numbers that are multiples of it (triton/runtime/jit.py)."""


def by_torch(
    function: Callable[..., Any], runner: Runner, operands: Any, **parameters: Any
) -> Callable[[Any], Any]:
    """Bind a function of the CPU backend, which takes tensors of any device."""
    kind = type(operands)
    return runner.on_device(lambda given: function(kind(*given), **parameters))


def allowed_clusters(capacity: Mapping[int, int], usual: int) -> dict[int, int]:
    """Return the entries of `capacity`, clusters of each size, that are not too large.

    Args:
        usual: the most CTAs of a cluster if FLASHDSA_MAX_CLUSTER is not set.
    """
    most = Settings.from_environment().max_cluster or usual
    return {size: number for size, number in capacity.items() if size <= most}


class DeviceFacts(Protocol):
    """Facts of a device that decide which kernels serve a call."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability."""

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """CTAs of a cluster -> such clusters that run at once; 0: they cannot run.

        Args:
            threads, smem_bytes: of a CTA.
        """


class Runner(DeviceFacts, Protocol):
    """A device."""

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """The compiled function of a plan. It takes tensors of the device, holds them against what
        it was compiled for, and launches on the current stream; called inside `launching()`."""

    def explain(self, choice: Explain) -> None:
        """Hear why kernels are chosen, where they are; only a `Recorder` calls `choice`."""

    def launch_triton(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], **options: Any
    ) -> None:
        """Launch a kernel of Triton; called inside `launching()`.

        Args:
            arguments: tensors of the device and numbers, in the order of the kernel's parameters
                without constants.
            options: num_warps, num_stages, and the constants by name.
        """

    def launching(self) -> AbstractContextManager[Any]:
        """Context of calls of functions: the device is the current one."""

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """`serve`, which launches functions, as a function that calls it inside `launching()`."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor on the device, whose values nobody may rely on."""

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`empty` of these arguments as a function; called in what `on_device` was given."""

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Any, ...]:
        """Return `counters` Int32 counters, if any, and what `allocate` gives for this runner, in
        the form that costs a function the least.

        Launches of one stream share it by its key, as they follow each other, and so do those that
        one CUDA graph captures on a stream: its replays cannot meet another launch. Counters are 0
        before the first launch; each leaves them at 0.
        """
