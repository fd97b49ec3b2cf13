"""Hopper's backend on a machine without a GPU: CPU tensors, and functions that launch nothing.

A function takes its arguments as a compiled one does, through TVM FFI's exchange of tensors, and
memory is allocated past torch's dispatcher as on a GPU. So a call costs what is ours of the host's
part, and torch's own operations without their launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import tvm_ffi
from torch._C._dynamo.guards import _empty_strided_cpu

from flashdsa.backends import registry as registry_module
from flashdsa.backends.catalog import registry
from flashdsa.backends.gpu import runner as gpu_module
from flashdsa.backends.gpu.runner import Gpu
from flashdsa.backends.runner import Allocate
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec

NUM_SMS = 4
_RUNNER = "pretended:runner"


class PretendedGpu(Gpu):
    """The runner of GPUs, but for what it asks of CUDA.

    Attributes:
        launches: of each kernel, by its name, in a process that counts them.
    """

    num_sms = NUM_SMS

    def __init__(self) -> None:
        """Take the tensors of the CPU for the GPU's."""
        super().__init__(0)
        self.device = torch.device("cpu")
        self.launches: Counter[str] = Counter()
        self.counts = False
        self._kept: dict[int, tuple[Any, ...]] = {}

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        return {1: NUM_SMS, 2: NUM_SMS // 2}

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """A function of TVM FFI that takes any arguments and does nothing."""
        nothing: Callable[..., Any] = tvm_ffi.get_global_func("testing.nop")
        if not self.counts:
            return nothing

        def count(*arguments: Any) -> None:
            self.launches[spec.name] += 1
            nothing(*arguments)

        return count

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Any, ...]:
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._make(allocate, counters, None)
        return kept


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """In this context Hopper's backend serves tensors of the CPU, and runs nothing."""
    gpu = PretendedGpu()
    load = registry_module._load
    emulated = [i for i in registry.implementations() if i.backend == "emulate-sm90"]
    served = {i.operation for i in emulated}
    here = [
        replace(i, backend="sm90", automatic=True, runner=_RUNNER, binds_each_call=False)
        for i in emulated
    ]
    others = [
        i for i in registry.implementations() if i.backend == "cpu" and i.operation not in served
    ]

    def find(entry: str) -> Callable[..., Any]:
        return (lambda _: gpu) if entry == _RUNNER else load(entry)

    with (
        patch.object(registry, "_implementations", here + others),
        patch.object(registry, "_selected", {}),
        patch.object(registry_module, "_load", find),
        patch.object(gpu_module, "_current_device", lambda: 0),
        patch.object(gpu_module, "_empty_strided", _empty_strided_cpu),
        patch.object(gpu_module.THREAD, "has_context", True),
    ):
        yield gpu
