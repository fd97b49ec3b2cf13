"""One launch before it happens, for tools that observe launches or repeat them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxemu.api import Dim3, LaunchResult, Module
from ptxemu.driver.rules import LaunchRequest
from ptxemu.events import Observer, OnProgress
from ptxemu.global_writes import Earlier
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.policy import Policy


@dataclass(frozen=True, slots=True)
class LaunchSetup:
    """The arguments of `Module.launch` that make up the launch; see there."""

    module: Module
    kernel: str
    grid: Dim3
    block: Dim3
    args: tuple[Any, ...]
    memory: GlobalMemory
    """Holds every array that the kernel may touch."""
    cluster: Dim3 | None = None
    smem: int = 0
    earlier: Earlier | None = None

    @classmethod
    def of(cls, request: LaunchRequest, module: Module, memory: GlobalMemory) -> LaunchSetup:
        """The launch that a host program asked for."""
        name, shape, size = request.kernel.name, request.cluster, request.dynamic_shared_bytes
        values = request.arguments
        return cls(module, name, request.grid, request.block, values, memory, shape, size)

    def launch(
        self,
        *,
        module: Module | None = None,
        memory: GlobalMemory | None = None,
        policy: Policy | None = None,
        observer: Observer | None = None,
        check: bool = False,
        on_progress: OnProgress | None = None,
    ) -> LaunchResult:
        """Run it, on another module or memory if these are given."""
        return (module or self.module).launch(
            self.kernel,
            self.grid,
            self.block,
            args=self.args,
            cluster=self.cluster,
            smem=self.smem,
            policy=policy,
            observer=observer,
            check=check,
            memory=memory if memory is not None else self.memory,
            on_progress=on_progress,
            earlier=self.earlier,
        )


OnLaunch = Callable[[LaunchSetup], Observer | None]
"""Told of a launch before it happens; what it returns listens to the run."""
