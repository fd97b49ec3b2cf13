"""Relaxed waits order nothing until a fence; arrivals on a CTA that may have exited."""

import pytest
from tests.check.checked_run import check
from tests.kernel_run import TID

HANDOVER = """
    mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], 32;
    READY: bar.sync 0; setp.lt.u32 %p2, %r0, 32; @%p2 bra WAIT; st.shared.u32 [%r1+64], %r0;
    mbarrier.arrive.shared.b64 _, [%r1]; bra END;
    WAIT: mbarrier.try_wait.parity.{order}.cta.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;
    {fence}
    ld.shared.u32 %r2, [%r1+64];
    END:
"""


def codes(body, *, grid=1, block=64):
    found = check(TID + body, grid=grid, cluster=grid, block=block, how={"shared": 128})
    return {f.code for f in found if f.level != "note"}


@pytest.mark.parametrize(
    ("order", "fence", "found"),
    [("acquire", "", set()), ("relaxed", "", {"race"}), ("relaxed", "fence.acq_rel.cta;", set())],
)
def test_a_relaxed_wait_acquires_with_the_next_fence(order, fence, found):
    assert codes(HANDOVER.format(order=order, fence=fence)) == found


REMOTE = """
    mov.u32 %r1, smem; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p0 bra END;
    setp.eq.u32 %p2, %r3, 0; @%p2 bra OWNER; mapa.shared::cluster.u32 %r4, %r1, 0;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4]; bra END;
    OWNER:
    {wait}
    END:
"""


def test_a_remote_arrival_that_nobody_waits_for_may_come_after_the_exit():
    wait = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0;\n"
    wait += "@!%p1 bra W;"
    assert codes(REMOTE.format(wait=wait), grid=2, block=32) == set()
    assert codes(REMOTE.format(wait=""), grid=2, block=32) == {"signal-after-exit"}
