"""`emulate`: a context in which compiled CuTe DSL functions run on the emulator."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from ptxemu.cutedsl.arguments import Arguments
from ptxemu.cutedsl.c_functions import HostCall
from ptxemu.cutedsl.host_function import Launcher
from ptxemu.cutedsl.interception import Interception
from ptxemu.driver.rules import LaunchRequest
from ptxemu.errors import HazardError, PtxEmuError
from ptxemu.launch_log import Log, Progress
from ptxemu.launch_setup import LaunchSetup, OnLaunch
from ptxemu.machine.device import device_for
from ptxemu.patching import Patches
from ptxemu.sched.policy import Policy

ON_FINDING = ("raise", "collect")
_SHOWN_FINDINGS = 5
_ARCH_VARIABLE = "CUTE_DSL_ARCH"


class Emulation(Log):
    """Results of one `emulate` block.

    Attributes:
        launches: the result of every launch, in order.
        findings: the check's findings, over all launches.
        failures: launches that could not run to their end, in words; their errors were raised.
        notes: notes for readers of the results, for example that bounds were unknown.
    """

    _active: Emulation | None = None

    def __init__(
        self,
        *,
        arch: str | None = "sm_100a",
        check: bool = True,
        on_finding: str = "raise",
        seed: int = 0,
        policy: Policy | None = None,
        allow_unregistered: bool | None = None,
        on_progress: Progress | None = None,
        on_launch: OnLaunch | None = None,
        unchecked: re.Pattern[str] | None = None,
    ) -> None:
        """Run the launches of compiled CuTe DSL functions on the emulator, on CPU tensors.

        Args:
            arch: the device ("sm_90a", "sm_100a", "sm_103a"), also for what is compiled inside the
                block; None: what each function was compiled for.
            check: look for hazards.
            on_finding: "raise": HazardError on leaving the block; "collect": only in `findings`.
            seed: of the schedule, where no `policy` is given.
            policy: the schedule.
            allow_unregistered: let kernels touch host memory that belongs to no tensor that is
                known (bounds are not checked there); None: only where a kernel gets such an
                address, with a note in `notes`.
            on_progress: called with the kernel's name and how far its launch is.
            on_launch: called before each launch; the observer that it returns listens to it.
            unchecked: kernels with it in their names run without the check.

        Raises:
            ValueError: an argument that is not known.
        """
        if on_finding not in ON_FINDING:
            known = ", ".join(ON_FINDING)
            raise ValueError(f"on_finding: expected one of {known}; got {on_finding!r}")
        if arch is not None:
            device_for(arch)
        policy = policy if policy is not None else Policy(seed=seed)
        super().__init__(check, policy, on_progress, on_launch, unchecked)
        self.arch = arch
        self._on_finding = on_finding
        self._allow_unregistered = allow_unregistered
        self._interception = Interception(self)
        self._patches = Patches()
        self._captured: list[Callable[[], None]] | None = None

    def __enter__(self) -> Emulation:
        """Start intercepting."""
        if Emulation._active is not None:
            raise PtxEmuError("emulate: emulations do not nest")
        self._interception.install()
        self._select_arch()
        Emulation._active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop intercepting; raise HazardError for what was found, unless an error is under way."""
        Emulation._active = None
        self._interception.remove()
        self._patches.undo()
        if kind is None and self._on_finding == "raise":
            self.raise_findings()

    def raise_findings(self) -> None:
        """Raise HazardError if an error was found."""
        errors = [finding for finding in self.findings if finding.level == "error"]
        if errors:
            shown = "\n".join(finding.message for finding in errors[:_SHOWN_FINDINGS])
            left = len(errors) - _SHOWN_FINDINGS
            more = f"\n... and {left} more" if left > 0 else ""
            raise HazardError(f"{len(errors)} finding(s):\n{shown}{more}", errors)

    def launcher(self, arguments: Arguments) -> Launcher:
        """Return what acts as cudaLaunchKernelEx during one host call with these arguments."""

        def launch(call: HostCall, request: LaunchRequest) -> None:
            if self._captured is not None:
                self._captured.append(lambda: carry_out(call, request))  # a CUDA graph's node
            else:
                carry_out(call, request)

        def carry_out(call: HostCall, request: LaunchRequest) -> None:
            kernel = request.kernel
            module = kernel.image.module(self.arch)
            memory = arguments.memory(
                module.syntax.kernels[kernel.name],
                request.arguments,
                self.note,
                allow_unregistered=self._allow_unregistered,
            )
            for address, block in call.allocations.items():
                memory.register(block, f"cudaMalloc {address:#x}")
            setup = LaunchSetup.of(request, module, memory)
            self.run(setup, is_programmatic=request.is_programmatic)

        return launch

    @classmethod
    def active(cls) -> Emulation:
        """The emulation that is under way.

        Raises:
            PtxEmuError: there is none.
        """
        if cls._active is None:
            raise PtxEmuError("this needs an active ptxemu.cutedsl.emulate(...)")
        return cls._active

    @property
    def is_capturing(self) -> bool:
        """Whether launches are being recorded for a CUDA graph."""
        return self._captured is not None

    def begin_capture(self) -> None:
        """Record launches from now on instead of running them."""
        self._captured = []

    def end_capture(self) -> list[Callable[[], None]]:
        """Run launches again; returns what was recorded: call each to run it."""
        captured, self._captured = self._captured, None
        return captured or []

    def _select_arch(self) -> None:
        """Compilations inside the block are for the emulated device."""
        if self.arch is None:
            return
        self._patches.set_variable(_ARCH_VARIABLE, self.arch)
        for dsl in sys.modules["cutlass.base_dsl.dsl"].DSLSingletonMeta._instances.values():
            self._patches.replace(dsl.envar, "_arch", self.arch)


emulate = Emulation
