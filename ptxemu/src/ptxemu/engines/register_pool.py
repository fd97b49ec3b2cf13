"""The registers of a CTA that setmaxnreg moves between its warps (PTX ISA, "setmaxnreg").

The launch gives every warp the same number; what a warp releases, another may request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.sleepers import Sleepers

if TYPE_CHECKING:
    from ptxemu.machine.state import Cta, Warp

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
