"""Phases of mbarriers that may be overrun are found on every schedule."""

import pytest
from tests.check.checked_run import POLICIES, check, errors, on_all_schedules
from tests.kernel_run import TID

from ptxemu.errors import DeadlockError, ExecutionError
from ptxemu.sched.policy import Policy

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
