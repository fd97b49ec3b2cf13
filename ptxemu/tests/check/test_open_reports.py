"""The handovers that two open reports on CUTLASS are about, in programs of our own.

In #3652 a warp loads an accumulator, half of its lanes use it, and the MMA warp is told that it may
free TMEM. In #3653 statistics are stored to TMEM and another warp of the same lanes is told to load
them. Each report asks for the wait before the arrival.
"""

import pytest
from tests.check.checked_run import POLICIES, check
from tests.kernel_run import TID, store

from ptxemu.sched.policy import Policy

START = """
mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY; mbarrier.init.shared.b64 [%r1+8], 32;
READY: setp.ge.u32 %p1, %r0, 32; @%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ALLOCATED: bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %r2, [%r1];
mov.u32 %r3, 7; setp.lt.u32 %p2, %r0, 128; @%p1 bra OTHER;
"""
TELL = "tcgen05.fence::before_thread_sync;\nmbarrier.arrive.shared.b64 _, [%r1+8];\n"
HEAR = """
SPIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+8], 0; @!%p3 bra SPIN;
tcgen05.fence::after_thread_sync;
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};\n"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];\n"
STORED, LOADED = "tcgen05.wait::st.sync.aligned;\n", "tcgen05.wait::ld.sync.aligned;\n"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;\n"
HALF = "setp.ge.u32 %p4, %r0, 144;\n@%p4 bra TOLD;\n" + store("out", "%r4") + "TOLD:\n"


def verdict(body: str, policy: Policy) -> list[tuple[str, str | None]]:
    """Code and kind of the errors of five warps; the first and the last have the same lanes."""
    how = {"arch": "sm_100a", "shared": 64}
    found = check(TID + START + body + "END:\n", block=160, policy=policy, how=how, out=160)
    return sorted({(f.code, f.kind) for f in found if f.level == "error"})


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_tmem_is_freed_behind_a_load_that_nobody_waited_for(policy: Policy) -> None:
    """A use by any lane holds the warp back on hardware, and not in the ISA; no use holds none."""
    freed = f"{STORE}{STORED}bar.sync 1, 64;\n{HEAR}{FREE}bra END;\n"
    other = f"{freed}OTHER:\n@%p2 bra END;\nbar.sync 1, 64;\n{LOAD}"
    assert verdict(other + LOADED + HALF + TELL, policy) == []
    found = [("tmem-load-not-waited", "isa"), ("tmem-read-by-register", "isa")]
    assert verdict(other + HALF + TELL, policy) == found
    assert ("tmem-dealloc-race", "hardware") in verdict(other + TELL, policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_statistics_are_published_behind_a_store_that_nobody_waited_for(policy: Policy) -> None:
    """The store is waited for in both programs, as it is in the kernel: behind the next one."""
    freed = f"bar.sync 1, 64;\n{FREE}bra END;\n"
    loaded = f"{HEAR}{LOAD}{LOADED}{store('out', '%r4')}bar.sync 1, 64;\n"
    other = f"{freed}OTHER:\n@%p2 bra END;\n{loaded}"
    assert verdict(STORE + STORED + TELL + other, policy) == []
    assert verdict(STORE + TELL + STORED + other, policy) == [("race", "hardware")]
