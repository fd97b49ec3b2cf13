"""Named barriers: counts, arrive and sync, reductions, exits, what is told, deadlocks."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError


def test_exited_warps_are_not_waited_for_without_a_count():
    body = f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0; {store('y', '%r0')}"
    np.testing.assert_array_equal(run(body, block=96, y=96).y[32:], np.arange(32, 96))


def test_exited_warps_are_waited_for_with_a_count():
    body = f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 5, 96;"
    with pytest.raises(DeadlockError, match=r"barrier 5 of cta \(0, 0, 0\).*64 of 96.*warps 1, 2"):
        run(body, block=96)


def test_the_warps_of_a_barrier_without_aligned_arrive_when_all_their_lanes_have():
    body = f"""{TID} mov.u32 %r1, smem; setp.lt.u32 %p1, %r0, 40; @%p1 bra low;
barrier.sync 1, 64; ld.shared.u32 %r2, [%r1]; bra out;
low: nanosleep.u32 1; setp.eq.u32 %p2, %r0, 33; @%p2 st.shared.u32 [%r1], 9; barrier.sync 1, 64;
ld.shared.u32 %r2, [%r1]; out: {store("y", "%r2")}"""
    ran = run(body, block=64, shared=4, y=64)
    assert set(ran.y.tolist()) == {9}
    assert ran.seen.codes == []


@pytest.mark.parametrize(
    ("barrier", "message"),
    [
        ("bar.sync 16;", "expected one of 0..15"),
        ("bar.sync 1, 33;", "multiple of 32; got 33"),
        ("bar.arrive 1, 0;", "multiple of 32; got 0"),
        ("bar.sync 1, 32; bar.sync %r0, 32;", "lanes give different barriers"),
    ],
)
def test_wrong_operands_are_refused(barrier, message):
    with pytest.raises(ExecutionError, match=message):
        run(TID + barrier)


def test_counts_that_differ_are_refused():
    body = f"{TID} setp.lt.u32 %p1, %r0, 32; selp.u32 %r1, 64, 96, %p1; bar.sync 1, %r1;"
    with pytest.raises(ExecutionError, match=r"is for .* threads here and for .* earlier"):
        run(body, block=64)


def test_arrivals_release_and_waits_acquire_the_same_token():
    body = f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 bra a; bar.sync 2, 64; ret; a: bar.arrive 2, 64;"
    told = {(what, label[-6:], token) for what, label, token, _ in run(body, block=64).seen.sync}
    token = ("barrier", 0, 2, 0)
    assert told == {
        ("released", "warp 0", token),
        ("released", "warp 1", token),
        ("acquired", "warp 1", token),
    }
