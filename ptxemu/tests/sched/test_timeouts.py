"""Policy.timeouts: mbarrier.try_wait gives up now and then, as hardware may at any time."""

import numpy as np
import pytest
from tests.kernel_run import TID, source

from ptxemu import api
from ptxemu.sched.policy import Policy

PEEK = (
    TID
    + """
    mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; mov.u32 %r5, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    READY: bar.sync 0; setp.lt.u32 %p2, %r0, 32; @%p2 bra WAIT; mov.u32 %r2, 0;
    WORK: st.shared.u32 [%r1+64], %r2; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 200;
    @%p3 bra WORK; setp.ne.u32 %p0, %r0, 32; @%p0 bra END; mbarrier.arrive.shared.b64 _, [%r1];
    bra END;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @%p1 bra DONE; add.u32 %r5, %r5, 1;
    bra WAIT;
    DONE: st.global.u32 [%rd_out], %r5;
    END:
"""
)


def times_given_up(policy):
    out = np.zeros(1, np.uint32)
    api.load(source(PEEK, {"out": out}, shared=128)).launch("k", 1, 64, args=[out], policy=policy)
    return int(out[0])


def test_without_timeouts_a_wait_lasts_until_the_arrival():
    assert times_given_up(Policy(warps="round_robin")) == 0


def test_with_timeouts_the_code_behind_a_failed_wait_runs():
    assert times_given_up(Policy(timeouts=0.5)) > 0


def test_the_same_seed_gives_the_same_run():
    policy = Policy(timeouts=0.3, seed=7)
    assert times_given_up(policy) == times_given_up(policy)


@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_waits_that_always_give_up_still_end(asynchronous):
    assert times_given_up(Policy(asynchronous=asynchronous, timeouts=1.0)) > 0
