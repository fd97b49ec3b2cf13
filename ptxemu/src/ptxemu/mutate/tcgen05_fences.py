"""The tcgen05 fences of a run that ordered something that the fences around them do not."""

from __future__ import annotations

from ptxemu.check.state import WarpActor
from ptxemu.check.vector_clock import GENERIC, TCGEN05


class Tcgen05Fences:
    """Follows all warps; tells of fences (pc) that had an effect.

    An ::after_thread_sync has one if its warp has learnt something since the fence before, and uses
    TMEM before the next fence, which would order that too. A ::before_thread_sync has one if there
    are tcgen05 operations, the warp's own or known to it, that the one before did not hand on.
    """

    def __init__(self) -> None:
        self._unused: dict[int, int] = {}
        """The last ::after_thread_sync of each warp that has not used TMEM since then."""
        self._fresh: set[int] = set()
        """Warps that have started operations since their last ::before_thread_sync."""
        self._issuers: dict[int, set[int]] = {}
        """Warps (their columns) that have started operations, by cluster."""

    def issued(self, agent_id: int, warp: WarpActor) -> int | None:
        """A warp has started an operation; the fence that orders it, if it is the first use."""
        self._fresh.add(agent_id)
        self._issuers.setdefault(warp.home, set()).add(warp.slot)
        return self.used(agent_id)

    def used(self, agent_id: int) -> int | None:
        """A warp has used TMEM itself (tcgen05.dealloc)."""
        return self._unused.pop(agent_id, None)

    def after(self, agent_id: int, pc: int, has_learnt: bool) -> None:
        """tcgen05.fence::after_thread_sync: whether it has an effect, the next use tells."""
        self._unused.pop(agent_id, None)
        if has_learnt:
            self._unused[agent_id] = pc

    def has_effect_before(self, agent_id: int, warp: WarpActor, tcgen05: int) -> bool:
        """Whether a tcgen05.fence::before_thread_sync, which comes now, has an effect.

        Args:
            tcgen05: which operations of the cluster are tcgen05 instructions, as bits.
        """
        is_fresh = agent_id in self._fresh
        self._fresh.discard(agent_id)
        mine = warp.know.parts[warp.home]
        if is_fresh or mine.done & tcgen05 & ~mine.tcgen05:
            return True
        others = [slot for slot in self._issuers.get(warp.home, ()) if slot != warp.slot]
        return bool((mine.clocks[GENERIC, others] > mine.clocks[TCGEN05, others]).any())
