"""Instructions with little or no effect on values (PTX ISA, "Miscellaneous Instructions",
"Parallel Synchronization and Communication Instructions: griddepcontrol")."""

from __future__ import annotations

from ptxemu.errors import ExecutionError, illegal
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Blocked, Sleepers
from ptxemu.machine.lanes import Mask
from ptxemu.machine.state import Cta, Warp
from ptxemu.syntax.ast import Instruction, IntImmediate

# The registers of a CTA that setmaxnreg moves between its warps (PTX ISA, "setmaxnreg").
#
# The launch gives every warp the same number; what a warp releases, another may request.

WARP_THREADS = 32
WARPS_OF_A_WARPGROUP = 4
SM_QUARTERS = 4
GRANULE = 8
MAX_REGISTERS = 255


def launch_registers(cta: Cta) -> int:
    """Registers a thread that the launch allocates, in granules of 8.

    `.maxnreg` says it; else it is what fits: the SM's registers over the threads of the CTAs that
    `.minnctapersm` asks for. ptxas may choose fewer, but then refuses setmaxnreg.
    """
    machine = cta.machine
    directives = machine.program.function.directives
    if "maxnreg" in directives:
        return -(-directives["maxnreg"][0] // GRANULE) * GRANULE
    ctas = directives.get("minnctapersm", (1,))[0]
    threads = _warp_slots(cta) * WARP_THREADS * max(ctas, 1)
    fits = machine.device.registers_per_sm // threads // GRANULE * GRANULE
    return min(fits, -(-MAX_REGISTERS // GRANULE) * GRANULE)


def _warp_slots(cta: Cta) -> int:
    """Warps that registers are allocated for: as many in each quarter of the SM."""
    return -(-len(cta.warps) // SM_QUARTERS) * SM_QUARTERS


class RegisterPool:
    """Registers a thread of each warp of a CTA, and what is free."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        each = launch_registers(cta)
        self.held = [each] * len(cta.warps)
        """Registers a thread, by warp."""
        self.free = each * (_warp_slots(cta) - len(cta.warps))
        """Registers a thread that no warp holds, summed over warps."""
        self.freed = Sleepers()
        """Woken when warps have given registers back."""
        self.history: list[list[int]] = [[] for _ in cta.warps]
        """The counts that each warp has asked for, in order."""

    def release(self, warp: Warp, count: int) -> None:
        """setmaxnreg.dec: keep `count`; no effect where the warp holds fewer."""
        self.free += max(self.held[warp.index] - count, 0)
        self.held[warp.index] = min(self.held[warp.index], count)
        self.freed.wake()
        self._cta.machine.progress += 1

    def request(self, warp: Warp, count: int) -> bool:
        """setmaxnreg.inc: hold `count`, if the pool has enough."""
        wanted = count - self.held[warp.index]
        if wanted > self.free:
            return False
        self.free -= max(wanted, 0)
        self.held[warp.index] = max(count, self.held[warp.index])
        return True

    def differs(self, warp: Warp, count: int) -> int | None:
        """Note that `warp` asks for `count`.

        Returns:
            a warp of its warpgroup whose request in the same place of the order was another.
        """
        mine = self.history[warp.index]
        mine.append(count)
        first = warp.index // WARPS_OF_A_WARPGROUP * WARPS_OF_A_WARPGROUP
        for index in range(first, min(first + WARPS_OF_A_WARPGROUP, len(self.history))):
            other = self.history[index]
            if len(other) >= len(mine) and other[len(mine) - 1] != count:
                return index
        return None


register_pool = EngineState(RegisterPool)
"""The register pool of a CTA."""


_FEWEST, _MOST = 24, 256


def _nothing(warp: Warp, mask: Mask) -> None:
    """No effect."""


def _nap(warp: Warp, mask: Mask) -> None:
    """No effect, but that the scheduler knows of it."""
    warp.cta.machine.naps += 1


@visible("nanosleep")
def sleep(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Let others run; time does not exist here."""
    modifiers.one_of("u32")
    return _nap


@visible("pmevent", "brkpt")
def event(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A performance event or a breakpoint, which nobody waits for here."""
    modifiers.flag("mask")
    return _nothing


@visible("trap")
def trap(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Abort the launch."""

    def step(warp: Warp, mask: Mask) -> None:
        raise ExecutionError(
            f"{instruction.span}: trap in {warp.label}, {int(mask.sum())} lanes from lane "
            f"{int(mask.argmax())} on"
        )

    return step


@visible("griddepcontrol")
def grid_dependency(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Programmatic dependent launch: a launch here runs alone, so nothing is waited for."""
    modifiers.one_of("wait", "launch_dependents")
    return _nothing


@visible("setmaxnreg")
def set_registers(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Release registers to the CTA's pool, or wait until the pool has the ones requested."""
    action = modifiers.one_of("inc", "dec")
    modifiers.expect("sync", "aligned", "u32")
    (operand,) = instruction.operands
    count = operand.value if isinstance(operand, IntImmediate) else -1
    if not _FEWEST <= count <= _MOST or count % GRANULE:
        illegal(
            instruction,
            f"expected a multiple of {GRANULE} in {_FEWEST}..{_MOST}; got "
            f"{instruction.text.rpartition(' ')[2]}",
        )

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        pool = register_pool(warp.cta)
        other = pool.differs(warp, count)
        if other is not None:
            # Undefined by the ISA; hardware moves each warp's registers, and NVIDIA's own
            # attention kernels give the idle warp of a warpgroup fewer than its others.
            message = (
                f"setmaxnreg {count} in warp {warp.index}, but warp {other} of the same warpgroup "
                "asked for another count; the ISA leaves that undefined"
            )
            warp.cta.machine.complain("warning", "setmaxnreg-differs", message, warp, instruction)
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
def texture(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Textures and surfaces ("Texture Instructions", "Surface Instructions")."""
    unsupported(instruction, "textures and surfaces are not emulated")


@visible(*("alloca", "stacksave", "stackrestore"))
def stack(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A thread's stack ("Stack Manipulation Instructions")."""
    unsupported(instruction, "a stack of run-time size is not emulated; .local variables are")
