"""The runner that simulates a GPU: the same compiled kernels, on CPU tensors, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.emulated import triton_kernels
from flashdsa.backends.emulated.devices import A100, B200, H200, Device
from flashdsa.backends.emulated.packages import require_packages
from flashdsa.backends.reasons import Explain
from flashdsa.backends.runner import Allocate, Runner
from flashdsa.jit.loader import compile_plan
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec

if TYPE_CHECKING:
    from ptxemu import Policy
    from ptxemu.check import Finding
    from ptxemu.events import LaunchProgress
    from ptxemu.launch_setup import LaunchSetup

POISON = 0x7F
"""Value of every byte of memory that is not initialised: large numbers, and NaN in e4m3."""


class EmulatedProgress(NamedTuple):
    """Progress of an emulator's launches: the number of the last one, from 1, and its clusters.

    `warp_instructions` are those of all launches so far.
    """

    launch: int
    finished: int
    clusters: int
    warp_instructions: int


class Emulator:
    """A `flashdsa.backends.runner.Runner`: one device, and the records of its launches.

    Attributes:
        findings: of the check. setups: of all launches, in their order. workspaces: by key.
    """

    def __init__(
        self,
        device: Device = H200,
        *,
        arch: str | None = None,
        policy: Policy | None = None,
        on_finding: str = "raise",
        on_progress: Callable[[EmulatedProgress], None] | None = None,
        on_launch: Callable[[LaunchSetup], None] | None = None,
    ) -> None:
        """Launch nothing yet.

        Args:
            arch: ptxemu's device; None: the first that runs what each function was compiled for.
            policy: the order of warps and asynchronous work.
            on_finding: "raise": ptxemu.HazardError after a launch in which the check found an
                error; "collect": only in `findings`.
            on_progress: called now and then during a launch.
            on_launch: called before each launch, whose memory is as the kernel will find it.

        Raises:
            UnsupportedError: a package is missing.
        """
        require_packages()
        from ptxemu import Policy
        from ptxemu.events import LaunchProgress

        self._device, self._arch, self._policy = device, arch, policy or Policy()
        self._on_finding, self._on_progress = on_finding, on_progress
        self._on_launch = on_launch
        self.findings: list[Finding] = []
        self.setups: list[LaunchSetup] = []
        self.workspaces: dict[int, tuple[Tensor, ...]] = {}
        self._instructions_before = 0
        """Instructions of the launches before the one that runs."""
        self._no_progress = self._progress = LaunchProgress(0, 0, 0)
        """The last report of the launch that runs."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of the device."""
        return self._device.num_sms

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Return the device's."""
        return self._device.cluster_capacity(threads, smem_bytes)

    def explain(self, choice: Explain) -> None:
        """Nobody asks."""

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """The function of any plan, compiled in this process."""
        return compiled(spec, plan)

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability of the device."""
        return self._device.capability

    def launch_triton(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], **options: Any
    ) -> None:
        """Compiled for the device's capability; findings are those of `launching()`."""
        from ptxemu.cutedsl import Emulation

        setup = triton_kernels.prepared(self._device, kernel, grid, arguments, **options)
        self._launched(setup)
        tell = partial(self._tell_progress, setup.kernel)
        result = setup.launch(policy=self._policy, check=True, on_progress=tell)
        Emulation.active().findings += filter(triton_kernels.counts, result.findings)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launches go to the emulator."""
        from ptxemu.cutedsl import emulate

        with emulate(
            arch=self._arch,
            policy=self._policy,
            on_finding=self._on_finding,
            on_launch=self._launched,
            on_progress=self._tell_progress,
        ) as emulation:
            yield
        self.findings += emulation.findings

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """Return `serve`, which launches functions, as a function that runs it on the emulator."""

        def run(operands: Any) -> Any:
            with self.launching():
                return serve(operands)

        return run

    def _launched(self, setup: LaunchSetup) -> None:
        if self._on_launch is not None:
            self._on_launch(setup)
        self.setups.append(setup)
        self._instructions_before += self._progress.warp_instructions
        self._progress = self._no_progress

    def _tell_progress(self, _: str, progress: LaunchProgress) -> None:
        self._progress = progress
        if self._on_progress is not None:
            done, clusters, instructions = progress
            instructions += self._instructions_before
            self._on_progress(EmulatedProgress(len(self.setups), done, clusters, instructions))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of poison: bytes that a kernel leaves unwritten show."""
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(torch.uint8).fill_(POISON)
        return tensor

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`empty` of these arguments as a function; poison too."""
        return partial(self.empty, *shape, dtype=dtype)

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Tensor, ...]:
        """The workspace of that key; the emulator has one stream."""
        if key not in self.workspaces:
            zeros = (torch.zeros(counters, dtype=torch.int32),) if counters else ()
            self.workspaces[key] = (*zeros, *allocate(self))
        return self.workspaces[key]


_current: ContextVar[Runner | None] = ContextVar("flashdsa_emulator", default=None)


def sm90(_: torch.device) -> Runner:
    """The runner of a call of "emulate-sm90": that of the block it is in, or an H200."""
    return _current.get() or Emulator(H200)


def sm100(_: torch.device) -> Runner:
    """The runner of a call of "emulate-sm100": that of the block it is in, or a B200."""
    return _current.get() or Emulator(B200)


def triton(_: torch.device) -> Runner:
    """The runner of a call of "emulate-triton": that of the block it is in, or an A100."""
    return _current.get() or Emulator(A100)


@contextmanager
def running_on(runner: Runner) -> Iterator[None]:
    """Backends named "emulate-..." run on it inside the block."""
    token = _current.set(runner)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def emulation(device: Device = H200, **options: Any) -> Iterator[Emulator]:
    """Backends named "emulate-..." run on this emulator inside the block.

    Args:
        options: those of `Emulator`.
    """
    current = Emulator(device, **options)
    with running_on(current):
        yield current


@lru_cache(maxsize=256)
def compiled(spec: KernelSpec, plan: Any) -> Callable[..., Any]:
    """The plan's function, made so that the emulator has its PTX; needs no GPU.

    Raises:
        UnsupportedError: a package is missing.
    """
    require_packages()
    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on

    return compile_plan(spec, plan)
