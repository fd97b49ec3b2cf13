"""Kernels that each case of `flashdsa check` reaches: every choice is made, nothing is run.

A backend's own functions choose plans and launch what was compiled for them; here they get
functions that write down their names instead. No kernel is compiled, no GPU is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.runner import Allocate
from flashdsa.errors import UnsupportedError
from flashdsa.jit.loader import require_plan
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant
from flashdsa.verify.check import DEVICES
from flashdsa.verify.check_list import COMPOSED, NEEDS, OPERATIONS, Check, checks_of

_SMALL_BYTES = 1 << 20


class Recorder:
    """A `flashdsa.backends.runner.Runner` whose functions do nothing.

    Attributes:
        launched: the compiled functions that were called, each once, in their order.
        of_triton: the names of Triton's kernels, likewise.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.launched: dict[str, Variant] = {}
        self.of_triton: dict[str, None] = {}

    @property
    def capability(self) -> tuple[int, int]:
        return self._device.capability

    def launch_triton(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], **options: Any
    ) -> None:
        """Write down the kernel's name."""
        self.of_triton[kernel.__name__] = None

    @property
    def num_sms(self) -> int:
        return self._device.num_sms

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Return the device's capacity; the CTA does not matter."""
        return self._device.clusters

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """Takes anything, writes nothing but its name.

        Raises:
            ValueError: the plan is none that the kernel is compiled for.
        """
        require_plan(spec, plan)
        variant = Variant(spec, plan)

        def note(*_: object) -> None:
            self.launched[variant.name] = variant

        return note

    def launching(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        return serve

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros if it is small, so that torch's own steps see numbers."""
        small = math.prod(shape) * dtype.itemsize <= _SMALL_BYTES
        return (torch.zeros if small else torch.empty)(shape, dtype=dtype)

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        return partial(self.empty, *shape, dtype=dtype)

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(counters, dtype=torch.int32),) if counters else ()
        return (*zeros, *allocate(self))


@dataclass(frozen=True)
class Reached:
    """Kernels or functions that a case of an operation reaches on a backend.

    Attributes:
        kernels: compiled functions; none where torch or the CPU backend does all.
        functions: "module:function" of the backend's implementations if it has no kernels, or
            names of Triton's kernels.
        refused: why the backend does not take the case, or "".
    """

    operation: str
    case: str
    kernels: tuple[Variant, ...] = ()
    functions: tuple[str, ...] = ()
    refused: str = ""


def list_launches(backend: str, operations: Collection[str] | None = None) -> list[Reached]:
    """List the kernels of each case of `run_checks`, in the order of `OPERATIONS`.

    The device is not here: an H200 for Hopper, a B200 for Blackwell. The number of its SMs
    decides some choices, so another GPU of the family may choose otherwise.

    Args:
        backend: the name of one; "sm90" and "emulate-sm90" choose alike.
        operations: names out of `OPERATIONS`; None for all of them.
    """
    wanted = OPERATIONS if operations is None else tuple(operations)
    emulated = backend if backend.startswith(("emulate", "cpu")) else f"emulate-{backend}"
    checks = [check for check in checks_of(0, emulated, "cpu") if check.operation in wanted]
    return [_reached(check, backend, emulated) for check in checks]


def _reached(check: Check, backend: str, emulated: str) -> Reached:
    operation = check.operation
    of_operation = NEEDS.get(operation, {operation})
    entries = {i.operation: i.bind for i in registry.implementations() if i.backend == backend}
    if operation in COMPOSED:
        if backend.startswith("emulate"):
            return Reached(operation, check.case, refused="takes no backend")
        if backend == "cpu" or not of_operation:
            return Reached(operation, check.case)
    missing = sorted(of_operation - entries.keys())
    if missing:
        return Reached(operation, check.case, refused=f"no implementation of {', '.join(missing)}")
    if backend == "cpu":
        functions = tuple(entries[name] for name in sorted(of_operation))
        return Reached(operation, check.case, functions=functions)
    with _recording(DEVICES[emulated]) as recorder:
        try:
            check.call()
        except UnsupportedError as error:
            return Reached(operation, check.case, refused=str(error).replace(emulated, backend))
    kernels, of_triton = tuple(recorder.launched.values()), tuple(recorder.of_triton)
    return Reached(operation, check.case, kernels, of_triton)


@contextmanager
def _recording(device: Device) -> Iterator[Recorder]:
    recorder = Recorder(device)
    with running_on(recorder):
        yield recorder
