"""Instructions with little or no effect on values (PTX ISA, "Miscellaneous Instructions",
"Parallel Synchronization and Communication Instructions: griddepcontrol")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.engines.register_pool import GRANULE, register_pool
from ptxemu.errors import ExecutionError, IllegalInstructionError
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask
from ptxemu.syntax.ast import Instruction, IntImmediate

if TYPE_CHECKING:
    from ptxemu.machine.state import Warp

_FEWEST, _MOST = 24, 256


def _nothing(warp: Warp, mask: Mask) -> None:
    """No effect."""


def _nap(warp: Warp, mask: Mask) -> None:
    """No effect, but that the scheduler knows of it."""
    warp.cta.machine.naps += 1


@visible("nanosleep")
def sleep(instruction: Instruction) -> Step:
    """Let others run; time does not exist here."""
    modifiers = Modifiers(instruction, "nanosleep")
    modifiers.one_of("u32")
    modifiers.done()
    return _nap


@visible("pmevent", "brkpt")
def event(instruction: Instruction) -> Step:
    """A performance event or a breakpoint, which nobody waits for here."""
    modifiers = Modifiers(instruction, instruction.modifiers[0])
    modifiers.flag("mask")
    modifiers.done()
    return _nothing


@visible("trap")
def trap(instruction: Instruction) -> Step:
    """Abort the launch."""

    def step(warp: Warp, mask: Mask) -> None:
        raise ExecutionError(
            f"{instruction.span}: trap in {warp.label}, {int(mask.sum())} lanes from lane "
            f"{int(mask.argmax())} on"
        )

    return step


@visible("griddepcontrol")
def grid_dependency(instruction: Instruction) -> Step:
    """Programmatic dependent launch: a launch here runs alone, so nothing is waited for."""
    modifiers = Modifiers(instruction, "griddepcontrol")
    modifiers.one_of("wait", "launch_dependents")
    modifiers.done()
    return _nothing


@visible("setmaxnreg")
def set_registers(instruction: Instruction) -> Step:
    """Release registers to the CTA's pool, or wait until the pool has the ones requested."""
    modifiers = Modifiers(instruction, "setmaxnreg")
    action = modifiers.one_of("inc", "dec")
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.one_of("u32")
    modifiers.done()
    (operand,) = instruction.operands
    count = operand.value if isinstance(operand, IntImmediate) else -1
    if not _FEWEST <= count <= _MOST or count % GRANULE:
        raise IllegalInstructionError(
            f"{instruction.opcode}: expected a multiple of {GRANULE} in {_FEWEST}..{_MOST}; got "
            f"{instruction.text.rpartition(' ')[2]}",
            instruction.span,
        )

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        pool = register_pool(warp.cta)
        other = pool.differs(warp, count)
        if other is not None:
            # Undefined by the ISA; hardware moves each warp's registers, and NVIDIA's own
            # attention kernels give the idle warp of a warpgroup fewer than its others.
            warp.cta.machine.complain(
                "warning",
                "setmaxnreg-differs",
                f"setmaxnreg {count} in warp {warp.index}, but warp {other} of the same warpgroup "
                "asked for another count; the ISA leaves that undefined",
                warp,
                instruction,
            )
        if action == "dec":
            pool.release(warp, count)
            return None
        return Blocked(
            lambda: pool.request(warp, count),
            lambda: (
                f"setmaxnreg.inc to {count}: {pool.free} registers are free in the pool, the "
                f"warp holds {pool.held[warp.index]}"
            ),
            until=(pool.freed,),
        )

    return step


# Instructions that ptxemu knows and does not have, refused with the reason.


@visible(*("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"))
def texture(instruction: Instruction) -> Step:
    """Textures and surfaces ("Texture Instructions", "Surface Instructions")."""
    unsupported(instruction, "textures and surfaces are not emulated")


@visible(*("alloca", "stacksave", "stackrestore"))
def stack(instruction: Instruction) -> Step:
    """A thread's stack ("Stack Manipulation Instructions")."""
    unsupported(instruction, "a stack of run-time size is not emulated; .local variables are")
