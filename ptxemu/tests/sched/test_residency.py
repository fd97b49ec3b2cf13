"""How many CTAs are resident at once: as many as the SMs have room for, if they are needed."""

from dataclasses import replace

import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import DeadlockError
from ptxemu.machine.device import SM_90A, SM_100A
from ptxemu.machine.occupancy import ctas_per_sm
from ptxemu.sched.policy import Policy

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
