"""The cluster barrier, and shared memory of other CTAs behind it."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

RANK = "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, smem;\n"
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;\n"


def test_lanes_may_reach_several_ctas_at_once():
    body = f"""{TID}{RANK} st.shared.u32 [%r2], %r1; {SYNC} and.b32 %r3, %r0, 3;
mapa.shared::cluster.u32 %r4, %r2, %r3; ld.shared::cluster.u32 %r5, [%r4]; {SYNC}
mad.lo.u32 %r6, %r1, 32, %r0; {store("y", "%r5", "%r6")}"""
    ran = run(body, grid=4, cluster=4, shared=4, y=128)
    np.testing.assert_array_equal(ran.y, np.arange(128) % 4)


def test_ranks_and_windows_of_addresses():
    body = f"""{TID}{RANK} mov.b32 %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;
getctarank.shared::cluster.u32 %r5, %r4; cvt.u64.u32 %rd1, %r4; cvta.shared::cluster.u64 %rd1, %rd1;
getctarank.u64 %r6, %rd1; isspacep.shared::cta %p1, %rd1; isspacep.shared::cluster %p2, %rd1;
isspacep.global %p3, %rd1; isspacep.global %p4, %rd_y; isspacep.shared::cluster %p5, %rd_y;
selp.u32 %r7, 1, 0, %p1; selp.u32 %r8, 2, 0, %p2; selp.u32 %r9, 4, 0, %p3;
selp.u32 %r10, 8, 0, %p4; selp.u32 %r11, 16, 0, %p5;
or.b32 %r7, %r7, %r8; or.b32 %r7, %r7, %r9; or.b32 %r7, %r7, %r10; or.b32 %r7, %r7, %r11;
cvta.to.shared::cluster.u64 %rd2, %rd1; cvt.u32.u64 %r12, %rd2; sub.u32 %r12, %r12, %r4;
mul.lo.u32 %r13, %r1, 4; {store("y", "%r5", "%r13")} add.u32 %r13, %r13, 1;
{store("y", "%r6", "%r13")} add.u32 %r13, %r13, 1; {store("y", "%r7", "%r13")}
add.u32 %r13, %r13, 1; {store("y", "%r12", "%r13")}"""
    ran = run(body, block=1, grid=2, cluster=2, shared=4, y=8)
    assert ran.y.tolist() == [1, 1, 2 + 8, 0, 1, 1, 1 + 2 + 8, 0]


def test_a_shared_cta_access_with_another_ctas_address_is_refused():
    body = f"{RANK} mapa.shared::cluster.u32 %r4, %r2, 1; ld.shared.u32 %r5, [%r4];"
    with pytest.raises(ExecutionError, match=r"shared::cta in the CTA of rank 0.*rank 1's"):
        run(body, grid=2, cluster=2, shared=4, policy=Policy(warps="round_robin"))


def test_a_rank_outside_of_the_cluster_is_refused():
    body = f"{RANK} mapa.shared::cluster.u32 %r4, %r2, 5; ld.shared::cluster.u32 %r5, [%r4];"
    with pytest.raises(ExecutionError, match="CTA rank 5 of a cluster of 2"):
        run(body, grid=2, cluster=2, shared=4)


def test_shared_memory_of_a_cta_that_has_exited_is_complained_about():
    body = f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 1; @%p1 ret; mov.b32 %r6, 0;
more: add.u32 %r6, %r6, 1; nanosleep.u32 1; setp.lt.u32 %p2, %r6, 300; @%p2 bra more;
mapa.shared::cluster.u32 %r4, %r2, 1; ld.shared::cluster.u32 %r5, [%r4];"""
    assert "exited-cta" in run(body, grid=2, cluster=2, shared=4).seen.codes


def test_exited_threads_count_as_arrived():
    body = f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 1; @%p1 ret;
{SYNC}{SYNC} {store("y", "%r0")}"""
    np.testing.assert_array_equal(run(body, grid=2, cluster=2, shared=4, y=32).y, np.arange(32))


def test_work_between_arrive_and_wait_does_not_wait():
    body = f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 0; barrier.cluster.arrive.aligned;
mov.b32 %r3, 1; @%p1 st.global.u32 [%rd_y], %r3; @%p1 bra wait;
spin: ld.volatile.global.u32 %r4, [%rd_y]; setp.eq.u32 %p2, %r4, 0; @%p2 bra spin;
wait: barrier.cluster.wait.aligned; st.global.u32 [%rd_y+4], 5;"""
    assert run(body, grid=2, cluster=2, shared=4, y=2).y.tolist() == [1, 5]


def test_a_wait_for_a_missing_cta_is_a_deadlock_that_names_it():
    body = f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 0; @%p1 bra arrive; bar.sync 1, 64;
arrive: {SYNC}"""
    with pytest.raises(
        DeadlockError, match=r"cluster barrier of cluster 0, phase 0; cta \(1,0,0\)"
    ):
        run(body, grid=2, cluster=2, shared=4)


def test_a_wait_without_an_arrive_is_refused():
    with pytest.raises(ExecutionError, match="without an arrive"):
        run("barrier.cluster.wait;", grid=2, cluster=2)


def test_two_arrives_without_a_wait_are_complained_about():
    body = "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;"
    codes = run(body, grid=2, cluster=2).seen.codes
    assert codes == ["cluster-barrier-arrived-twice"] * 2


def test_two_arrives_and_two_waits_are_two_phases():
    """As FlashAttention-4 has it; nobody may pass the second wait before all have arrived twice."""
    body = f"""{TID}{RANK} {"barrier.cluster.arrive;" * 2} barrier.cluster.wait;
setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd_y], 1; {"barrier.cluster.wait;"} {SYNC}
@!%p1 ld.global.u32 %r2, [%rd_y]; @!%p1 st.global.u32 [%rd_y+4], %r2;"""
    ran = run(body, grid=2, cluster=2, block=64, shared=4, y=2)
    assert set(ran.seen.codes) == {"cluster-barrier-arrived-twice"}
    assert ran.y.tolist() == [1, 1]


def test_what_is_told_distinguishes_relaxed_arrivals():
    body = "barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" + SYNC
    told = run(body, block=1).seen.sync
    label = "cta (0,0,0) warp 0"
    assert told == [
        ("released", label, ("cluster_barrier", 0, 0), "relaxed"),
        ("acquired", label, ("cluster_barrier", 0, 0), "cluster"),
        ("released", label, ("cluster_barrier", 0, 1), "cluster"),
        ("acquired", label, ("cluster_barrier", 0, 1), "cluster"),
    ]
