"""Policies: slow copies, timeouts, lanes apart; and how many CTAs are resident."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.kernel_run import TID, run, setup, source

from ptxemu import api
from ptxemu.errors import DeadlockError
from ptxemu.machine.device import SM_90A, SM_100A, ctas_per_sm
from ptxemu.mutate import Replay, mutate
from ptxemu.sched.policy import Policy
from ptxemu.sched.scheduler import Scheduler

# Policy("slow"): products come before copies, and copies come in the order of their issue.

TWO_COPIES = f"""
{TID} setp.ne.u32 %p0, %r0, 0; @%p0 bra END; mov.u32 %r1, smem; add.u32 %r2, %r1, 16;
add.u32 %r3, %r1, 128; mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x], 64, [%r1];
add.u32 %r4, %r1, 8; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd_x], 64, [%r4];
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], 0; @!%p1 bra WAIT;
mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.u32 %r5, 1, 0, %p2;
st.global.u32 [%rd_out], %r5;
END:
"""


def first_copy_was_done(asynchronous: str, seed: int) -> bool:
    """Whether the first copy was done when the second was waited for."""
    out, x = np.zeros(1, np.uint32), np.arange(64, dtype=np.uint32)
    module = api.load(source(TWO_COPIES, {"x": x, "out": out}, shared=256))
    module.launch("k", 1, 32, args=[x, out], policy=Policy(asynchronous, seed=seed))
    return bool(out[0])


def test_copies_come_in_the_order_of_their_issue() -> None:
    assert all(first_copy_was_done("slow", seed) for seed in range(8))
    assert not all(first_copy_was_done("late", seed) for seed in range(8))


def test_products_come_before_copies_that_were_issued_earlier() -> None:
    kinds = ["cp.async.bulk.tensor", "wgmma", "cp.async", "tcgen05.mma"]
    ready = [SimpleNamespace(kind=kind) for kind in kinds]
    pending = SimpleNamespace(ready=ready)
    machine = SimpleNamespace(pending=pending, take_step=lambda operation: ready.remove(operation))
    scheduler = SimpleNamespace(_machine=machine, _policy=Policy("slow"))
    left = []
    while Scheduler._step_async(scheduler):
        left.append([operation.kind for operation in ready])
    assert left == [[kinds[0], *kinds[2:]], [kinds[0], kinds[2]], [kinds[2]], []]


# Policy.timeouts: mbarrier.try_wait gives up now and then, as hardware may at any time.

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


# Policy.lanes_apart: lanes of a warp are ordered by what waits for them, and by nothing else.

EXCHANGE = f"""
{TID} shl.b32 %r1, %r0, 2;
mov.u32 %r2, smem;
add.u32 %r3, %r2, %r1;
mov.u32 %r6, 0;
ROUND:
add.u32 %r4, %r0, %r6;
st.shared.u32 [%r3], %r4;
{{sync}}
xor.b32 %r5, %r1, 124;
add.u32 %r5, %r2, %r5;
ld.shared.u32 %r7, [%r5];
{{sync}}
add.u32 %r8, %r8, %r7;
add.u32 %r6, %r6, 1;
setp.lt.u32 %p0, %r6, 20;
@%p0 bra ROUND;
mul.wide.u32 %rd0, %r1, 1;
add.u64 %rd0, %rd_out, %rd0;
st.global.u32 [%rd0], %r8;
"""
"""Twenty times each lane takes what the lane opposite to it has left in shared memory."""
WANTED = 20 * (31 - np.arange(32)) + sum(range(20))


def exchanged(sync: str, policy: Policy) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    text = source(EXCHANGE.format(sync=sync), {"out": out}, shared=128)
    api.load(text).launch("k", 1, 32, args=[out], policy=policy)
    return out


@pytest.mark.parametrize("sync", ["bar.warp.sync -1;", "shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;"])
def test_lanes_meet_where_an_instruction_waits_for_them(sync: str) -> None:
    for seed in range(3):
        assert np.array_equal(exchanged(sync, Policy(seed=seed, lanes_apart=0.2)), WANTED)


def test_without_one_lanes_see_what_others_have_not_yet_written() -> None:
    assert np.array_equal(exchanged("", Policy()), WANTED)
    assert not np.array_equal(exchanged("", Policy(lanes_apart=0.2)), WANTED)


def test_the_same_seed_parts_the_same_lanes() -> None:
    policy = Policy(seed=3, lanes_apart=0.2)
    assert np.array_equal(exchanged("", policy), exchanged("", policy))


def test_mutants_of_warp_syncs_are_tried_where_lanes_go_apart() -> None:
    text = source(EXCHANGE.format(sync="bar.warp.sync -1;"), {"out": None}, shared=128)
    arrays = (np.zeros(32, np.uint32),)
    subject = Replay(setup(text, arrays, block=32))
    assert mutate(subject, policies=[Policy()])[1] == []
    _, results = mutate(subject, policies=[Policy(lanes_apart=0.2)])
    assert [(r.mutation.site.name, r.verdict) for r in results] == [
        ("warp-sync#1", "caught"),
        ("warp-sync#2", "caught"),
    ]


# How many CTAs are resident at once: as many as the SMs have room for, if they are needed.

TWO_SMS = replace(SM_90A, num_sms=2)
GRID_BARRIER = (
    TID
    + """
    setp.ne.u32 %p0, %r0, 0; @%p0 bra END; mov.u32 %r1, %nctaid.x;
    atom.add.acq_rel.gpu.global.u32 %r2, [%rd_arrived], 1;
    SPIN: ld.acquire.gpu.global.u32 %r3, [%rd_arrived]; setp.lt.u32 %p1, %r3, %r1; @%p1 bra SPIN;
    END:
"""
)
HALF_AN_SM = 100 * 1024


def meet(ctas, **how):
    """CTAs that have arrived when all have seen each other."""
    return int(run(GRID_BARRIER, grid=ctas, device=TWO_SMS, arrived=1, **how).arrived[0])


@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_a_grid_barrier_of_more_ctas_than_sms_completes(asynchronous):
    assert meet(4, shared=HALF_AN_SM, policy=Policy(asynchronous=asynchronous)) == 4


def test_ctas_that_do_not_fit_are_named_in_the_deadlock():
    with pytest.raises(DeadlockError, match=r"1 CTAs have not started: .* room for 4 .*2 SMs"):
        meet(5, shared=HALF_AN_SM)


def test_clusters_are_resident_as_a_whole():
    assert meet(4, cluster=2, shared=HALF_AN_SM) == 4


def test_without_need_no_more_ctas_are_resident_than_sms():
    """CTAs that do not wait for each other: each runs alone on one of the SMs."""
    one_sm = replace(SM_90A, num_sms=1)
    body = """
    atom.add.global.u32 %r1, [%rd_inside], 1; atom.max.global.u32 %r2, [%rd_most], %r1;
    red.add.global.u32 [%rd_inside], -1;
    """
    assert run(body, grid=8, block=1, device=one_sm, inside=1, most=1).most[0] == 0


def test_ctas_that_compute_for_long_need_no_others():
    body = """
    atom.add.global.u32 %r1, [%rd_inside], 1; atom.max.global.u32 %r2, [%rd_most], %r1;
    mov.u32 %r3, 0;
    LOOP: add.u32 %r3, %r3, 1; setp.lt.u32 %p0, %r3, 500; @%p0 bra LOOP;
    red.add.global.u32 [%rd_inside], -1;
    """
    one_sm = replace(SM_90A, num_sms=1)
    assert run(body, grid=4, block=1, device=one_sm, inside=1, most=1).most[0] == 0


@pytest.mark.parametrize(
    ("threads", "shared", "maxnreg", "expected"),
    [
        (32, 0, None, 32),
        (128, 0, None, 16),
        (1024, 0, None, 2),
        (384, 0, 168, 1),
        (128, 0, 128, 4),
        (128, 32 * 1024, None, 6),
        (128, 227 * 1024, None, 1),
    ],
)
def test_an_sm_holds_as_many_ctas_as_its_room_allows(threads, shared, maxnreg, expected):
    directives = {} if maxnreg is None else {"maxnreg": (maxnreg,)}
    assert ctas_per_sm(SM_100A, threads, shared, directives) == expected
