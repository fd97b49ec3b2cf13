"""A barrier that some warps skip is named in the finding."""

import pytest
from tests.check.checked_run import POLICIES, check
from tests.kernel_run import TID

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
