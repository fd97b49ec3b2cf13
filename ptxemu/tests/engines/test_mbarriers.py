"""mbarriers: phases, counts, states, remote arrives, what is told, misuse, deadlocks."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

INIT = f"""{TID} mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1], COUNT; bar.sync 0;
"""


def init(count):
    """%r1 = the address of an mbarrier for `count` arrivals; the data behind it start at +64."""
    return INIT.replace("COUNT", str(count))


def wait(parity, number, opcode="mbarrier.try_wait.parity.shared.b64", address="[%r1]"):
    """PTX that waits for a parity."""
    return f"wait{number}: {opcode} %p9, {address}, {parity}; @!%p9 bra wait{number};\n"


@pytest.mark.parametrize("opcode", ["mbarrier.try_wait", "mbarrier.test_wait"])
@pytest.mark.parametrize("seed", range(3))
def test_a_producer_and_a_consumer_pass_data_through_a_ring_of_two_stages(opcode, seed):
    """Warp 0 writes 8 items into 2 slots, warp 1 reads them; full at +0, empty at +16."""
    body = f"""{TID} mov.u32 %r1, smem; and.b32 %r2, %r0, 31; setp.eq.u32 %p0, %r0, 0;
@!%p0 bra begin; mbarrier.init.shared.b64 [%r1], 32; mbarrier.init.shared.b64 [%r1+8], 32;
mbarrier.init.shared.b64 [%r1+16], 1; mbarrier.init.shared.b64 [%r1+24], 1;
begin: bar.sync 0; mov.b32 %r3, 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra consume;
produce: and.b32 %r4, %r3, 1; shr.u32 %r5, %r3, 1; and.b32 %r5, %r5, 1; xor.b32 %r5, %r5, 1;
mad.lo.u32 %r6, %r4, 8, %r1; mad.lo.u32 %r7, %r4, 128, %r1; mad.lo.u32 %r7, %r2, 4, %r7;
wait0: {opcode}.parity.shared.b64 %p2, [%r6+16], %r5; @!%p2 bra wait0;
mad.lo.u32 %r8, %r3, 100, %r2; st.shared.u32 [%r7+64], %r8; mbarrier.arrive.shared.b64 _, [%r6];
add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 8; @%p3 bra produce; ret;
consume: and.b32 %r4, %r3, 1; shr.u32 %r5, %r3, 1; and.b32 %r5, %r5, 1;
mad.lo.u32 %r6, %r4, 8, %r1; mad.lo.u32 %r7, %r4, 128, %r1; mad.lo.u32 %r7, %r2, 4, %r7;
wait1: {opcode}.parity.shared.b64 %p2, [%r6], %r5; @!%p2 bra wait1;
ld.shared.u32 %r8, [%r7+64]; mad.lo.u32 %r9, %r3, 32, %r2; {store("y", "%r8", "%r9")}
bar.warp.sync -1; elect.sync _|%p4, -1; @%p4 mbarrier.arrive.shared.b64 _, [%r6+16];
add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 8; @%p3 bra consume;"""
    ran = run(body, block=64, shared=512, y=256, policy=Policy(seed=seed))
    expected = 100 * np.arange(8)[:, None] + np.arange(32)
    np.testing.assert_array_equal(ran.y.reshape(8, 32), expected)
    assert ran.seen.codes == []


def test_an_arrive_without_completion_must_not_complete():
    body = f"{init(1)} @%p0 mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 1;"
    with pytest.raises(ExecutionError, match="would complete the phase"):
        run(body, shared=8)


@pytest.mark.parametrize("space", ["shared::cluster", "generic"])
def test_arrives_on_a_barrier_of_another_cta(space):
    """Rank 0 waits for all threads of ranks 1 and 2, which have stored into its memory."""
    remote = (
        "mapa.shared::cluster.u32 %r3, %r1, 0; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];"
        if space == "shared::cluster"
        else "cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1; mapa.u64 %rd2, %rd1, 0;"
        "mbarrier.arrive.release.cluster.b64 _, [%rd2];"
    )
    body = f"""{init(64)} fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed;
barrier.cluster.wait; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r2, 0; @%p1 bra home;
mapa.shared::cluster.u32 %r4, %r1, 0; mad.lo.u32 %r4, %r2, 128, %r4; mad.lo.u32 %r4, %r0, 4, %r4;
mad.lo.u32 %r5, %r2, 1000, %r0; st.shared::cluster.u32 [%r4], %r5; {remote} bra out;
home: {wait(0, 0, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")}
mad.lo.u32 %r6, %r0, 4, %r1; ld.shared.u32 %r7, [%r6+128]; ld.shared.u32 %r8, [%r6+256];
add.u32 %r7, %r7, %r8; {store("y", "%r7")}
out: barrier.cluster.arrive; barrier.cluster.wait;"""
    for seed in range(3):
        ran = run(body, grid=3, cluster=3, shared=512, y=32, policy=Policy(seed=seed))
        np.testing.assert_array_equal(ran.y, 3000 + 2 * np.arange(32))


def test_an_arrive_on_shared_cta_with_another_ctas_address_is_refused():
    body = f"{init(1)} mapa.shared::cluster.u32 %r3, %r1, 1; mbarrier.arrive.shared.b64 _, [%r3];"
    with pytest.raises(ExecutionError, match="not in shared::cta of the CTA of rank 0"):
        run(body, grid=2, cluster=2, shared=8, policy=Policy(warps="round_robin"))


def test_lanes_may_wait_for_different_barriers():
    body = f"""{TID} mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 8, %r1; setp.lt.u32 %p0, %r0, 32;
@%p0 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0; @%p0 bra waits; sub.u32 %r3, %r0, 32;
mad.lo.u32 %r2, %r3, 8, %r1; setp.lt.u32 %p1, %r3, 16; @%p1 mbarrier.arrive.shared.b64 _, [%r2];
@!%p1 nanosleep.u32 5; @!%p1 mbarrier.arrive.shared.b64 _, [%r2]; ret;
waits: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra waits; {store("y", "%r0")}"""
    np.testing.assert_array_equal(run(body, block=64, shared=256, y=32).y, np.arange(32))


def test_a_try_wait_gives_up_where_nothing_else_can_go_on():
    """A peek at a phase that this warp itself completes behind it must not block for ever."""
    body = f"""{init(1)} @!%p0 ret; mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
mbarrier.arrive.shared.b64 _, [%r1]; {wait(0, 0)} selp.u32 %r2, 1, 2, %p1;
st.global.u32 [%rd_y], %r2;"""
    assert run(body, shared=8, y=1).y[0] == 2


def test_a_deadlock_names_the_barrier_and_its_phase():
    body = f"{init(2)} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16; {wait(0, 0)}"
    message = (
        r"deadlock.*\n.*32 lanes, PTX line \d+: mbarrier wait for parity 0: mbarrier at shared "
        r"0x400 of cta \(0, 0, 0\) is in phase 0: 1 of 2 arrivals are missing, tx-count 16"
    )
    with pytest.raises(DeadlockError, match=message):
        run(body, shared=8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mbarrier.arrive.shared.b64 _, [%r1+8];", "no mbarrier was initialised"),
        ("mbarrier.arrive.shared.b64 _, [%r1+4];", "8-byte alignment"),
        ("mbarrier.arrive.shared.b64 _, [%r1], 3;", "3 arrivals in phase 0, where 2 of 2"),
        ("mbarrier.init.shared.b64 [%r1+8], 0;", "expected a count"),
        ("mbarrier.inval.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];", "no mbarrier"),
        ("mbarrier.expect_tx.shared.b64 [%r1], 1048576;", "tx-count 1048576 is outside"),
        ("mbarrier.arrive.shared.b64 _, [%r1+1000];", "beyond the CTA's"),
    ],
)
def test_misuse_is_refused_with_its_place(body, message):
    with pytest.raises(ExecutionError, match=rf"PTX line \d+: mbarrier.*{message}"):
        run(f"{init(2)} @!%p0 ret; {body}", shared=16)


def test_a_second_init_without_inval_is_complained_about():
    assert run(init(2) + init(2), shared=8).seen.codes == ["mbarrier-initialised-twice"]
    again = init(2) + "@%p0 mbarrier.inval.shared.b64 [%r1];" + init(2)
    assert run(again, shared=8).seen.codes == []


def test_a_wait_that_missed_two_phases_is_told_of():
    """One warp completes phases alone; the other waits for phase 0, then for 1 when 3 is done."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r1];"
    body = f"""{init(1)} setp.ge.u32 %p1, %r0, 32; @%p1 bra waits; @!%p0 ret; {arrive}
bar.sync 1, 64; {arrive}{arrive}{arrive} bar.sync 2, 64; ret;
waits: {wait(0, 0)} bar.sync 1, 64; bar.sync 2, 64; {wait(1, 1)}"""
    body = body.replace("@!%p0 ret;", "setp.ne.u32 %p2, %r0, 0; @%p2 ret;")
    ran = run(body, block=64, shared=8)
    assert ran.seen.missed == [(0, 3)]


def test_phases_waited_for_in_order_are_not_complained_about():
    arrive = "@%p0 mbarrier.arrive.shared.b64 _, [%r1];"
    body = init(1) + "".join(
        f"{arrive} {wait(k % 2, k)} mbarrier.test_wait.parity.shared.b64 %p9, [%r1], {k % 2};"
        for k in range(6)
    )
    assert run(body, shared=8).seen.codes == []


def test_arrivals_release_and_waits_acquire_the_tokens_of_phases():
    body = f"""{init(1)} @!%p0 ret; mbarrier.arrive.shared.b64 _, [%r1];
mbarrier.arrive.relaxed.cluster.shared.b64 _, [%r1];
mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [%r1], 1;"""
    told = [t for t in run(body, block=1, shared=8).seen.sync if t[2][0] == "mbarrier"]
    label = "cta (0,0,0) warp 0"
    assert told == [
        ("released", label, ("mbarrier", 0, 0x400, 0), "cta"),
        ("released", label, ("mbarrier", 0, 0x400, 1), "relaxed"),
        ("acquired", label, ("mbarrier", 0, 0x400, 0), "cluster"),
        ("acquired", label, ("mbarrier", 0, 0x400, 1), "cluster"),
    ]


def test_the_object_is_reported_as_written_by_its_init():
    (access,) = run(init(1), block=1, shared=8).seen.accesses
    assert (access.starts.tolist(), access.size, access.kind.value) == ([0x400], 8, "write")
