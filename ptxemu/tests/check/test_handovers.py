"""Handovers by mbarriers and barriers: phases, scopes, relaxed waits, warps that skip one."""

import pytest
from tests.check.checked_run import POLICIES, Program, check, judge
from tests.kernel_run import TID

# Phases of mbarriers that may be overrun are found on every schedule.

HEAD = (
    TID
    + """
shr.u32 %r9, %r0, 5; and.b32 %r8, %r0, 31; mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY; mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1;
READY: bar.sync 0; setp.ne.u32 %p1, %r8, 0; setp.eq.u32 %p2, %r9, 0; @%p2 bra PRODUCER;
mov.u32 %r2, 0;
"""
)
WAIT = """W{0}: mbarrier.try_wait.parity.shared.b64 %p9, [%r1{1}], {2};
@!%p9 bra W{0};
"""
LOOP = """
add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra {0};
"""
CONSUMER = (
    "C: and.b32 %r3, %r2, 1;\n"
    + WAIT.format(1, "", "%r3")
    + "@%p1 bra C2;\nRELEASE\nC2:\n"
    + LOOP.format("C")
    + "bra END;\n"
)
PRODUCER = (
    "PRODUCER: mov.u32 %r2, 0;\nP: and.b32 %r3, %r2, 1;\nxor.b32 %r3, %r3, 1;\nACQUIRE\n"
    + "@%p1 bra P2;\nmbarrier.arrive.shared.b64 _, [%r1];\nP2:\n"
    + LOOP.format("P")
    + "END:\n"
)
RELEASE = "mbarrier.arrive.shared.b64 _, [%r1+8];"


def ring(*, waits: bool) -> str:
    """Warp 0 fills, warp 1 empties, four times; `waits`: for the emptied buffer."""
    acquire = WAIT.format(2, "+8", "%r3") if waits else ""
    return (HEAD + CONSUMER + PRODUCER).replace("RELEASE", RELEASE).replace("ACQUIRE", acquire)


WORKER = """
W{0}: mov.u32 %r2, 0; C{0}: and.b32 %r3, %r2, 1;
{wait}
@%p1 bra R{0}; mbarrier.arrive{order}.shared.b64 _, [%r1+8];
R{0}:
add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra C{0}; bra END;
"""


def shared_ring(*, idle_waits: bool, order: str = "") -> str:
    """Warp 0 fills, warps 1 and 2 empty together, four times; warp 2, which has nothing to do, may
    go without waiting for the filled buffer."""

    def wait(label: int, offset: str) -> str:
        return WAIT.format(label, offset, "%r3").replace("parity.shared", f"parity{order}.shared")

    parts = [
        HEAD.replace("[%r1+8], 1;", "[%r1+8], 2;"),
        "setp.eq.u32 %p4, %r9, 2;\n@%p4 bra W20;\n",
        WORKER.format(10, wait=wait(1, ""), order=order),
        WORKER.format(20, wait=wait(2, "") if idle_waits else "", order=order),
        PRODUCER.replace("ACQUIRE", wait(3, "+8")).replace(
            "arrive.shared", f"arrive{order}.shared"
        ),
    ]
    return "".join(parts)


# Arrivals at another CTA's mbarrier: their scope, and CTAs that have exited.

REMOTE = (
    TID
    + """
mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; mov.u32 %r9, %cluster_ctarank; @%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
setp.eq.u32 %p1, %r9, 0; @%p1 bra OWNER; @%p0 bra DONE; mapa.shared::cluster.u32 %r2, %r1, 0;
mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2]; bra DONE;
OWNER:
{wait}
DONE:
{end}
"""
)
WAIT_REMOTELY = """
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0;
@!%p2 bra W;
"""
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


STORED = "mov.u32 %r3, 5;\nst.shared::cluster.b32 [%r2+64], %r3;\n"
HANDED_OVER = REMOTE.replace("mbarrier.arrive{scope}", STORED + "mbarrier.arrive{scope}")
COPIED = (
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r2], 4;\n"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2+64], %r3, [%r2];"
)


RING = (
    TID
    + """
mov.u32 %r1, smem; add.u32 %r2, %r1, 128; setp.ne.u32 %p0, %r0, 0; setp.lt.u32 %p5, %r0, 32;
@%p0 bra READY; mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 32;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @!%p5 bra CONSUMER; @%p0 bra END;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x], 128, [%r1];
EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+8], 0; @!%p2 bra EMPTY;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x+128], 128, [%r1];
bra END;
CONSUMER:
FULL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra FULL;
and.b32 %r0, %r0, 31; shl.b32 %r5, %r0, 2; add.u32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6];
{before}
mbarrier.arrive{arrive}.cta.shared::cta.b64 _, [%r1+8];
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 1; @!%p2 bra AGAIN;
ld.shared.u32 %r8, [%r6];
END:
"""
)


# Relaxed waits order nothing until a fence.

HANDOVER = """
    mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], 32;
    READY: bar.sync 0; setp.lt.u32 %p2, %r0, 32; @%p2 bra WAIT; st.shared.u32 [%r1+64], %r0;
    mbarrier.arrive.shared.b64 _, [%r1]; bra END;
    WAIT: mbarrier.try_wait.parity.{order}.cta.shared.b64 %p1, [%r1], 0; @!%p1 bra WAIT;
    {fence}
    ld.shared.u32 %r2, [%r1+64];
    END:
"""


CTAS = {"grid": 2, "cluster": 2, "how": {"shared": 1024}}
NARROW = WAIT_REMOTELY.replace(".acquire.cluster", ".acquire.cta")
READ_BEHIND = "ld.shared.b32 %r4, [%r1+64];"
BY_COPY = REMOTE.replace("mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2];", COPIED).replace(
    "mapa.shared", "mov.u32 %r3, 5;\nmapa.shared"
)
EARLY = "error mbarrier-early-arrival"
HANDOVERS = {
    "a ring whose producer waits": Program(ring(waits=True), "", {"block": 64}),
    # Where the wait came too late in the run, the consumer hangs instead.
    "a ring whose producer does not": Program(
        ring(waits=False), "error mbarrier-overrun | deadlock", {"block": 64}
    ),
    # That the other consumer has arrived is known by way of the producer, not of any memory. An
    # early arrival counts for the phase before; where it did in the run, that ends badly.
    **{
        f"two consumers, of whom one{' waits' if waits else ' does not'}, {order or 'ordered'}":
        Program(shared_ring(idle_waits=waits, order=order), found, {"block": 96})
        for order, waits, found in (
            ("", True, ""), ("", False, f"{EARLY}, error mbarrier-overrun | deadlock"),
            (".relaxed.cta", True, ""), (".relaxed.cta", False, f"{EARLY} | deadlock"),
        )
    },
    **{
        f"a remote arrival {scope}": Program(
            REMOTE.format(scope=scope, wait=WAIT_REMOTELY, end=""), found, CTAS
        )
        for scope, found in (
            (".release.cluster", ""), (".release.cta", "isa remote-mbarrier-scope"),
            ("", "note remote-mbarrier-scope"),
        )
    },
    **{
        f"a remote arrival at a peer that may have exited, {name}": Program(
            REMOTE.format(scope=".release.cluster", wait=waits, end=end), found, CTAS
        )
        for name, waits, end, found in (("not waited for", "", "", "error signal-after-exit"),
                                        ("a barrier", "", CLUSTER, ""),
                                        ("waited for", WAIT_REMOTELY, "", ""))
    },
    **{
        f"data of another CTA, the wait is {wait or 'of no scope'}": Program(
            HANDED_OVER.format(scope=".release.cluster", end=CLUSTER,
                               wait=WAIT_REMOTELY.replace(".acquire.cluster", wait) + READ_BEHIND),
            found, CTAS,
        )
        for wait, found in ((".acquire.cta", "isa narrow-wait-race"), (".acquire.cluster", ""),
                            ("", ""))
    },
    "bytes that are delivered into a CTA need no wider wait": Program(
        BY_COPY.format(wait=NARROW + READ_BEHIND, end=""), "", CTAS
    ),
    # A consumer hands a slot back, and the producer's next bulk copy overwrites it.
    **{
        f"a slot is handed back by mbarrier.arrive{arrive}, {before or 'no fence'}": Program(
            RING.format(arrive=arrive, before=before), found, {"block": 64, "x": 64}
        )
        for arrive, before, found in (
            (".release", "", "warning missing-proxy-fence-after-read"),
            (".relaxed", "", "error missing-wait, error race"),
            (".relaxed", "fence.acq_rel.cta;", "warning missing-proxy-fence-after-read"),
        )
    },
    **{
        f"a wait that is {order}, {fence or 'no fence'}": Program(
            TID + HANDOVER.format(order=order, fence=fence), found, {"block": 64}
        )
        for order, fence, found in (("acquire", "", ""), ("relaxed", "", "error race"),
                                    ("relaxed", "fence.acq_rel.cta;", ""))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HANDOVERS)
def test_handover(name: str) -> None:
    body, found, how = HANDOVERS[name]
    judge(Program(body, found, {"how": {"shared": 1024}, **how}))


# A barrier that some warps skip is named in the finding.

EXCHANGE = (
    TID
    + """
mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2; st.shared.b32 [%r2], %r0;
setp.ge.u32 %p0, %r0, {limit}; @%p0 bra AFTER; bar.sync 0{count};
AFTER: xor.b32 %r3, %r2, {distance}; ld.shared.b32 %r4, [%r3];
"""
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_if_tid_below_64_sync_threads(policy) -> None:
    body = EXCHANGE.format(limit=64, count=", 64", distance=256)
    races = [
        f for f in check(body, block=128, how={"shared": 1024}, policy=policy) if f.level == "error"
    ]
    assert {f.code for f in races} == {"race"}
    assert all("the barrier at PTX line" in f.message for f in races)
    assert "only warps 0, 1 of the CTA execute it, and warps 2, 3 do not" in races[0].message


def test_a_whole_barrier_is_not_named() -> None:
    body = EXCHANGE.format(limit=128, count="", distance=256).replace("bar.sync 0;", "")
    (race,) = (f for f in check(body, block=128, how={"shared": 1024}) if f.level == "error")
    assert "the barrier at" not in race.message
