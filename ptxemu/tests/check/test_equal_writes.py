"""Work that several warps do alike, with one result: a note. With different results: an error."""

from typing import Any

import numpy as np
import pytest
from tests.check.checked_run import check
from tests.check.test_hazard_programs import ELECT, POLICIES, wait

from ptxemu.check import Finding
from ptxemu.sched.policy import Policy

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["eager", "late", "seed1", "seed2"])


TID_AND_PLACE = "mov.u32 %r0, %tid.x;\nmov.u32 %r2, smem;\n"
"""%r0 = the thread's number, %r2 = shared memory."""


def findings(body: str, policy: Policy, **arrays: Any) -> list[Finding]:
    """All findings of a run of two warps, notes too."""
    return check(body, block=64, policy=policy, how={"shared": 4096}, **arrays)


def codes(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.code, finding.level) for finding in found}


BULK_STORES = (
    ELECT
    + """
st.shared.b32 [%r2], 7; st.shared.b32 [%r2+4], 7; st.shared.b32 [%r2+8], 7;
st.shared.b32 [%r2+12], 7;
OTHER_VALUE
fence.proxy.async; bar.sync 0; elect.sync _|%p3, 0xffffffff; @!%p3 bra END;
SOURCE
cp.async.bulk.global.shared::cta.bulk_group [%rd_out], [%r6], 16; cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
)


@every_policy
def test_all_warps_may_bulk_store_the_same_bytes_to_the_same_place(policy: Policy) -> None:
    program = BULK_STORES.replace("OTHER_VALUE", "").replace("SOURCE", "mov.u32 %r6, %r2;")
    assert codes(findings(program, policy, out=4)) == {("same-value-race", "note")}


@every_policy
def test_warps_that_bulk_store_different_bytes_to_the_same_place_race(policy: Policy) -> None:
    other = "\n".join(f"st.shared.b32 [%r2+{at}], 9;" for at in (16, 20, 24, 28))
    program = BULK_STORES.replace("OTHER_VALUE", other).replace(
        "SOURCE", "shl.b32 %r6, %r9, 4;\nadd.u32 %r6, %r6, %r2;"
    )
    found = [f for f in findings(program, policy, out=4) if f.level == "error"]
    assert [f.code for f in found] in (["race"], ["missing-wait"])


INITS = (
    ELECT
    + """
WHO mbarrier.init.shared::cta.b64 [%r1], COUNT;
BEFORE
fence.mbarrier_init.release.cluster; bar.sync 0; @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];
"""
    + wait()
)


@every_policy
def test_all_lanes_of_a_warp_may_initialise_an_mbarrier(policy: Policy) -> None:
    program = INITS.replace("WHO", "@%p1").replace("COUNT", "1").replace("BEFORE", "")
    assert findings(program, policy) == []


@every_policy
def test_all_warps_may_initialise_an_mbarrier_alike(policy: Policy) -> None:
    program = INITS.replace("WHO", "").replace("COUNT", "1").replace("BEFORE", "")
    assert codes(findings(program, policy)) == {
        ("same-value-race", "note"),
        ("mbarrier-initialised-twice", "note"),
    }


@every_policy
def test_warps_that_initialise_an_mbarrier_with_different_counts_race(policy: Policy) -> None:
    program = (
        INITS.replace("WHO", "add.u32 %r20, %r9, 1;\n")
        .replace("COUNT", "%r20")
        .replace("BEFORE", "bar.sync 0;\n@%p0 mbarrier.init.shared::cta.b64 [%r1], 1;")
    )
    assert ("race", "error") in codes(findings(program, policy))


@every_policy
def test_an_mbarrier_is_not_initialised_again_beside_its_use(policy: Policy) -> None:
    """Warp 0 arrives and waits as soon as it has initialised the object, warp 1 does so too."""
    used = "mbarrier.arrive.shared::cta.b64 _, [%r1];\n" + wait(label="OWN")
    program = (
        INITS.replace("WHO", "")
        .replace("COUNT", "1")
        .replace("BEFORE", "@%p2 bra DONE;\nsetp.ne.u32 %p5, %r0, 0;\n@%p5 bra DONE;\n" + used)
        .replace("fence.mbarrier_init", "DONE: fence.mbarrier_init")
        .replace("@%p0 mbarrier.arrive", "@%p8 mbarrier.arrive")
        .replace(wait(), "")
    )
    assert ("race", "error") in codes(findings(program, policy))


@every_policy
@pytest.mark.parametrize(
    ("value", "expected"), [("%r5", {("same-value-race", "note")}), ("%r0", {("race", "error")})]
)
def test_overlapping_rows_may_be_stored_twice_where_they_are_equal(
    policy: Policy, value: str, expected: set[tuple[str, str]]
) -> None:
    """Warp 1 stores rows 16 to 47, half of them warp 0's: the row's value, or the thread's."""
    program = (
        ELECT
        + "mul.lo.u32 %r5, %r9, 16; sub.u32 %r5, %r0, %r5;\nmul.wide.u32 %rd0, %r5, 4;\n"
        + f"add.u64 %rd0, %rd_out, %rd0; add.u32 %r6, {value}, 1; st.global.u32 [%rd0], %r6;"
    )
    assert codes(findings(program, policy, out=64)) == expected


SAME = "mov.u32 %r20, 7;\n{}\nst.shared.b32 [%r2], {};\n"
RACE, NOTE = ("race", "error"), ("same-value-race", "note")


@every_policy
@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ("", "7", NOTE),
        ("", "%r20", NOTE),
        ("add.u32 %r20, %r20, 5;", "%r20", NOTE),
        ("cvt.u32.u64 %r20, %rd_data;", "%r20", NOTE),
        ("mov.u32 %r20, %ntid.x;", "%r20", NOTE),
        ("ld.global.b32 %r20, [%rd_data];", "%r20", RACE),
        ("ld.global.b32 %r21, [%rd_data];\nadd.u32 %r20, %r21, 5;", "%r20", RACE),
        ("atom.global.or.b32 %r20, [%rd_data], 0;", "%r20", RACE),
        ("mov.u32 %r20, %smid;", "%r20", RACE),
        ("ld.global.b32 %r21, [%rd_data];\nsetp.eq.u32 %p7, %r21, 0;\n@%p7 mov.u32 %r20, 8;",
         "%r20", RACE),
        ("setp.eq.u32 %p7, %r0, %r0;\n@%p7 mov.u32 %r20, 8;", "%r20", NOTE),
    ],
)  # fmt: skip
def test_equal_values_are_harmless_only_where_no_data_decide_them(
    policy: Policy, before: str, value: str, expected: tuple[str, str]
) -> None:
    """Every thread of two warps stores one value in one place."""
    found = findings(TID_AND_PLACE + SAME.format(before, value), policy, data=4)
    assert codes(found) == {expected}
    assert ("other data need not be" in found[0].message) == (expected is RACE)


@every_policy
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "varied"])
def test_constant_input_does_not_hide_a_missing_barrier(policy: Policy, constant: bool) -> None:
    """Each warp stages its block of a tile, reads the other's, and stages the next one."""
    stage = "ld.global.b32 %r20, [%rd8{}];\nst.shared.b32 [%r21], %r20;\n"
    other = "xor.b32 %r22, %r24, 128;\nadd.u32 %r22, %r22, %r2;\nld.shared.b32 %r23, [%r22];\n"
    program = (
        TID_AND_PLACE
        + "shl.b32 %r24, %r0, 2;\nadd.u32 %r21, %r24, %r2;\ncvt.u64.u32 %rd7, %r24;\n"
        + "add.u64 %rd8, %rd_data, %rd7;\n"
        + stage.format("")
        + "bar.sync 0;\n"
        + other
        + stage.format("+256")
    )
    data = np.ones(128, np.uint32) if constant else np.arange(128, dtype=np.uint32)
    assert codes(findings(program, policy, data=data)) == {RACE}


@every_policy
def test_a_store_of_zero_to_a_zeroed_counter_may_lose_what_others_add(policy: Policy) -> None:
    program = (
        TID_AND_PLACE
        + "setp.ne.u32 %p6, %r0, 0;\n@%p6 bra ADD;\nst.global.b32 [%rd_data], 0;\nADD:\n"
        + "red.global.add.u32 [%rd_data], 1;\n"
    )
    assert ("lost-update", "error") in codes(findings(program, policy, data=4))
