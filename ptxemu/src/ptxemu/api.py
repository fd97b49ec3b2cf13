"""User interface: load PTX, launch kernels on arrays, read the findings."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.check import Finding
from ptxemu.errors import (
    ExecutionError,
    IllegalInstructionError,
    Interruption,
    LaunchError,
    StoppedError,
)
from ptxemu.events import FanOut, Observer, OnProgress
from ptxemu.global_writes import Earlier, Writes
from ptxemu.isa import registry
from ptxemu.isa.kernel_rules import check_kernel, check_module, undefined
from ptxemu.machine.device import Device, device_for
from ptxemu.machine.layout import Layout
from ptxemu.machine.program import Program
from ptxemu.machine.state import Launch, Machine
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.collector import rare_collections
from ptxemu.sched.policy import Guided, Policy
from ptxemu.sched.scheduler import Scheduler
from ptxemu.syntax.ast import Function, Parameter
from ptxemu.syntax.ast import Module as Syntax
from ptxemu.syntax.inlining import Inliner
from ptxemu.syntax.parser import parse_module
from ptxemu.text_files import read_text
from ptxemu.unwritten import Before

Dim3 = int | tuple[int, ...]
_SCALAR_FORMATS = {"f32": "f", "f64": "d", "s8": "b", "s16": "h", "s32": "i", "s64": "q"}
_LETS_NEXT_BEGIN = ("griddepcontrol", "launch_dependents")
KEPT_MODULES = 16
"""Texts whose modules are kept, with what was decoded of them, for whoever loads them again."""
_UNSIGNED_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(slots=True)
class LaunchResult:
    """Results of one launch."""

    kernel: str
    launch: Launch
    warp_instructions: int
    async_operations: int
    findings: list[Finding] = field(default_factory=list)
    """Errors, warnings and notes of `check`, in the order in which they arose."""
    printed: list[str] = field(default_factory=list)
    """Output of printf, one string per call of a thread."""
    seconds: float = 0.0
    """Time that it took here."""
    earlier: Earlier | None = None
    """Its writes, if it was checked and lets the next launch begin (griddepcontrol)."""


def dim3(name: str, value: Dim3) -> tuple[int, int, int]:
    """`value` as three positive numbers; missing ones are 1.

    Raises:
        LaunchError: naming `name`.
    """
    parts = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(not isinstance(p, int) or p < 1 for p in parts):
        raise LaunchError(f"{name}: expected one to three positive integers; got {value!r}")
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


class Module:
    """A loaded PTX module."""

    def __init__(
        self,
        syntax: Syntax,
        *,
        device: Device,
        allow_illegal: bool = False,
        text: str | None = None,
        programs: dict[object, Program] | None = None,
    ) -> None:
        self.syntax = syntax
        self.device = device
        self.allow_illegal = allow_illegal
        """Kernels that ptxas would refuse as a whole are loaded all the same."""
        self.text = text
        """The PTX that it was loaded from; None where the syntax was made or changed."""
        self.placed: dict[str, int] = {}
        """Addresses of module-level variables that outlive launches; their memory is the caller's,
        who registers it for each launch. The others start with their initial values each time."""
        self._programs = {} if programs is None else programs
        """Decoded kernels, which modules of one text share."""

    @property
    def kernels(self) -> list[str]:
        """Names of the entry points."""
        return list(self.syntax.kernels)

    def program(self, kernel: str) -> Program:
        """The decoded kernel; its instructions that ptxemu lacks are an error here.

        Raises:
            UnsupportedInstructionError: it needs what ptxemu does not have.
            IllegalInstructionError: ptxas would refuse it.
        """
        threaded = machine_code.threaded_maker()
        key = kernel, self.allow_illegal, threaded
        if key not in self._programs:
            function = self._function(kernel)
            problems = check_kernel(function, self.syntax.target)
            if problems and not self.allow_illegal:
                raise IllegalInstructionError(f"kernel {kernel}:\n  " + "\n  ".join(problems))
            self._programs[key] = Program(function, registry.decode, threaded)
        return self._programs[key]

    def _function(self, kernel: str) -> Function:
        function = self.syntax.kernels.get(kernel)
        if function is None:
            raise LaunchError(f"kernel: expected one of {', '.join(self.kernels)}; got {kernel!r}")
        return function

    @rare_collections()
    def launch(  # noqa: PLR0913 - five of them are the launch's shape
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        *,
        args: Sequence[Any] = (),
        cluster: Dim3 | None = None,
        smem: int = 0,
        policy: Policy | None = None,
        observer: Observer | None = None,
        check: bool = False,
        memory: GlobalMemory | None = None,
        symbols: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        earlier: Earlier | None = None,
    ) -> LaunchResult:
        """Run a kernel to its end.

        Args:
            kernel: name of the entry point.
            grid: CTAs along x, y, z; block: threads; cluster: CTAs of a cluster (default 1, or
                what the kernel's .reqnctapercluster says).
            args: one a parameter: a NumPy array or torch CPU tensor (its memory is used in
                place), a number, or `bytes` (a struct or a tensor map of 128 bytes).
            smem: bytes of dynamic shared memory.
            policy: the schedule; random with seed 0 by default.
            observer: hears everything that happens.
            check: look for missing synchronisation; the result has the findings.
            memory: global memory beyond the arguments, already registered.
            symbols: arrays that are module-level variables (__constant__, __device__) by name,
                used in place; the others start with their initial values at every launch.
            on_progress: called now and then, and whenever a cluster has finished.
            earlier: the launch before (`LaunchResult.earlier`), where this one may begin before
                its end (programmatic dependent launch).

        Raises:
            LaunchError: a launch that the driver would refuse.
            ExecutionError: an illegal address, a trap, a deadlock; `findings` of it are what the
                check had found until then (also of what else ends a launch before its end).
        """
        function = self._function(kernel)
        if missing := undefined(self.syntax, function, {*self.placed, *(symbols or {})}):
            raise LaunchError(f"kernel {kernel}: {'; '.join(missing)}")
        memory = memory if memory is not None else GlobalMemory()
        parameters = _pack_parameters(function.parameters, args, memory)
        required = function.directives.get("reqnctapercluster")
        shape = dim3("cluster", cluster if cluster is not None else (required or 1))
        launch = Launch(
            kernel,
            dim3("grid", grid),
            dim3("block", block),
            shape,
            smem,
            parameters,
            explicit_cluster=cluster is not None or required is not None,
        )
        layout = Layout(self.syntax, function, smem, self.placed)
        _check_launch(launch, layout, function, self.device)
        _register_symbols(symbols or {}, layout, memory)
        policy = policy or Policy()
        lanes = policy.warp_lanes
        checker, writes = None, None
        program = self.program(kernel)
        if check:
            from ptxemu.check.checker import Checker

            checker = Checker(kernel, memory.blank, warp_lanes=lanes, earlier=earlier)
            observer = checker if observer is None else FanOut(observer, checker)
            if any(i.modifiers == _LETS_NEXT_BEGIN for i in program.function.instructions):
                writes = Writes()
                observer = FanOut(observer, writes)
        machine = Machine(program, layout, launch, self.device, memory, observer, policy.fill)
        may_read_blank = bool(layout.shared_bytes or memory.blank)
        is_repeatable = check and may_read_blank and not isinstance(policy, Guided)
        before = Before.of(memory) if is_repeatable else None

        def run_again(heard: Observer) -> None:
            other = policy.fill ^ 0xFF
            again = Machine(program, layout, launch, self.device, memory, heard, other)
            with np.errstate(all="ignore"):
                _scheduler(again, policy, on_progress).run()

        scheduler, started = _scheduler(machine, policy, on_progress), time.monotonic()
        try:
            with np.errstate(all="ignore"):
                scheduler.run()
        except (ExecutionError, StoppedError, Interruption) as error:
            error.warp_instructions = scheduler.warp_instructions
            if checker is not None:
                checker.stop()
                error.findings = checker.findings
            raise
        result = LaunchResult(kernel, launch, machine.warp_instructions, machine.async_operations)
        result.printed, result.seconds = machine.printed, time.monotonic() - started
        if writes is not None:
            result.earlier = Earlier(kernel, writes)
        if checker is not None:
            checker.finish()
            if before is not None:
                checker.judge_unwritten(lambda: before.reached(run_again))
            result.findings = checker.findings
        return result


def _scheduler(machine: Machine, policy: Policy, on_progress: OnProgress | None) -> Scheduler:
    if isinstance(policy, Guided):
        from ptxemu.sched.guided import GuidedScheduler

        return GuidedScheduler(machine, policy, on_progress=on_progress)
    return Scheduler(machine, policy, on_progress=on_progress)


@rare_collections()
def load(
    ptx: str | Path,
    *,
    arch: str | None = None,
    allow_illegal: bool = False,
    name: str | None = None,
) -> Module:
    """Load PTX text, or a file that holds it; a text that was loaded before is not read again.

    Args:
        ptx: PTX text, or a `Path` of a file.
        arch: the device to emulate; the text's `.target` by default.
        allow_illegal: load kernels that ptxas would refuse as a whole (`isa.kernel_rules`).
        name: the text's origin in messages; the file's name by default.

    Raises:
        UnreadableFileError: the file is missing, a folder, or no text (a cubin, say).
        IllegalInstructionError: ptxas would refuse `.version`, `.target` or `.address_size`.
        ModuleError: its calls, inlined, are too many instructions.
    """
    text = read_text(ptx, "PTX") if isinstance(ptx, Path) else ptx
    name = name or (str(ptx) if isinstance(ptx, Path) else "<ptx>")
    syntax, programs = _read(text, name)
    problems = check_module(syntax)
    if problems and not allow_illegal:
        raise IllegalInstructionError(f"{name}: {'; '.join(problems)}")
    device = device_for(arch or syntax.target)
    return Module(syntax, device=device, allow_illegal=allow_illegal, text=text, programs=programs)


@lru_cache(KEPT_MODULES)
def _read(text: str, name: str) -> tuple[Syntax, dict[object, Program]]:
    """The module in a text, which nobody changes, and where its decoded kernels are kept."""
    syntax = parse_module(text, name=name)
    inliner = Inliner(syntax)
    for kernel in syntax.kernels.values():
        syntax.functions[kernel.name] = inliner.inlined(kernel)
    return syntax, {}


def parameter_values(
    parameters: Sequence[Parameter], args: Sequence[Any], memory: GlobalMemory
) -> list[bytes]:
    """Each parameter's bytes; arrays among the arguments are registered.

    Raises:
        LaunchError: arguments that do not fit the parameters.
    """
    if len(args) != len(parameters):
        raise LaunchError(f"args: expected {len(parameters)} arguments; got {len(args)}")
    return [_pack(p, arg, memory) for p, arg in zip(parameters, args, strict=True)]


def _pack_parameters(
    parameters: Sequence[Parameter], args: Sequence[Any], memory: GlobalMemory
) -> bytes:
    last = parameters[-1] if parameters else None
    block = bytearray(last.offset + last.size if last else 0)
    values = parameter_values(parameters, args, memory)
    for parameter, packed in zip(parameters, values, strict=True):
        block[parameter.offset : parameter.offset + len(packed)] = packed
    return bytes(block)


def _pack(parameter: Parameter, arg: Any, memory: GlobalMemory) -> bytes:
    if isinstance(arg, bytes | bytearray):
        if len(arg) > parameter.size:
            raise LaunchError(f"args: {parameter.name} has {parameter.size} bytes; got {len(arg)}")
        return bytes(arg)
    if isinstance(arg, bool | int | float | np.generic):
        code = _SCALAR_FORMATS.get(parameter.type)
        if code is None:
            code = _UNSIGNED_FORMATS[parameter.size]
            arg = int(arg) & ((1 << (8 * parameter.size)) - 1)
        return struct.pack(f"<{code}", arg)
    data = array_bytes(arg)
    memory.register(data, parameter.name)
    return struct.pack("<Q", int(data.ctypes.data))


def _register_symbols(symbols: Mapping[str, Any], layout: Layout, memory: GlobalMemory) -> None:
    """Let the caller's arrays be module-level variables."""
    known = {variable.name: (variable, address) for variable, address in layout.constants}
    for name, array in symbols.items():
        if name not in known:
            raise LaunchError(f"symbols: expected one of {', '.join(known)}; got {name!r}")
        variable, address = known[name]
        data = array_bytes(array)
        if len(data) != variable.size:
            raise LaunchError(f"symbols: {name} has {variable.size} bytes; got {len(data)}")
        memory.register(data, name, base=address)


def array_bytes(array: Any) -> NDArray[np.uint8]:
    """The bytes of a contiguous NumPy array or torch CPU tensor, without a copy.

    Raises:
        LaunchError: not an array, not contiguous, or not in host memory.
    """
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu" or not array.is_contiguous():
            raise LaunchError("args: expected a contiguous CPU tensor")
        size = array.numel() * array.element_size()
        return _host_bytes(array.data_ptr(), size, array)
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise LaunchError("args: expected a contiguous array")
        return array.reshape(-1).view(np.uint8)
    raise LaunchError(f"args: expected an array, a number or bytes; got {type(array).__name__}")


def _host_bytes(address: int, size: int, owner: object) -> NDArray[np.uint8]:
    import ctypes

    buffer = (ctypes.c_uint8 * size).from_address(address)
    buffer._owner = owner  # type: ignore[attr-defined]  # keeps the tensor alive with the view
    return np.ctypeslib.as_array(buffer)


def _check_launch(launch: Launch, layout: Layout, function: Function, device: Device) -> None:
    """Refuse what the driver refuses, with the driver's error."""
    for what, extent, most in (
        ("grid", launch.grid, device.max_grid),
        ("block", launch.block, device.max_block),
    ):
        for axis in range(3):
            if extent[axis] > most[axis]:
                raise LaunchError(
                    f"{what}: at most {most[axis]} along {'xyz'[axis]}; got {extent[axis]} "
                    "(CUDA_ERROR_INVALID_VALUE)"
                )
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > device.max_threads_per_cta:
        raise LaunchError(
            f"block: at most {device.max_threads_per_cta} threads a CTA; got {threads} "
            "(CUDA_ERROR_INVALID_VALUE)"
        )
    if layout.shared_bytes > device.shared_bytes_per_cta:
        raise LaunchError(
            f"smem: at most {device.shared_bytes_per_cta} bytes of shared memory a CTA; got "
            f"{layout.shared_bytes} ({layout.static_shared_bytes} static) "
            "(CUDA_ERROR_INVALID_VALUE)"
        )
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if ctas > device.max_nonportable_cluster:
        raise LaunchError(
            f"cluster: at most {device.max_nonportable_cluster} CTAs; got {ctas} "
            "(CUDA_ERROR_INVALID_CLUSTER_SIZE)"
        )
    for axis, (size, per_cluster) in enumerate(zip(launch.grid, launch.cluster, strict=True)):
        if size % per_cluster:
            raise LaunchError(
                f"grid: {'xyz'[axis]} = {size} is not a multiple of the cluster's {per_cluster} "
                "(CUDA_ERROR_INVALID_CLUSTER_SIZE)"
            )
    required = function.directives.get("reqntid")
    if required is not None and tuple(required) + (1,) * (3 - len(required)) != launch.block:
        raise LaunchError(f"block: the kernel requires {required}; got {launch.block}")
