"""Handovers by mbarriers and barriers: phases, scopes, relaxed waits, warps that skip one."""

import pytest
from tests.check.checked_run import POLICIES, check, errors, on_all_schedules
from tests.kernel_run import TID

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

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


def test_a_ring_whose_producer_waits_is_sound() -> None:
    how = {"shared": 1024}
    assert on_all_schedules(ring(waits=True), block=64, how=how) == {()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_without_the_wait_the_full_barrier_is_overrun_on_every_schedule(policy: Policy) -> None:
    """Where the wait came too late in the run, the consumer hangs instead."""
    try:
        found = errors(check(ring(waits=False), block=64, how={"shared": 1024}, policy=policy))
    except DeadlockError:
        return
    assert found == {"mbarrier-overrun"}


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


@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_arrivals_behind_a_wait_are_in_time_be_they_relaxed(order: str) -> None:
    """That the other consumer has arrived is known by way of the producer, not of any memory."""
    program = shared_ring(idle_waits=True, order=order)
    assert on_all_schedules(program, block=96, how={"shared": 1024}) == {()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_an_arrival_without_the_wait_may_be_early(order: str, policy: Policy) -> None:
    """It counts for the phase before then; where it did in the run, that ends badly."""
    program = shared_ring(idle_waits=False, order=order)
    try:
        found = errors(check(program, block=96, how={"shared": 1024}, policy=policy))
    except (DeadlockError, ExecutionError):
        return
    assert "mbarrier-early-arrival" in found


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


def found(policy, **parts: str) -> set[tuple[str, str, str]]:
    """(code, level, kind) of a cluster of two CTAs."""
    findings = check(REMOTE.format(**parts), grid=2, cluster=2, policy=policy, how={"shared": 1024})
    return {(f.code, f.level, f.kind) for f in findings}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_scope_of_a_remote_arrival(policy) -> None:
    def scope(text: str) -> set[tuple[str, str, str]]:
        return found(policy, scope=text, wait=WAIT_REMOTELY, end="")

    assert scope(".release.cluster") == set()
    assert scope(".release.cta") == {("remote-mbarrier-scope", "error", "isa")}
    assert scope("") == {("remote-mbarrier-scope", "note", "")}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_arrival_at_a_peer_that_may_have_exited(policy) -> None:
    def ending(wait: str, end: str) -> set[tuple[str, str, str]]:
        return found(policy, scope=".release.cluster", wait=wait, end=end)

    assert ending("", "") == {("signal-after-exit", "error", "hardware")}
    assert ending("", CLUSTER) == set()
    assert ending(WAIT_REMOTELY, "") == set()


HANDED_OVER = REMOTE.replace(
    "mbarrier.arrive{scope}", "mov.u32 %r3, 5;\n{data}\nmbarrier.arrive{scope}"
)
BY_STORE = "st.shared::cluster.b32 [%r2+64], %r3;"
BY_COPY = (
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r2], 4;\n"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2+64], %r3, [%r2];"
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (".acquire.cta", {("narrow-wait-race", "error", "isa")}),
        (".acquire.cluster", set()),
        ("", set()),
    ],
)
def test_a_wait_of_cta_scope_does_not_acquire_what_another_cta_stored(
    policy, wait: str, expected: set[tuple[str, str, str]]
) -> None:
    text = WAIT_REMOTELY.replace(".acquire.cluster", wait) + "ld.shared.b32 %r4, [%r1+64];"
    body = HANDED_OVER.replace("{data}", BY_STORE)
    result = check(
        body.format(scope=".release.cluster", wait=text, end=CLUSTER),
        grid=2,
        cluster=2,
        policy=policy,
        how={"shared": 1024},
    )
    assert {(f.code, f.level, f.kind) for f in result} == expected


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_bytes_that_are_delivered_into_a_cta_need_no_wider_wait(policy) -> None:
    text = (
        WAIT_REMOTELY.replace(".acquire.cluster", ".acquire.cta") + "ld.shared.b32 %r4, [%r1+64];"
    )
    body = REMOTE.replace("mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2];", BY_COPY)
    body = body.replace("mapa.shared", "mov.u32 %r3, 5;\nmapa.shared")
    result = check(
        body.format(wait=text, end=""), grid=2, cluster=2, policy=policy, how={"shared": 1024}
    )
    assert result == []


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


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("arrive", "before", "expected"),
    [
        (".release", "", set()),
        (".relaxed", "", {"race", "missing-wait"}),
        (".relaxed", "fence.acq_rel.cta;", set()),
    ],
)
def test_a_relaxed_arrival_frees_no_buffer_for_the_next_copy(
    policy, arrive: str, before: str, expected: set[str]
) -> None:
    """A consumer hands a slot back, and the producer's next bulk copy overwrites it."""
    body = RING.format(arrive=arrive, before=before)
    found = check(body, block=64, policy=policy, how={"shared": 1024}, x=64)
    assert {f.code for f in found if f.level == "error"} == expected


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


def codes(body):
    found = check(TID + body, block=64, how={"shared": 128})
    return {f.code for f in found if f.level != "note"}


@pytest.mark.parametrize(
    ("order", "fence", "found"),
    [("acquire", "", set()), ("relaxed", "", {"race"}), ("relaxed", "fence.acq_rel.cta;", set())],
)
def test_a_relaxed_wait_acquires_with_the_next_fence(order, fence, found):
    assert codes(HANDOVER.format(order=order, fence=fence)) == found


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
