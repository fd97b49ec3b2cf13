"""Lanes of a warp that read what only another lane of it has acquired: bar.warp.sync is missing."""

import pytest
from tests.check.checked_run import POLICIES, check, errors
from tests.kernel_run import TID

from ptxemu.sched.policy import Policy

ACQUIRE, RELAXED = "ld.acquire.gpu.global.b32", "ld.relaxed.gpu.global.b32"
SYNC = "bar.warp.sync 0xffffffff;\n"
READ = "ld.global.b32 %r6, [%rd_data];\n"
OF_LANE_0 = "setp.eq.u32 %p0, %r0, 0;\n"


def by_flag(behind: str, *, load: str = ACQUIRE, waits: str = "@!%p0 bra DONE;\n") -> str:
    """CTA 0 writes and raises a flag; of CTA 1 lane 0, or who `waits`, sees it, then `behind`."""
    return (
        TID
        + OF_LANE_0
        + "mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %r1, 1;\n@%p1 bra SECOND;\n"
        + "@!%p0 bra END;\nst.global.b32 [%rd_data], 7;\n"
        + "st.release.gpu.global.b32 [%rd_flag], 1;\nbra END;\nSECOND:\n"
        + waits
        + f"SPIN: {load} %r5, [%rd_flag];\nsetp.eq.u32 %p3, %r5, 0;\n@%p3 bra SPIN;\n"
        + "DONE:\n"
        + behind
        + "END:\n"
    )


def found(body: str, policy: Policy | None = None) -> set[str]:
    return errors(check(body, grid=2, policy=policy, data=1, flag=1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("load", [ACQUIRE, RELAXED])
def test_others_read_what_lane_0_acquired(load: str, policy: Policy) -> None:
    fence = "" if load == ACQUIRE else "@%p0 fence.acq_rel.gpu;\n"
    assert found(by_flag(fence + READ, load=load), policy) == {"race"}
    assert found(by_flag(fence + SYNC + READ, load=load), policy) == set()


@pytest.mark.parametrize(
    "behind",
    [
        "@%p0 " + READ,
        "shfl.sync.idx.b32 %r5, %r5, 0, 31, 0xffffffff;\n" + READ,
        "bar.sync 0;\n" + READ,
    ],
    ids=["lane 0 reads", "a shuffle, which makes lanes wait but orders no memory", "barrier"],
)
def test_what_is_sound_or_doubtful_is_not_reported(behind: str) -> None:
    assert found(by_flag(behind)) == set()


def test_the_finding_names_what_is_missing() -> None:
    (finding,) = check(by_flag(READ), grid=2, data=1, flag=1)
    assert "only other lanes of the warp have acquired it: needs bar.warp.sync" in finding.message


def test_lanes_that_all_acquire_need_no_sync() -> None:
    """Each lane spins for itself, first the even ones."""
    odd = "and.b32 %r2, %r0, 1;\nsetp.eq.u32 %p2, %r2, 1;\n"
    again = f"AGAIN: @%p2 {ACQUIRE} %r5, [%rd_flag];\nsetp.eq.u32 %p3, %r5, 0;\n@%p3 bra AGAIN;\n"
    assert found(by_flag(odd + again + READ, waits=odd + "@%p2 bra DONE;\n")) == set()
    assert found(by_flag(READ, waits=odd + "@%p2 bra DONE;\n")) == {"race"}


@pytest.mark.parametrize("sync", [SYNC, ""])
def test_others_read_behind_lane_0s_wait_for_an_mbarrier(sync: str) -> None:
    """Warp 1 writes shared memory and arrives; of warp 0 lane 0 waits, and all lanes read."""
    body = (
        TID
        + OF_LANE_0
        + "mov.u32 %r1, smem;\n@%p0 mbarrier.init.shared.b64 [%r1], 32;\nbar.sync 0;\n"
        + "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra FIRST;\n"
        + "st.shared.b32 [%r1+16], 7;\nmbarrier.arrive.shared.b64 %rd0, [%r1];\nbra END;\nFIRST:\n"
        + "@!%p0 bra DONE;\n"
        + "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;\n@!%p2 bra WAIT;\nDONE:\n"
        + sync
        + "ld.shared.b32 %r6, [%r1+16];\nEND:\n"
    )
    result = errors(check(body, block=64, how={"shared": 64}))
    assert result == (set() if sync else {"race"})
