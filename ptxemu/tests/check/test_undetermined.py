"""What the order of relaxed accesses decides: old values read as data, sums of floats."""

import pytest
from tests.check.checked_run import POLICIES, check
from tests.kernel_run import TID, store

from ptxemu.cli.report import finding_lines, is_failure

ADD = "red.relaxed.gpu.global.add.u32 [%rd_x], 1;\n"
LOAD = "ld.relaxed.gpu.global.b32 %r6, [%rd_x];\n"
CTA = "mov.u32 %r9, %ctaid.x;\nsetp.eq.u32 %p9, %r9, 0;\n"


def verdicts(body: str, *, grid: int = 2, block: int = 32) -> set[tuple[tuple[str, str], ...]]:
    """Codes and levels on all schedules: one, unless the verdict depends on the schedule."""
    return {
        tuple(
            sorted(
                {
                    (f.code, f.level)
                    for f in check(
                        TID + CTA + body, grid=grid, block=block, policy=policy, x=32, o=64
                    )
                }
            )
        )
        for policy in POLICIES
    }


STALE = {(("stale-read", "note"),)}
CLEAN: set[tuple[tuple[str, str], ...]] = {()}
ADD_AND_LEAVE = f"@!%p9 bra READ;\n{ADD}bra END;\nREAD:\n"
KEEP = store("o", "%r6")
SEVEN = "mov.u32 %r8, 7;\n" + store("o", "%r8")

READS = {
    "data": (LOAD + KEEP, STALE),
    "data behind arithmetic": (LOAD + "add.u32 %r6, %r6, 1;\n" + KEEP, STALE),
    "an address": (
        LOAD
        + "and.b32 %r6, %r6, 4;\ncvt.u64.u32 %rd1, %r6;\nadd.s64 %rd1, %rd1, %rd_o;\n"
        + "ld.global.b32 %r7, [%rd1];\n",
        STALE,
    ),
    "data from another lane": (
        LOAD + "shfl.sync.idx.b32 %r6, %r6, 0, 31, 0xffffffff;\n" + KEEP,
        STALE,
    ),
    "a flag, asked once": (LOAD + "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra END;\n" + SEVEN, CLEAN),
    "a bit of a flag": (
        LOAD + "and.b32 %r6, %r6, 1;\nsetp.eq.u32 %p1, %r6, 0;\n@%p1 bra END;\n" + SEVEN,
        CLEAN,
    ),
    "a value that a loop waits for": (
        f"SPIN: {LOAD}setp.eq.u32 %p1, %r6, 0;\n@%p1 bra SPIN;\n{KEEP}",
        CLEAN,
    ),
    "the same with its exit in the middle": (
        f"SPIN: {LOAD}setp.ne.u32 %p1, %r6, 0;\n@%p1 bra DONE;\nnanosleep.u32 100;\nbra SPIN;\n"
        f"DONE: {KEEP}",
        CLEAN,
    ),
    "in a loop of another condition": (
        f"mov.u32 %r7, 3;\nSUM: {LOAD}add.u32 %r8, %r8, %r6;\nsub.u32 %r7, %r7, 1;\n"
        f"setp.ne.u32 %p1, %r7, 0;\n@%p1 bra SUM;\n{store('o', '%r8')}",
        STALE,
    ),
    "behind a fence.sc": ("fence.sc.gpu;\n" + LOAD + KEEP, CLEAN),
    "volatile": (LOAD.replace("relaxed.gpu", "volatile") + KEEP, STALE),
}


@pytest.mark.parametrize("name", READS)
def test_old_values_are_found_where_they_are_data(name: str) -> None:
    body, expected = READS[name]
    assert verdicts(ADD_AND_LEAVE + body + "END:\n") == expected


def test_what_a_barrier_orders_is_not_old() -> None:
    body = f"setp.lt.u32 %p1, %r0, 32;\n@%p1 {ADD}bar.sync 0;\n{LOAD}{KEEP}"
    assert verdicts(body, grid=1, block=64) == CLEAN


FLOATS = {
    "red.global.add.f32 [%rd_x], %f1;": 1,
    "atom.global.add.f32 %f2, [%rd_x], %f1;": 1,
    "red.global.add.noftz.bf16x2 [%rd_x], %r1;": 1,
    "red.global.v2.f32.add [%rd_x], {%f1, %f1};": 2,
    "red.global.add.f64 [%rd_x], %fd1;": 1,
}
ONE_LANE = "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra END;\nmov.f32 %f1, 0f00000000;\nmov.u32 %r1, 0;\n"
NOTE = {(("unordered-float-additions", "note"),)}


@pytest.mark.parametrize("instruction", FLOATS)
def test_unordered_additions_are_noted_whatever_is_added(instruction: str) -> None:
    """Zeros are: a verdict that the values decide would say little of other values."""
    assert verdicts(ONE_LANE + instruction + "\nEND:\n") == NOTE


def test_lanes_that_add_to_one_number() -> None:
    add = "mov.f32 %f1, 0f3F800000;\nred.global.add.f32 [%rd1], %f1;\n"
    own = "mul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd1, %rd1, %rd_x;\n"
    shared = "and.b32 %r1, %r0, 1;\n" + own.replace("%r0", "%r1")
    assert verdicts(own + add, grid=1) == CLEAN
    assert verdicts(shared + add, grid=1) == NOTE


def test_an_old_read_of_its_own_bytes_stays_silent() -> None:
    """A warp's own additions are in its order, and what it reads has them."""
    assert verdicts(f"@%p9 bra END;\n{ADD}{LOAD}{KEEP}END:\n") == CLEAN


def test_extremes_and_exchanges_have_no_order_of_sums() -> None:
    maximum = "red.global.max.s32 [%rd_x], %r1;\n"
    exchange = "atom.global.exch.b32 %r2, [%rd_x+4], %r1;\n"
    assert verdicts(ONE_LANE + maximum + exchange + "END:\n") == CLEAN


def test_fail_on_takes_codes() -> None:
    body = TID + ONE_LANE + "red.global.add.f32 [%rd_x], %f1;\nEND:\n"
    found = check(body, grid=2, x=32)
    code = "unordered-float-additions"
    chosen = ["isa", "warning", f"isa,{code}", f"{code},never", code]
    assert [is_failure(found, on) for on in chosen] == [False, False, True, True, True]
    assert finding_lines(found, with_notes=False) == []
    (line,) = finding_lines(found, with_notes=False, codes=[code])
    assert line.startswith(f"note: {code}: ")
    for wrong in ("isa,unordered-additions", "isa,warning"):
        with pytest.raises(ValueError, match=r"none of|only one"):
            is_failure(found, wrong)


def test_a_program_that_was_wrong_on_no_schedule_is_found_by_its_order() -> None:
    """The counter is complete in every run, as ptxemu's relaxed additions are never late."""
    body = f"@!%p9 bra READ;\n{ADD}st.relaxed.gpu.global.b32 [%rd_x+4], 1;\nbra END;\nREAD:\n"
    body += "SPIN: ld.acquire.gpu.global.b32 %r5, [%rd_x+4];\nsetp.eq.u32 %p1, %r5, 0;\n"
    body += f"@%p1 bra SPIN;\n{LOAD}{KEEP}END:\n"
    assert verdicts(body) == {(("stale-read", "note"), ("weak-order", "note"))}
    assert verdicts(body.replace("st.relaxed", "st.release")) == CLEAN
