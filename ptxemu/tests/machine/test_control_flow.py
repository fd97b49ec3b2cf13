"""Control flow: a switch past its end, loops without an end in sight; the rest is in silicon."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy


def test_an_index_past_the_targets_is_refused():
    body = "TARGETS: .branchtargets a, b, c; mov.b32 %r2, 3; brx.idx %r2, TARGETS; a: b: c:"
    with pytest.raises(ExecutionError, match="index 3 of a list of 3 targets"):
        run(body)


def test_a_long_computation_without_any_progress_is_no_livelock():
    """Nothing here changes what another warp could see for 20,000 visible instructions."""
    body = f"""{TID} mov.b32 %r1, 0;
again: ld.global.u32 %r2, [%rd_x]; nanosleep.u32 1; add.u32 %r1, %r1, %r2;
setp.lt.u32 %p1, %r1, 10000; @%p1 bra again; {store("y", "%r1")}"""
    assert run(body, x=np.ones(1, np.uint32), y=32).y[0] == 10000


def test_a_spin_without_an_end_is_a_livelock_that_names_its_place():
    body = "again: ld.volatile.global.u32 %r1, [%rd_x]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"
    with pytest.raises(DeadlockError, match=r"livelock.*\n.*warp 0 spins near PTX line"):
        run(body, x=1)


@pytest.mark.parametrize("warps", ["round_robin", "random"])
def test_a_spin_ends_when_another_warp_writes(warps):
    body = f"""{TID} setp.lt.u32 %p1, %r0, 32; @%p1 bra again; mov.b32 %r2, 0;
delay: add.u32 %r2, %r2, 1; nanosleep.u32 9; setp.lt.u32 %p2, %r2, 3000; @%p2 bra delay;
st.release.gpu.global.u32 [%rd_x], %r2; ret;
again: ld.acquire.gpu.global.u32 %r1, [%rd_x]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again;
{store("y", "%r1")}"""
    assert run(body, block=64, x=1, y=32, policy=Policy(warps=warps)).y[5] == 3000
