"""Relaxed waits order nothing until a fence."""

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


def codes(body):
    found = check(TID + body, block=64, how={"shared": 128})
    return {f.code for f in found if f.level != "note"}


@pytest.mark.parametrize(
    ("order", "fence", "found"),
    [("acquire", "", set()), ("relaxed", "", {"race"}), ("relaxed", "fence.acq_rel.cta;", set())],
)
def test_a_relaxed_wait_acquires_with_the_next_fence(order, fence, found):
    assert codes(HANDOVER.format(order=order, fence=fence)) == found
