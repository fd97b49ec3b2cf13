"""Cluster launch control, and asynchronous stores and reductions into other CTAs."""

from dataclasses import replace

import numpy as np
import pytest
from tests.kernel_run import TID, run, store

from ptxemu.errors import ExecutionError
from ptxemu.machine.device import SM_100A
from ptxemu.sched.policy import Policy

# Shared memory: an mbarrier at 0, a response at 16. %r10 = x of the tile, %r6 = parity.
PERSISTENT = f"""{TID} mov.u32 %r1, smem; mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y;
mov.b32 %r6, 0; setp.eq.u32 %p0, %r0, 0; mov.u32 %r12, %cluster_ctarank;
@%p0 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
tile: @!%p0 bra ask; mad.lo.u32 %r20, %r11, WIDTH, %r10; mul.wide.u32 %rd1, %r20, 4;
add.s64 %rd1, %rd_y, %rd1; red.global.add.u32 [%rd1], 1;
ask: bar.sync 0; @!%p0 bra learn; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16; ISSUE
learn: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r6; @!%p2 bra learn;
xor.b32 %r6, %r6, 1; ld.shared.b128 %rq1, [%r1+16];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %rq1; @!%p3 bra out;
@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r10, %rq1;
@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r11, %rq1;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r21, %r22, %r23, _}}, %rq1;
setp.ne.u32 %p4, %r21, %r10; @%p4 trap; add.u32 %r10, %r10, %r12;
fence.proxy.async.shared::cta; SYNC bra tile;
out:"""
CANCEL = (
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 "
    "[%r1+16], [%r1];"
)


@pytest.mark.parametrize("num_sms", [1, 3, 148])
@pytest.mark.parametrize("seed", range(2))
def test_every_tile_of_a_persistent_kernel_is_done_once(num_sms, seed):
    body = (
        PERSISTENT.replace("WIDTH", "6")
        .replace("ISSUE", CANCEL.format(""))
        .replace("SYNC", "bar.sync 0;")
    )
    ran = run(
        body, grid=(6, 4), block=64, shared=32, y=24, arch="sm_100a",
        device=replace(SM_100A, num_sms=num_sms), policy=Policy(seed=seed),
    )  # fmt: skip
    assert ran.y.tolist() == [1] * 24
    assert ran.seen.codes == []


def test_a_multicast_response_reaches_every_cta_of_the_cluster():
    issue = "setp.eq.u32 %p5, %r12, 0; @%p5 " + CANCEL.format(".multicast::cluster::all")
    body = (
        PERSISTENT.replace("WIDTH", "8")
        .replace("ISSUE", issue)
        .replace("SYNC", "barrier.cluster.arrive; barrier.cluster.wait;")
    )
    ran = run(
        body, grid=8, cluster=2, block=32, shared=32, y=8, arch="sm_100a",
        device=replace(SM_100A, num_sms=2),
    )  # fmt: skip
    assert ran.y.tolist() == [1] * 8


REMOTE = f"""{TID} mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 1; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
mad.lo.u32 %r3, %r0, 16, %r1; st.shared.u32 [%r3+64], 1000;
barrier.cluster.arrive; barrier.cluster.wait; xor.b32 %r4, %r2, 1;
mapa.shared::cluster.u32 %r5, %r3, %r4; mapa.shared::cluster.u32 %r6, %r1, %r4;
mad.lo.u32 %r7, %r2, 100, %r0; ISSUE
wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra wait;
ld.shared.u32 %r8, [%r3+64]; mad.lo.u32 %r9, %r2, 32, %r0; {store("y", "%r8", "%r9")}
barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize(
    ("issue", "size", "expected"),
    [
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32", 4, 0),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32", 8, 0),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32", 4, 1000),
        ("red.async.shared::cluster.mbarrier::complete_tx::bytes.max.s32", 4, None),
    ],
)
@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_stores_and_reductions_arrive_with_their_bytes(issue, size, expected, asynchronous):
    value = "{%r7, %r7}" if "v2" in issue else "%r7"
    body = REMOTE.replace("BYTES", str(32 * size)).replace(
        "ISSUE", f"{issue} [%r5+64], {value}, [%r6];"
    )
    ran = run(body, grid=2, cluster=2, shared=1024, y=64, policy=Policy(asynchronous=asynchronous))
    sent = np.concatenate([100 + np.arange(32), np.arange(32)])
    want = np.maximum(sent, 1000) if expected is None else sent + expected
    np.testing.assert_array_equal(ran.y, want)


def test_a_barrier_in_another_cta_than_the_data_is_refused():
    issue = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5+64], %r7, [%r1];"
    with pytest.raises(ExecutionError, match="mbarrier is in another CTA"):
        run(
            REMOTE.replace("BYTES", "128").replace("ISSUE", issue),
            grid=2,
            cluster=2,
            shared=1024,
            y=64,
        )


@pytest.mark.parametrize(
    ("issue", "expected"),
    [
        ("st.async.release.gpu.global.b32 [%rd4], %r0;", np.arange(32)),
        ("red.async.release.sys.global.add.u32 [%rd4], %r0;", 1000 + np.arange(32)),
    ],
)
def test_stores_to_global_memory_need_no_mbarrier(issue, expected):
    body = f"{TID} mul.wide.u32 %rd4, %r0, 4; add.s64 %rd4, %rd_y, %rd4; {issue}"
    ran = run(body, arch="sm_100a", y=np.full(32, 1000, np.uint32))
    np.testing.assert_array_equal(ran.y, expected)
