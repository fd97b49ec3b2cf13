"""Named barriers: counts, arrive and sync, reductions, exits, what is told, deadlocks."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

EXCHANGE = f"""{TID} mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;
BARRIER
xor.b32 %r3, %r0, 96; mad.lo.u32 %r4, %r3, 4, %r1; ld.shared.u32 %r5, [%r4];
{store("y", "%r5")}"""


@pytest.mark.parametrize(
    "barrier",
    [
        "bar.sync 0;",
        "barrier.sync 3;",
        "barrier.cta.sync.aligned 3, 128;",
        "bar.cta.sync 15, 128;",
        "mov.b32 %r8, 2; mov.b32 %r9, 128; bar.sync %r8, %r9;",
    ],
)
def test_all_threads_of_a_cta_see_each_others_writes(barrier):
    for seed in range(3):
        ran = run(
            EXCHANGE.replace("BARRIER", barrier),
            block=128,
            shared=512,
            y=128,
            policy=Policy(seed=seed),
        )
        np.testing.assert_array_equal(ran.y, np.arange(128) ^ 96)


def test_producers_arrive_and_consumers_sync():
    body = f"""{TID} mov.u32 %r1, smem; setp.ge.u32 %p1, %r0, 64; @%p1 bra consumer;
mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0; bar.arrive 1, 96; ret;
consumer: bar.sync 1, 96; sub.u32 %r3, %r0, 64; mad.lo.u32 %r2, %r3, 8, %r1;
ld.shared.u32 %r4, [%r2]; {store("y", "%r4", "%r3")}"""
    for seed in range(4):
        ran = run(body, block=96, shared=256, y=32, policy=Policy(seed=seed))
        np.testing.assert_array_equal(ran.y, 2 * np.arange(32))


def test_a_barrier_is_used_again_and_again():
    body = f"""{TID} mov.u32 %r1, smem; mov.b32 %r2, 0; setp.eq.u32 %p1, %r0, 0;
@%p1 st.shared.u32 [%r1], 0;
next: bar.sync 0; ld.shared.u32 %r3, [%r1]; setp.ne.u32 %p2, %r3, %r2;
@%p2 trap; bar.sync 0; add.u32 %r2, %r2, 1; @%p1 st.shared.u32 [%r1], %r2;
setp.lt.u32 %p3, %r2, 10; @%p3 bra next; {store("y", "%r2")}"""
    assert set(run(body, block=128, shared=4, y=128).y.tolist()) == {10}


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("barrier.cta.red.popc.u32 %r1, 0, %p1;", 70),
        ("bar.red.popc.u32 %r1, 2, 96, !%p1;", 26),
        ("bar.red.and.pred %p2, 0, %p1; selp.u32 %r1, 1, 0, %p2;", 0),
        ("bar.red.or.pred %p2, 0, %p1; selp.u32 %r1, 1, 0, %p2;", 1),
        ("barrier.red.and.aligned.pred %p2, 0, 96, %p3; selp.u32 %r1, 1, 0, %p2;", 1),
    ],
)
def test_a_reduction_is_over_all_threads(instruction, expected):
    body = f"""{TID} setp.lt.u32 %p1, %r0, 70; setp.lt.u32 %p3, %r0, 96; {instruction}
{store("y", "%r1")}"""
    assert set(run(body, block=96, y=96).y.tolist()) == {expected}


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
