"""Exchanges between lanes, with divergence; clusters whose CTAs ask for more work."""

from dataclasses import replace

import numpy as np
import pytest
from tests.kernel_run import TID, load, run, store

from ptxemu.errors import DeadlockError, ExecutionError, IllegalInstructionError
from ptxemu.machine.device import SM_100A
from ptxemu.machine.state import Machine
from ptxemu.sched.policy import Policy

# Exchanges between lanes: shuffles, votes, matches, reductions, the leader; with divergence.

LANE = np.arange(32)


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        ("min", [3.0, -1.0], -1.0),
        ("max.abs", [3.0, -4.0], 4.0),
        ("min", [0.0, -0.0], -0.0),
        ("max", [-0.0, 0.0], 0.0),
        ("max", [np.nan, 2.0], 2.0),
        ("max.NaN", [np.nan, 2.0], np.nan),
    ],
)
def test_float_reductions(operation, values, expected):
    x = np.resize(np.array(values, np.float32), 32)
    body = (
        TID
        + load("%f1", "x", type_="f32")
        + f"redux.sync.{operation}.f32 %f2, %f1, -1;"
        + store("y", "%f2", type_="f32")
    )
    ran = run(body, x=x, y=np.zeros(32, np.float32), arch="sm_100a")
    canonical = np.float32(expected).view(np.uint32) if expected == expected else 0x7FFFFFFF
    assert set(ran.y.view(np.uint32).tolist()) == {int(canonical)}


ELECT = f"""{TID} elect.sync %r1|%p1, -1; selp.u32 %r2, 1, 0, %p1;
{store("y", "%r1")}{store("z", "%r2")}"""


def test_elects_choice_can_be_replaced(monkeypatch):
    init = Machine.__init__

    def choose_last(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.elect = lambda lanes: int(np.flatnonzero(lanes)[-1])

    monkeypatch.setattr(Machine, "__init__", choose_last)
    ran = run(ELECT, y=32, z=32)
    assert set(ran.y.tolist()) == {31}
    np.testing.assert_array_equal(ran.z, LANE == 31)


def test_elect_needs_a_predicate():
    with pytest.raises(IllegalInstructionError, match=r"expected d\|p"):
        run("elect.sync %r1, -1;")


def test_a_shuffle_waits_for_the_lane_that_waits_elsewhere():
    """Lane 0 waits for the other warp at an mbarrier; lanes 1-31 get to the shuffle first."""
    body = f"""{TID} mov.u32 %r5, smem; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r5], 1; bar.sync 0;
setp.eq.u32 %p2, %r0, 32; @%p2 bra producer; mov.b32 %r1, 3; @!%p1 bra meet;
again: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0; @!%p3 bra again;
ld.shared.u32 %r1, [%r5+8]; bra meet;
producer: mov.b32 %r1, 1; st.shared.u32 [%r5+8], 77; nanosleep.u32 100;
mbarrier.arrive.shared.b64 _, [%r5];
meet: shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; {store("y", "%r2")}"""
    for seed in range(4):
        ran = run(body, block=64, shared=16, y=64, policy=Policy(seed=seed))
        assert set(ran.y[:32].tolist()) == {77}
        assert ran.seen.codes == []


def test_members_that_never_come_are_complained_about():
    """Each half awaits lanes of the other, which give another mask."""
    body = f"""{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bra low;
shfl.sync.idx.b32 %r1, %r0, 20, 31, 0xfffffff8; bra out;
low: shfl.sync.idx.b32 %r1, %r0, 2, 31, -1; out: {store("y", "%r1")}"""
    ran = run(body, y=32)
    assert "divergent-members" in ran.seen.codes
    assert ran.y.tolist() == [2] * 4 + [20] * 28


LANE = np.arange(32)
SQUARES = np.where(LANE < 4, LANE * LANE, LANE + 100)
"""What the lanes of the two arms below give each other."""


@pytest.mark.parametrize("apart", [0.0, 0.5])
@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("shfl.sync.bfly.b32 {d}, {a}, 16, 31, -1", SQUARES[LANE ^ 16]),
        ("shfl.sync.idx.b32 {d}, {a}, {b}, 31, -1", SQUARES[31 - LANE]),
        ("vote.sync.ballot.b32 {d}, {p}, -1", [0xAAAAAAAA] * 32),
        ("redux.sync.add.s32 {d}, {a}, -1", [SQUARES.sum()] * 32),
        (
            "redux.sync.add.s32 {d}, {a}, %r9",
            np.where(LANE % 2, SQUARES[1::2].sum(), SQUARES[::2].sum()),
        ),
        ("match.any.sync.b32 {d}, {c}, -1", np.where(LANE % 2, 0xAAAAAAAA, 0x55555555)),
    ],
)
def test_lanes_exchange_values_from_both_arms_of_a_branch(exchange, expected, apart):
    """PTX ISA: they wait for those that execute it "with the same qualifiers and same membermask
    value"; CUDA's guide has such shuffles as valid since Volta."""
    low, high = (
        exchange.format(d=f"%r{n}1", a=f"%r{n}2", b=f"%r{n}3", c=f"%r{n}4", p=f"%p{n}1")
        for n in (1, 2)
    )
    body = f"""{TID} and.b32 %r8, %r0, 1; setp.eq.u32 %p0, %r8, 1;
selp.b32 %r9, 0xaaaaaaaa, 0x55555555, %p0; setp.lt.u32 %p1, %r0, 4; @%p1 bra low;
add.u32 %r22, %r0, 100; sub.u32 %r23, 31, %r0; mov.b32 %r24, %r8; setp.eq.u32 %p21, %r8, 1;
{high}; mov.b32 %r1, %r21; bra out;
low: mul.lo.u32 %r12, %r0, %r0; sub.u32 %r13, 31, %r0; mov.b32 %r14, %r8;
setp.eq.u32 %p11, %r8, 1; {low}; mov.b32 %r1, %r11; out: {store("y", "%r1")}"""
    two_masks = "%r9" in exchange  # parts of a group may await less than the group
    ran = run(body, y=32, policy=Policy(lanes_apart=0 if two_masks else apart))
    assert ran.seen.codes == []
    assert ran.y.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize("apart", [0.0, 0.02])
@pytest.mark.parametrize(
    "wait",
    [
        "ld.volatile.shared.u32 %r3, [%r5+8]; setp.eq.u32 %p3, %r3, 0;",
        "mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0; not.pred %p3, %p4;",
    ],
)
def test_lanes_of_both_arms_meet_while_others_wait_for_what_comes_behind(wait, apart):
    body = f"""{TID} mov.u32 %r5, smem; setp.eq.u32 %p1, %r0, 0; mov.u32 %r1, 7;
@%p1 mbarrier.init.shared.b64 [%r5], 1; @%p1 st.shared.u32 [%r5+8], 0; bar.sync 0;
setp.lt.u32 %p2, %r0, 4; @%p2 bra low; setp.ge.u32 %p2, %r0, 16; @%p2 bra others;
shfl.sync.idx.b32 %r1, %r0, 1, 31, 0xffff; bra out;
low: shfl.sync.idx.b32 %r1, %r0, 15, 31, 0xffff; @%p1 st.volatile.shared.u32 [%r5+8], 1;
@%p1 mbarrier.arrive.shared.b64 _, [%r5]; bra out;
others: {wait} @%p3 bra others; out: {store("y", "%r1")}"""
    ran = run(body, shared=16, y=32, policy=Policy(lanes_apart=apart))
    assert ran.y.tolist() == [15] * 4 + [1] * 12 + [7] * 16
    assert ran.seen.codes == []


def test_one_lane_is_elected_of_both_arms_of_a_branch():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bra low;
elect.sync %r1|%p2, -1; bra out; low: elect.sync %r1|%p2, -1; out: selp.u32 %r1, 1, 0, %p2;
{store("y", "%r1")}"""
    ran = run(body, y=32)
    assert ran.seen.codes == [] and ran.y.tolist() == [1] + [0] * 31


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("other", ["bar.warp.sync -1;", "vote.sync.any.pred %p2, %p1, -1;"])
def test_lanes_that_wait_for_each_other_at_different_instructions_never_meet(other, swapped):
    parts = ["shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;", other]
    low, high = reversed(parts) if swapped else parts
    ran = run(f"{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bra low; {high} bra out;\nlow: {low}\nout:")
    errors = [text for level, code, text in ran.seen.complaints if level == "error"]
    assert len(errors) == 1 and "wait for lanes that wait for them at" in errors[0]


def test_a_lane_outside_of_its_own_mask_is_complained_about():
    shuffle = f"{TID} mov.b32 %r2, {{0}}; shfl.sync.idx.b32 %r1, %r0, 0, 31, {{1}};"
    for lanes, mask in (("0", "0xffff"), ("0xffff", "%r2"), ("0xffffffff", "%r2")):
        outside = mask == "0xffff" or lanes == "0xffff"
        assert run(shuffle.format(lanes, mask)).seen.codes == ["not-a-member"] * outside
    body = f"{TID} setp.lt.u32 %p1, %r0, 8; @%p1 shfl.sync.idx.b32 %r1, %r0, 0, 31, 0x7f;"
    assert "not-a-member" in run(body).seen.codes


def test_a_value_from_a_lane_that_takes_no_part_is_complained_about():
    body = f"{TID} setp.ge.u32 %p1, %r0, 8; @%p1 ret; shfl.sync.idx.b32 %r1, %r0, 9, 31, 0xff;"
    assert run(body).seen.codes == ["shuffle-from-idle-lane"]


def test_warp_barriers_at_two_places_join():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bra low;
bar.warp.sync -1; mov.b32 %r1, 1; bra out;
low: bar.warp.sync -1; mov.b32 %r1, 2; out: {store("y", "%r1")}"""
    ran = run(body, y=32)
    assert ran.y.tolist() == [2] * 4 + [1] * 28
    assert ran.seen.codes == []


def test_an_aligned_barrier_reached_by_a_part_of_the_warp_is_complained_about():
    body = f"{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bar.sync 0; nanosleep.u32 1;"
    ran = run(body)
    assert [(level, code) for level, code, _ in ran.seen.complaints] == [
        ("error", "divergent-aligned")
    ]
    assert "lanes 0-3 execute bar.sync without lanes 4-31" in ran.seen.complaints[0][2]


def test_aligned_barriers_in_both_branches_are_complained_about():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 4; @%p1 bra low; bar.sync 1; bra out;
low: bar.sync 2; out:"""
    assert "divergent-aligned" in run(body).seen.codes


SKIPPED = """and.b32 %r1, %r0, 31; setp.ge.u32 %p1, %r1, 4; @%p1 bra behind; {sync}
behind: {then}"""


@pytest.mark.parametrize(
    ("sync", "then", "expected"),
    [
        ("bar.sync 0;", "st.global.u32 [%rd_y], 7;", ["skipped-aligned"]),
        ("barrier.sync.aligned 0;", "membar.gl;", ["skipped-aligned"]),
        ("barrier.sync 0;", "st.global.u32 [%rd_y], 7;", []),
        ("bar.sync 0;", "", []),
    ],
)
def test_lanes_that_go_past_an_aligned_barrier_are_complained_about(sync, then, expected):
    """Who returns early has exited, and need not take part."""
    ran = run(f"{TID} {SKIPPED.format(sync=sync, then=then)}", block=64, y=4)
    assert ran.seen.codes == expected * 2


def test_lanes_that_come_back_to_a_barrier_have_not_gone_past_it():
    body = f"""{TID} and.b32 %r1, %r0, 31; setp.ge.u32 %p1, %r1, 4;
again: @%p1 bra behind; bar.sync 0; bra out;
behind: st.global.u32 [%rd_y], 7; mov.pred %p1, 0; bra again;
out: setp.ge.u32 %p1, %r1, 4; @%p1 ret; bar.sync 1;"""
    assert run(body, block=64, y=4).seen.codes == []


def test_a_warp_whose_lanes_have_exited_is_aligned():
    body = f"{TID} setp.lt.u32 %p1, %r0, 4; @%p1 ret; bar.sync 0; {store('y', '%r0')}"
    ran = run(body, block=50, y=50)
    assert ran.seen.codes == []
    np.testing.assert_array_equal(ran.y[4:], np.arange(4, 50))


def test_lanes_that_wait_for_each_other_are_a_deadlock():
    body = f"""{TID} mov.u32 %r5, smem; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r5], 1; bar.warp.sync -1; @!%p1 bra meet;
again: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0; @!%p3 bra again;
meet: bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r5];"""
    with pytest.raises(DeadlockError, match=r"lanes 1-31.*wait for lanes 0 of the warp"):
        run(body, shared=8)


# Cluster launch control, and asynchronous stores and reductions into other CTAs.
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
