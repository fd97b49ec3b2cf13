"""Barriers of CTAs and clusters, and mbarriers: counts, exits, what is told, misuse, deadlocks."""

import numpy as np
import pytest
from tests.kernel_run import TID, assert_leaves, run, store

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

LANES = np.arange(32)
RANK = "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, smem;\n"
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;\n"
IN_ORDER = Policy(warps="round_robin")
PAIR = {"grid": 2, "cluster": 2, "shared": 4}
LABEL = "cta (0,0,0) warp 0"


def init(count):
    """%r1 = the address of an mbarrier for `count` arrivals; the data behind it start at +64."""
    return f"""{TID} mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1], {count}; bar.sync 0;
"""


def wait(parity, number, opcode="mbarrier.try_wait.parity.shared.b64", address="[%r1]"):
    """PTX that waits for a parity."""
    return f"wait{number}: {opcode} %p9, {address}, {parity}; @!%p9 bra wait{number};\n"


ARRIVE = "mbarrier.arrive.shared.b64 _, [%r1];"
STRAY = f"{RANK} mapa.shared::cluster.u32 %r4, %r2, "

LEAVES = {
    "exited warps are not waited for without a count": (
        f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0; {store('y', '%r0')}",
        {"block": 96, "y": 96}, np.maximum(np.arange(96), 32) * (np.arange(96) >= 32), [],
    ),
    "warps of a barrier without .aligned arrive when all their lanes have": (
        f"""{TID} mov.u32 %r1, smem; setp.lt.u32 %p1, %r0, 40; @%p1 bra low;
barrier.sync 1, 64; ld.shared.u32 %r2, [%r1]; bra out;
low: nanosleep.u32 1; setp.eq.u32 %p2, %r0, 33; @%p2 st.shared.u32 [%r1], 9; barrier.sync 1, 64;
ld.shared.u32 %r2, [%r1]; out: {store("y", "%r2")}""",
        {"block": 64, "shared": 4, "y": 64}, [9] * 64, [],
    ),
    "lanes reach several CTAs at once": (
        f"""{TID}{RANK} st.shared.u32 [%r2], %r1; {SYNC} and.b32 %r3, %r0, 3;
mapa.shared::cluster.u32 %r4, %r2, %r3; ld.shared::cluster.u32 %r5, [%r4]; {SYNC}
mad.lo.u32 %r6, %r1, 32, %r0; {store("y", "%r5", "%r6")}""",
        {"grid": 4, "cluster": 4, "shared": 4, "y": 128}, np.arange(128) % 4, [],
    ),
    "ranks and windows of addresses": (
        f"""{TID}{RANK} mov.b32 %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;
getctarank.shared::cluster.u32 %r5, %r4; cvt.u64.u32 %rd1, %r4; cvta.shared::cluster.u64 %rd1, %rd1;
getctarank.u64 %r6, %rd1; isspacep.shared::cta %p1, %rd1; isspacep.shared::cluster %p2, %rd1;
isspacep.global %p3, %rd1; isspacep.global %p4, %rd_y; isspacep.shared::cluster %p5, %rd_y;
selp.u32 %r7, 1, 0, %p1; selp.u32 %r8, 2, 0, %p2; selp.u32 %r9, 4, 0, %p3;
selp.u32 %r10, 8, 0, %p4; selp.u32 %r11, 16, 0, %p5;
or.b32 %r7, %r7, %r8; or.b32 %r7, %r7, %r9; or.b32 %r7, %r7, %r10; or.b32 %r7, %r7, %r11;
cvta.to.shared::cluster.u64 %rd2, %rd1; cvt.u32.u64 %r12, %rd2; sub.u32 %r12, %r12, %r4;
mul.lo.u32 %r13, %r1, 4; {store("y", "%r5", "%r13")} add.u32 %r13, %r13, 1;
{store("y", "%r6", "%r13")} add.u32 %r13, %r13, 1; {store("y", "%r7", "%r13")}
add.u32 %r13, %r13, 1; {store("y", "%r12", "%r13")}""",
        {**PAIR, "block": 1, "y": 8}, [1, 1, 2 + 8, 0, 1, 1, 1 + 2 + 8, 0], [],
    ),
    "exited threads count as arrived": (
        f"{TID}{RANK} setp.eq.u32 %p1, %r1, 1; @%p1 ret; {SYNC}{SYNC} {store('y', '%r0')}",
        {**PAIR, "y": 32}, LANES, [],
    ),
    "work between arrive and wait does not wait": (
        f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 0; barrier.cluster.arrive.aligned;
mov.b32 %r3, 1; @%p1 st.global.u32 [%rd_y], %r3; @%p1 bra wait;
spin: ld.volatile.global.u32 %r4, [%rd_y]; setp.eq.u32 %p2, %r4, 0; @%p2 bra spin;
wait: barrier.cluster.wait.aligned; st.global.u32 [%rd_y+4], 5;""",
        {**PAIR, "y": 2}, [1, 5], [],
    ),
    # As FlashAttention-4 has it; nobody may pass the second wait before all have arrived twice.
    "two arrives and two waits are two phases": (
        f"""{TID}{RANK} {"barrier.cluster.arrive;" * 2} barrier.cluster.wait;
setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd_y], 1; barrier.cluster.wait; {SYNC}
@!%p1 ld.global.u32 %r2, [%rd_y]; @!%p1 st.global.u32 [%rd_y+4], %r2;""",
        {**PAIR, "block": 64, "y": 2}, [1, 1], ["cluster-barrier-arrived-twice"] * 4,
    ),
    "lanes wait for different mbarriers": (
        f"""{TID} mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 8, %r1; setp.lt.u32 %p0, %r0, 32;
@%p0 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0; @%p0 bra waits; sub.u32 %r3, %r0, 32;
mad.lo.u32 %r2, %r3, 8, %r1; setp.lt.u32 %p1, %r3, 16; @%p1 mbarrier.arrive.shared.b64 _, [%r2];
@!%p1 nanosleep.u32 5; @!%p1 mbarrier.arrive.shared.b64 _, [%r2]; ret;
waits: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra waits; {store("y", "%r0")}""",
        {"block": 64, "shared": 256, "y": 32}, LANES, [],
    ),
    # A peek at a phase that this warp itself completes behind it must not block for ever.
    "a try_wait gives up where nothing else can go on": (
        f"""{init(1)} @!%p0 ret; mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
{ARRIVE} {wait(0, 0)} selp.u32 %r2, 1, 2, %p1; st.global.u32 [%rd_y], %r2;""",
        {"shared": 8, "y": 1}, [2], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_what_a_program_leaves(name):
    body, how, expected, codes = LEAVES[name]
    assert_leaves(body, {"y": expected}, codes, **how)


MISUSE = {"shared": 16}
WRONG = {
    "bar.sync 16": (TID + "bar.sync 16;", {}, "expected one of 0..15"),
    "bar.sync 1, 33": (TID + "bar.sync 1, 33;", {}, "multiple of 32; got 33"),
    "bar.arrive 1, 0": (TID + "bar.arrive 1, 0;", {}, "multiple of 32; got 0"),
    "different barriers": (
        TID + "bar.sync 1, 32; bar.sync %r0, 32;", {}, "lanes give different barriers"
    ),
    "counts that differ": (
        f"{TID} setp.lt.u32 %p1, %r0, 32; selp.u32 %r1, 64, 96, %p1; bar.sync 1, %r1;",
        {"block": 64}, r"is for .* threads here and for .* earlier",
    ),
    "a shared::cta access with another CTA's address": (
        f"{STRAY} 1; ld.shared.u32 %r5, [%r4];", {**PAIR, "policy": IN_ORDER},
        r"shared::cta in the CTA of rank 0.*rank 1's",
    ),
    "a rank outside of the cluster": (
        f"{STRAY} 5; ld.shared::cluster.u32 %r5, [%r4];", PAIR, "CTA rank 5 of a cluster of 2"
    ),
    "a wait without an arrive": ("barrier.cluster.wait;", PAIR, "without an arrive"),
    "an arrive without completion that would complete": (
        f"{init(1)} @%p0 mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 1;", MISUSE,
        "would complete the phase",
    ),
    "an arrive on shared::cta with another CTA's address": (
        f"{init(1)} mapa.shared::cluster.u32 %r3, %r1, 1; mbarrier.arrive.shared.b64 _, [%r3];",
        {**PAIR, "shared": 8, "policy": IN_ORDER}, "not in shared::cta of the CTA of rank 0",
    ),
    **{
        f"misuse: {body}": (
            f"{init(2)} @!%p0 ret; {body}", MISUSE, rf"PTX line \d+: mbarrier.*{message}"
        )
        for body, message in (
            ("mbarrier.arrive.shared.b64 _, [%r1+8];", "no mbarrier was initialised"),
            ("mbarrier.arrive.shared.b64 _, [%r1+4];", "8-byte alignment"),
            ("mbarrier.arrive.shared.b64 _, [%r1], 3;", "3 arrivals in phase 0, where 2 of 2"),
            ("mbarrier.init.shared.b64 [%r1+8], 0;", "expected a count"),
            (f"mbarrier.inval.shared.b64 [%r1]; {ARRIVE}", "no mbarrier"),
            ("mbarrier.expect_tx.shared.b64 [%r1], 1048576;", "tx-count 1048576 is outside"),
            ("mbarrier.arrive.shared.b64 _, [%r1+1000];", "beyond the CTA's"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    body, how, message = WRONG[name]
    with pytest.raises(ExecutionError, match=message):
        run(body, **how)


DEADLOCKS = {
    "exited warps are waited for with a count": (
        f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 5, 96;", {"block": 96},
        r"barrier 5 of cta \(0, 0, 0\).*64 of 96.*warps 1, 2",
    ),
    "a missing CTA is named": (
        f"{TID}{RANK} setp.eq.u32 %p1, %r1, 0; @%p1 bra arrive; bar.sync 1, 64; arrive: {SYNC}",
        PAIR, r"cluster barrier of cluster 0, phase 0; cta \(1,0,0\)",
    ),
    "an mbarrier and its phase are named": (
        f"{init(2)} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16; {wait(0, 0)}", MISUSE,
        r"deadlock.*\n.*32 lanes, PTX line \d+: mbarrier wait for parity 0: mbarrier at shared "
        r"0x400 of cta \(0, 0, 0\) is in phase 0: 1 of 2 arrivals are missing, tx-count 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlocks(name):
    body, how, message = DEADLOCKS[name]
    with pytest.raises(DeadlockError, match=message):
        run(body, **how)


ONE_PHASE = f"@%p0 {ARRIVE}"
COMPLAINTS = {
    "shared memory of a CTA that has exited": (
        f"""{TID}{RANK} setp.eq.u32 %p1, %r1, 1; @%p1 ret; mov.b32 %r6, 0;
more: add.u32 %r6, %r6, 1; nanosleep.u32 1; setp.lt.u32 %p2, %r6, 300; @%p2 bra more;
mapa.shared::cluster.u32 %r4, %r2, 1; ld.shared::cluster.u32 %r5, [%r4];""",
        PAIR, {"exited-cta"},
    ),
    "two arrives without a wait": (
        "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;", PAIR,
        {"cluster-barrier-arrived-twice"},
    ),
    "a second init": (init(2) + init(2), MISUSE, {"mbarrier-initialised-twice"}),
    "a second init behind inval": (
        init(2) + "@%p0 mbarrier.inval.shared.b64 [%r1];" + init(2), MISUSE, set()
    ),
    "phases waited for in order": (
        init(1) + "".join(
            f"{ONE_PHASE} {wait(k % 2, k)}"
            f" mbarrier.test_wait.parity.shared.b64 %p9, [%r1], {k % 2};" for k in range(6)
        ),
        MISUSE, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLAINTS)
def test_complaints(name):
    body, how, codes = COMPLAINTS[name]
    assert set(run(body, **how).seen.codes) == codes


TOLD = {
    "relaxed arrivals at a cluster barrier": (
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" + SYNC, {"block": 1},
        [
            ("released", LABEL, ("cluster_barrier", 0, 0), "relaxed"),
            ("acquired", LABEL, ("cluster_barrier", 0, 0), "cluster"),
            ("released", LABEL, ("cluster_barrier", 0, 1), "cluster"),
            ("acquired", LABEL, ("cluster_barrier", 0, 1), "cluster"),
        ],
    ),
    "phases of an mbarrier": (
        f"""{init(1)} @!%p0 ret; {ARRIVE} mbarrier.arrive.relaxed.cluster.shared.b64 _, [%r1];
mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [%r1], 1;""",
        {"block": 1, "shared": 8},
        [
            ("released", LABEL, ("mbarrier", 0, 0x400, 0), "cta"),
            ("released", LABEL, ("mbarrier", 0, 0x400, 1), "relaxed"),
            ("acquired", LABEL, ("mbarrier", 0, 0x400, 0), "cluster"),
            ("acquired", LABEL, ("mbarrier", 0, 0x400, 1), "cluster"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_arrivals_release_and_waits_acquire_tokens(name):
    body, how, expected = TOLD[name]
    told = run(body, **how).seen.sync
    assert [one for one in told if one[2][0] != "barrier"] == expected


def test_an_arrival_at_a_named_barrier_releases_what_its_waits_acquire():
    body = f"{TID} setp.lt.u32 %p1, %r0, 32; @%p1 bra a; bar.sync 2, 64; ret; a: bar.arrive 2, 64;"
    told = {(what, label[-6:], token) for what, label, token, _ in run(body, block=64).seen.sync}
    agents = (("released", "warp 0"), ("released", "warp 1"), ("acquired", "warp 1"))
    assert told == {(what, warp, ("barrier", 0, 2, 0)) for what, warp in agents}


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
    expected = (100 * np.arange(8)[:, None] + LANES).ravel()
    policy = Policy(seed=seed)
    assert_leaves(body, {"y": expected}, [], block=64, shared=512, y=256, policy=policy)


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
        how = {"grid": 3, "cluster": 3, "shared": 512, "y": 32, "policy": Policy(seed=seed)}
        assert_leaves(body, {"y": 3000 + 2 * LANES}, **how)


def test_a_wait_that_missed_two_phases_is_told_of():
    """One warp completes phases alone; the other waits for phase 0, then for 1 when 3 is done."""
    body = f"""{init(1)} setp.ge.u32 %p1, %r0, 32; @%p1 bra waits;
setp.ne.u32 %p2, %r0, 0; @%p2 ret; {ARRIVE}
bar.sync 1, 64; {ARRIVE * 3} bar.sync 2, 64; ret;
waits: {wait(0, 0)} bar.sync 1, 64; bar.sync 2, 64; {wait(1, 1)}"""
    assert run(body, block=64, shared=8).seen.missed == [(0, 3)]


def test_the_object_is_reported_as_written_by_its_init():
    (access,) = run(init(1), block=1, shared=8).seen.accesses
    assert (access.starts.tolist(), access.size, access.kind.value) == ([0x400], 8, "write")
