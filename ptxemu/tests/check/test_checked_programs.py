"""Small programs and what is found in them, the same on every schedule."""

import numpy as np
import pytest
from tests.check.checked_run import Program, check, judge, pair
from tests.check.test_hazard_programs import ELECT, wait
from tests.kernel_run import TID

from ptxemu.check.lane_races import MOST_NOTED
from ptxemu.check.lanes import Meeting, is_ordered
from ptxemu.sched.policy import Policy

# Lanes of a warp are ordered by what makes them wait for each other, and by nothing else.

OWN = f"""{TID} mov.u32 %r2, smem; shl.b32 %r1, %r0, 2; add.u32 %r3, %r2, %r1;
and.b32 %r9, %r0, 31; setp.eq.u32 %p0, %r9, 0;
"""
"""%r3: address of the lane's own word; %r9: the lane; %p0: lane 0."""
WRITE = "st.shared.b32 [%r3], %r0;\n"
OPPOSITE = "xor.b32 %r4, %r1, {0}; add.u32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];\n"
KEEP = "mul.wide.u32 %rd0, %r0, 4; add.s64 %rd0, %rd0, %rd_out; st.global.b32 [%rd0], %r5;\n"
READ, NEIGHBOUR = OPPOSITE.format(124) + KEEP, OPPOSITE.format(4) + KEEP
"""Of the word of lane 31 - lane, and of the lane beside it."""
SYNC = "bar.warp.sync 0xffffffff;\n"
HALF = "setp.{0}.u32 %p1, %r9, 16; @!%p1 bra END;\n"
SHUFFLE = "shfl.sync.bfly.b32 %r6, %r0, 1, 31, 0xffff;\n"
BY_FLAG = """@!%p0 bra SPIN; st.shared.b32 [%r2], 7; st.{0}.cta.global.b32 [%rd_flag], 1; bra END;
SPIN: ld.{1}.cta.global.b32 %r6, [%rd_flag]; setp.eq.u32 %p1, %r6, 0; @%p1 bra SPIN;
ld.shared.b32 %r5, [%r2];
END:
"""
INIT = "@%p0 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0;\n"
STORE = "@%p0 st.shared.b32 [%r2+64], 7;\n"
ARRIVE = "@%p0 mbarrier.arrive.shared.b64 %rd1, [%r2];\n"
LOOK = """WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
ld.shared.b32 %r5, [%r2+64];
"""
BYTE = "add.u32 %r7, %r2, %r0; st.shared.u8 [%r7], %r0;\n"
VECTOR = """and.b32 %r4, %r1, 112; add.u32 %r4, %r2, %r4;
ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4];
"""
MATRIX = "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r2], {%f0, %f1, %f2, %f3, %f4, %f5, "
MATRIX += "%f6, %f7}, 16;\n"
VOLATILE = [part.replace("shared", "volatile.shared") for part in (WRITE, READ)]
ADD, LOAD = "atom.shared.add.u32 %r6, [%r2], 1;\n", "ld.shared.b32 %r5, [%r2];\n"
MANY = "ld.shared.b32 %r6, [%r3];\n" * (MOST_NOTED // 2 - 4)
ODD = "and.b32 %r6, %r0, 1; setp.eq.u32 %p0, %r6, 0;\n"
RACE, UNWRITTEN = "error lane-race", "warning uninitialised-read"
LANES = {
    **pair("an exchange", f"{WRITE}«{SYNC}»{READ}", RACE),
    **pair("an exchange of two warps' lanes", f"{WRITE}«{SYNC}»{READ}", RACE, block=64),
    **pair("an exchange of 48 threads", f"{WRITE}«{SYNC}»{NEIGHBOUR}", RACE, block=48),
    **{
        f"lanes meet at {between.split()[0]}": Program(WRITE + between + READ)
        for between in ("bar.sync 0;", "barrier.sync 0;", "elect.sync _|%p1, -1;")
    },
    **{
        f"{what} orders no memory": Program(WRITE + between + READ, "isa shuffle-order")
        for what, between in (
            ("vote", "vote.sync.any.pred %p1, %p0, -1;"),
            ("match", "match.any.sync.b32 %r6, %r0, -1;"),
            ("shfl", "shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;"),
            ("redux", "redux.sync.add.u32 %r6, %r0, -1;"),
        )
    },
    "a shuffle of half the warp orders no memory": Program(
        f"{HALF.format('lt')}{WRITE}{SHUFFLE}{NEIGHBOUR}END:", "isa shuffle-order"
    ),
    "a shuffle before": Program(f"{HALF.format('lt')}{SHUFFLE}{WRITE}{NEIGHBOUR}END:", RACE),
    **{
        f"lanes do not meet at {between.split()[0]}": Program(WRITE + between + READ, RACE)
        for between in ("fence.acq_rel.cta;", "membar.cta;", "nanosleep.u32 10;")
    },
    **pair("the next round overwrites what another lane may still read",
           f"{WRITE}{SYNC}{READ}«{SYNC}»{WRITE}", RACE),
    # Half the warp meets, and its lanes exchange; across the halves there is no order.
    **{
        f"lanes {mask} meet": Program(
            HALF.format(half) + WRITE + f"bar.warp.sync {mask};{NEIGHBOUR}END:"
        )
        for half, mask in (("lt", "0x0000ffff"), ("ge", "0xffff0000"))
    },
    **{
        f"lanes {mask} meet, and read what others wrote": Program(
            WRITE + HALF.format(half) + f"bar.warp.sync {mask};{READ}END:", RACE
        )
        for half, mask in (("lt", "0x0000ffff"), ("ge", "0xffff0000"))
    },
    # Members meet at warp barriers in both arms of a branch, before what stands behind them.
    **{
        f"both arms have a warp barrier{what}": Program(
            f"{before}{WRITE}{ODD}@%p0 bra EVEN; bar.warp.sync {mask}; bra JOIN;\n"
            f"EVEN: bar.warp.sync {mask}; {after}JOIN: {NEIGHBOUR}END:", found
        )
        for what, before, mask, after, found in (
            ("", "", "-1", "", ""),
            (" of a half", HALF.format("lt"), "0xffff", "", ""),
            (", one a store behind it", "", "-1", WRITE, RACE),
        )
    },
    # Lanes that come to one use of a barrier in two groups have met behind it, and not before.
    **{
        f"{what} of lanes in two groups": Program(
            f"@!%p0 bra OTHER; st.shared.b32 [%r2], 7; {arrive} {late}{wait} bra JOIN;\n"
            f"OTHER: {arrive} {wait}\nJOIN: {LOAD}", found
        )
        for what, arrive, wait, late, found in (
            ("a barrier", "barrier.sync 0;", "", "", ""),
            ("a cluster barrier", "barrier.cluster.arrive;", "barrier.cluster.wait;", "", ""),
            ("a store behind the arrival at a cluster barrier", "barrier.cluster.arrive;",
             "barrier.cluster.wait;", "st.shared.b32 [%r2], 8;", RACE),
        )
    },
    "a release and an acquire": Program(BY_FLAG.format("release", "acquire")),
    "a relaxed flag": Program(BY_FLAG.format("relaxed", "relaxed"), RACE),
    "who waits for an mbarrier behind who arrives": Program(INIT + STORE + ARRIVE + LOOK),
    "an arrival at an mbarrier before it": Program(INIT + ARRIVE + SYNC + STORE + LOOK, RACE),
    "bytes of one word": Program(BYTE + "ld.shared.u8 %r5, [%r7];"),
    "a byte of a word": Program(BYTE + LOAD, RACE),
    **pair("a vector covers words of other lanes", f"{WRITE}«{SYNC}»{VECTOR}", RACE),
    **pair("a matrix that wmma stores", f"{MATRIX}«{SYNC}»{READ}", RACE),
    "matrices that wmma stores": Program(MATRIX + MATRIX),
    # Volatile data are plain to CUDA C++; a volatile flag is a relaxed one.
    **pair("volatile words", f"{VOLATILE[0]}«{SYNC}»{VOLATILE[1]}", RACE),
    "a volatile flag": Program(BY_FLAG.replace("{0}.cta", "volatile").replace("{1}.cta", "volatile")
                               .replace("ld.shared.b32 %r5, [%r2];", "")),
    "volatile words behind fences": Program(
        f"{HALF.format('lt')}{VOLATILE[0]}fence.acq_rel.cta; st.volatile.shared.b32 [%r3+128], 1;\n"
        f"xor.b32 %r4, %r1, 60; add.u32 %r4, %r2, %r4; SPIN: ld.volatile.shared.b32 %r6, "
        "[%r4+128]; setp.ne.u32 %p2, %r6, 1; @%p2 bra SPIN; fence.acq_rel.cta;\n"
        f"ld.volatile.shared.b32 %r5, [%r4]; {KEEP}END:"
    ),
    "atomics": Program(ADD + ADD, UNWRITTEN),
    "an atomic and a plain read": Program(ADD + LOAD, f"{RACE}, {UNWRITTEN}"),
    "an atomic and a plain store": Program(
        ADD + "st.shared.b32 [%r2], 0;", f"error lost-update, {UNWRITTEN}"
    ),
    "an atomic and a plain read of global memory": Program(
        "atom.global.add.u32 %r6, [%rd_flag], 1; ld.global.b32 %r5, [%rd_flag];", "isa mixed-race"
    ),
    "one constant of several lanes": Program(
        f"{ODD} @%p0 st.shared.b32 [%r2], 7;\n@!%p0 st.shared.b32 [%r2], 7;", "note same-value-race"
    ),
    "accesses far apart": Program(WRITE + MANY + READ, RACE),
    "accesses far behind others": Program(MANY * 3 + WRITE + READ, f"{RACE}, {UNWRITTEN}"),
}  # fmt: skip


@pytest.mark.parametrize("name", LANES)
def test_lanes(name: str) -> None:
    body, found, how = LANES[name]
    judge(Program(OWN + body, found, {"how": {"shared": 1024}, "out": 64, "flag": 4, **how}))


def errors_of_lanes(body: str, **how: object) -> list[tuple[str, str]]:
    found = check(OWN + body, how={"shared": 1024}, out=64, flag=4, **how)
    return [(f.code, f.message) for f in found if f.level == "error"]


def test_equal_data_are_an_error_all_the_same() -> None:
    load = "ld.global.b32 %r6, [%rd_flag];\n"
    again = "@%p0 st.shared.b32 [%r2], %r6;\n@!%p0 st.shared.b32 [%r2], %r6;\n"
    ((code, message),) = errors_of_lanes(f"{load}st.shared.b32 [%r2], %r6;\n{SYNC}{again}")
    assert code == "lane-race" and "the value was the same in this run" in message


def test_lanes_may_be_taken_as_ordered() -> None:
    assert errors_of_lanes(WRITE + READ, policy=Policy(warp_lanes=False)) == []


def test_the_finding_names_lanes_and_what_is_missing() -> None:
    write = "add.u32 %r6, %r0, 1;\nst.shared.b32 [%r3], %r6;\n"
    ((_, message),) = errors_of_lanes(write + READ)
    assert "lanes 0 and 31 of one warp: needs bar.warp.sync between" in message


@pytest.mark.parametrize(
    ("meetings", "wanted"),
    [
        ([], False),
        ([Meeting(1, 0b11, False)], True),
        ([Meeting(1, 0b101, False)], False),
        ([Meeting(1, 0b101, False), Meeting(1, 0b110, False)], True),
        ([Meeting(1, 0b110, False), Meeting(1, 0b101, False)], False),
        ([Meeting(0, 0b11, False)], False),
        ([Meeting(2, 0b11, False)], False),
        ([Meeting(1, 0b10, True)], True),
        ([Meeting(1, 0b100, True)], False),
        ([Meeting(1, 0b1, token=0), Meeting(1, 0b10, True, 0)], True),
        ([Meeting(1, 0b1, token=1), Meeting(1, 0b10, True, 0)], False),
        ([Meeting(1, 0b10, True, 0), Meeting(1, 0b1, token=0)], False),
    ],
)
def test_meetings_of_some_lanes_are_transitive(meetings: list[Meeting], wanted: bool) -> None:
    """Lane 0 does something as number 1, lane 1 as number 2."""
    assert is_ordered(meetings, 1, 0, 2, 1) is wanted


# Lanes of a warp that read what only another lane of it has acquired: bar.warp.sync is missing.

READ_DATA = "ld.global.b32 %r6, [%rd_data];\n"
SEEN = f"""{TID} setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1;
@%p1 bra SECOND; @!%p0 bra END; st.global.b32 [%rd_data], 7;
st.release.gpu.global.b32 [%rd_flag], 1; bra END;
SECOND: {{0}}
SPIN: ld.{{1}}.gpu.global.b32 %r5, [%rd_flag]; setp.eq.u32 %p3, %r5, 0; @%p3 bra SPIN;
DONE: {{2}}
END:
"""
"""CTA 0 writes and raises a flag; of CTA 1 lane 0, or who does not go to DONE, sees it."""
OTHERS = "@!%p0 bra DONE;"
ODD_LATER = "and.b32 %r2, %r0, 1; setp.eq.u32 %p2, %r2, 1; @%p2 bra DONE;"
AGAIN = """AGAIN: @%p2 ld.acquire.gpu.global.b32 %r5, [%rd_flag]; setp.eq.u32 %p3, %r5, 0;
@%p3 bra AGAIN;
"""
BY_MBARRIER = f"""{TID} setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, smem;
@%p0 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0; setp.lt.u32 %p1, %r0, 32; @%p1 bra FIRST;
st.shared.b32 [%r1+16], 7; mbarrier.arrive.shared.b64 %rd0, [%r1]; bra END;
FIRST: @!%p0 bra DONE;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
DONE: «{SYNC}» ld.shared.b32 %r6, [%r1+16];
END:
"""
"""Warp 1 writes shared memory and arrives; of warp 0 lane 0 waits, and all lanes read."""
RELEASED = f"""{TID} setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 3; mov.u32 %r1, %ctaid.x;
setp.eq.u32 %p2, %r1, 1; @%p2 bra SECOND; {{0}} bra END;
SECOND: ld.acquire.gpu.global.b32 %r5, [%rd_flag]; setp.eq.u32 %p3, %r5, 0; @%p3 bra SECOND;
ld.global.b32 %r6, [%rd_data];
END:
"""
"""CTA 1 reads what lanes of CTA 0 write, behind a flag."""
DATA, FLAG = "@{} st.global.b32 [%rd_data], 7;", "@{} st.release.gpu.global.b32 [%rd_flag], 1;"
OTHERS_WRITE, OTHERS_RELEASE = DATA.format("%p0"), FLAG.format("%p1")
HANDED_ON = f"""{TID} setp.eq.u32 %p0, %r0, 32; setp.eq.u32 %p1, %r0, 35; setp.eq.u32 %p2, %r0, 0;
mov.u32 %r1, smem; @%p2 mbarrier.init.shared.b64 [%r1], 1; bar.sync 0;
setp.lt.u32 %p3, %r0, 32; @%p3 bra WAIT; @%p0 st.shared.b32 [%r1+16], 7; «{SYNC}»
@%p1 mbarrier.arrive.shared.b64 %rd0, [%r1]; bra END;
WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0; @!%p4 bra WAIT;
ld.shared.b32 %r6, [%r1+16];
END:
"""
"""Lane 0 of warp 1 writes and lane 3 arrives; warp 0 waits and reads."""
TWO_CTAS = {"grid": 2, "data": 1, "flag": 1}
ACQUIRED = {
    **{
        k: v
        for load, fence in (("acquire", ""), ("relaxed", "@%p0 fence.acq_rel.gpu;"))
        for k, v in pair(f"others read what lane 0 saw, {load}",
                         SEEN.format(OTHERS, load, f"{fence}«{SYNC}»{READ_DATA}"), "error race",
                         **TWO_CTAS).items()
    },
    **{
        name: Program(SEEN.format(waits, "acquire", behind), found, TWO_CTAS)
        for name, waits, behind, found in (
            ("lane 0 reads", OTHERS, "@%p0 " + READ_DATA, ""),
            ("a shuffle makes lanes wait, and orders no memory", OTHERS,
             "shfl.sync.idx.b32 %r5, %r5, 0, 31, 0xffffffff;\n" + READ_DATA, ""),
            ("behind a barrier", OTHERS, "bar.sync 0;\n" + READ_DATA, ""),
            ("all lanes acquire, first the even ones", ODD_LATER, AGAIN + READ_DATA, ""),
            ("the even lanes acquire", ODD_LATER, READ_DATA, "error race"),
        )
    },
    **pair("lane 0 writes and lane 3 releases",
           RELEASED.format(f"{OTHERS_WRITE} «{SYNC}» {OTHERS_RELEASE}"), "error race", **TWO_CTAS),
    **{
        f"lane 0 writes, {what}": Program(RELEASED.format(body), found, TWO_CTAS)
        for what, body, found in (
            ("and releases", OTHERS_WRITE + FLAG.format("%p0"), ""),
            ("a shuffle, lane 3 releases",
             f"{OTHERS_WRITE} shfl.sync.idx.b32 %r5, %r0, 0, 31, -1; {OTHERS_RELEASE}", ""),
            ("lane 3 releases, then lane 0", f"{OTHERS_WRITE} {OTHERS_RELEASE.replace('1;', '0;')}"
             + FLAG.format("%p0"), ""),
            ("fences, and lane 3 fences and raises the flag",
             f"{OTHERS_WRITE} @%p1 fence.acq_rel.gpu; "
             + OTHERS_RELEASE.replace("release", "relaxed"), "error race"),
        )
    },
    "all lanes write, and lane 3 releases": Program(
        RELEASED.format(f"st.global.b32 [%rd_data], 7; {OTHERS_RELEASE}"), "", TWO_CTAS
    ),
    **pair("lane 0 writes and lane 3 arrives at an mbarrier", HANDED_ON, "error race", block=64,
           how={"shared": 64}),
    **pair("others read behind lane 0's wait for an mbarrier", BY_MBARRIER, "error race", block=64,
           how={"shared": 64}),
}  # fmt: skip


def test_the_finding_names_what_is_missing() -> None:
    (finding,) = check(SEEN.format(OTHERS, "acquire", READ_DATA), **TWO_CTAS)
    assert "only other lanes of the warp have acquired it: needs bar.warp.sync" in finding.message


# Work that several warps do alike, with one result: a note. With different results: an error.

PLACE = "mov.u32 %r0, %tid.x; mov.u32 %r2, smem;\n"
BULK_STORES = ELECT + """
st.shared.b32 [%r2], 7; st.shared.b32 [%r2+4], 7; st.shared.b32 [%r2+8], 7;
st.shared.b32 [%r2+12], 7;
{0}
fence.proxy.async; bar.sync 0; elect.sync _|%p3, 0xffffffff; @!%p3 bra END;
{1}
cp.async.bulk.global.shared::cta.bulk_group [%rd_out], [%r6], 16; cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""  # fmt: skip
OTHER_VALUE = "".join(f"st.shared.b32 [%r2+{at}], 9;\n" for at in (16, 20, 24, 28))
INITS = ELECT + """
{who} mbarrier.init.shared::cta.b64 [%r1], {count};
{before}
fence.mbarrier_init.release.cluster; bar.sync 0; @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1];
""" + wait()  # fmt: skip
ROWS = ELECT + """mul.lo.u32 %r5, %r9, 16; sub.u32 %r5, %r0, %r5; mul.wide.u32 %rd0, %r5, 4;
add.u64 %rd0, %rd_out, %rd0; add.u32 %r6, {0}, 1; st.global.u32 [%rd0], %r6;
"""  # fmt: skip
"""Warp 1 stores rows 16 to 47, half of them warp 0's: the row's value, or the thread's."""
BESIDE = f"""@%p2 bra DONE; setp.ne.u32 %p5, %r0, 0; @%p5 bra DONE;
mbarrier.arrive.shared::cta.b64 _, [%r1];
{wait(label="OWN")} DONE:
"""
"""Warp 0 arrives and waits as soon as it has initialised the object, warp 1 does so too."""
STAGE = "ld.global.b32 %r20, [%rd8{}]; st.shared.b32 [%r21], %r20;\n"
STAGED = f"""{PLACE} shl.b32 %r24, %r0, 2; add.u32 %r21, %r24, %r2; cvt.u64.u32 %rd7, %r24;
add.u64 %rd8, %rd_data, %rd7; {STAGE.format("")} bar.sync 0;
xor.b32 %r22, %r24, 128; add.u32 %r22, %r22, %r2; ld.shared.b32 %r23, [%r22];
{STAGE.format("+256")}
"""
"""Each warp stages its block of a tile, reads the other's, and stages the next one."""
TILE = f"""{PLACE} and.b32 %r9, %r0, {{0}}; mul.wide.u32 %rd7, %r9, 4; add.u64 %rd7, %rd_data, %rd7;
ld.global.b32 %r20, [%rd7]; and.b32 %r9, %r0, 31; shl.b32 %r9, %r9, 2; add.u32 %r21, %r2, %r9;
setp.lt.u32 %p7, %r0, 32; {{1}}
"""
"""Both warps store a row of data in one place, the same one if {{0}} is 31."""
REPLICATED = "st.shared.b32 [%r21], %r20;"
NOTE, ERROR = "note same-value-race", "error race"
TWICE = "note mbarrier-initialised-twice"
ALIKE = {
    "all warps bulk store the same bytes to the same place": Program(
        BULK_STORES.format("", "mov.u32 %r6, %r2;"), NOTE, {"out": 4}
    ),
    "warps bulk store different bytes to the same place": Program(
        BULK_STORES.format(OTHER_VALUE, "shl.b32 %r6, %r9, 4; add.u32 %r6, %r6, %r2;"),
        f"error missing-wait, {NOTE} | error race, {NOTE}", {"out": 4},
    ),
    "all lanes of a warp initialise an mbarrier": Program(
        INITS.format(who="@%p1", count=1, before="")
    ),
    "all warps initialise an mbarrier alike": Program(
        INITS.format(who="", count=1, before=""), f"{TWICE}, {NOTE}"
    ),
    "warps initialise an mbarrier with different counts": Program(
        INITS.format(who="add.u32 %r20, %r9, 1;\n", count="%r20",
                     before="bar.sync 0; @%p0 mbarrier.init.shared::cta.b64 [%r1], 1;"),
        f"error race, {TWICE.replace('note', 'warning')} | "
        f"error race, {TWICE}, {TWICE.replace('note', 'warning')}",
    ),
    "an mbarrier is initialised again beside its use": Program(
        INITS.format(who="", count=1, before=BESIDE).replace("bar.sync 0; @%p0", "bar.sync 0; @%p8")
        .removesuffix(wait()), f"error race, {TWICE}, {NOTE} | deadlock"
    ),
    "overlapping rows of equal values": Program(ROWS.format("%r5"), NOTE, {"out": 64}),
    "overlapping rows of different values": Program(ROWS.format("%r0"), ERROR, {"out": 64}),
    # Every thread of two warps stores one value in one place.
    **{
        f"one value in one place: {before or value}": Program(
            f"{PLACE} mov.u32 %r20, 7; {before}\nst.shared.b32 [%r2], {value};", found, {"data": 4}
        )
        for found, value, before in (
            (NOTE, "7", ""), (NOTE, "%r20", ""), (NOTE, "%r20", "add.u32 %r20, %r20, 5;"),
            (NOTE, "%r20", "cvt.u32.u64 %r20, %rd_data;"), (NOTE, "%r20", "mov.u32 %r20, %ntid.x;"),
            (ERROR, "%r20", "ld.global.b32 %r20, [%rd_data];"),
            (ERROR, "%r20", "ld.global.b32 %r21, [%rd_data]; add.u32 %r20, %r21, 5;"),
            (ERROR, "%r20", "atom.global.or.b32 %r20, [%rd_data], 0;"),
            (ERROR, "%r20", "mov.u32 %r20, %smid;"),
            (ERROR, "%r20", "ld.global.b32 %r21, [%rd_data]; setp.eq.u32 %p7, %r21, 0;\n"
             "@%p7 mov.u32 %r20, 8;"),
            (NOTE, "%r20", "setp.eq.u32 %p7, %r0, %r0;\n@%p7 mov.u32 %r20, 8;"),
        )
    },
    **{
        f"input that is {what} hides no missing barrier": Program(STAGED, ERROR, {"data": data})
        for what, data in (("constant", np.ones(128, np.uint32)),
                           ("varied", np.arange(128, dtype=np.uint32)))
    },
    # As Triton does where a tile is smaller than its warps: one instruction, one row, all data.
    **{
        f"a row of {what}": Program(TILE.format(mask, stores), found, {"data": data})
        for what, mask, stores, found, data in (
            ("data", 31, REPLICATED, NOTE, np.arange(64, dtype=np.uint32)),
            ("data by two instructions", 31, f"@%p7 {REPLICATED} @!%p7 {REPLICATED}", ERROR,
             np.arange(64, dtype=np.uint32)),
            ("one value", 31, REPLICATED, ERROR, 64),
            ("data, and one of zeros", 31, f"mov.u32 %r6, 0;\nAGAIN: {REPLICATED} bar.sync 0;\n"
             "mov.u32 %r20, 0; add.u32 %r6, %r6, 1; setp.lt.u32 %p6, %r6, 2; @%p6 bra AGAIN;",
             NOTE, np.arange(64, dtype=np.uint32)),
            ("other data each", 63, REPLICATED, ERROR, np.arange(64, dtype=np.uint32)),
            ("data that are equal but for one", 63, REPLICATED, ERROR,
             np.arange(64, dtype=np.uint32) % 32 + (np.arange(64) == 63).astype(np.uint32)),
        )
    },
    "a store of zero to a zeroed counter may lose what others add": Program(
        f"{PLACE} setp.ne.u32 %p6, %r0, 0; @%p6 bra ADD; st.global.b32 [%rd_data], 0;\n"
        "ADD: red.global.add.u32 [%rd_data], 1;", "error lost-update", {"data": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_work_that_warps_do_alike(name: str) -> None:
    body, found, how = ALIKE[name]
    judge(Program(body, found, {"block": 64, "how": {"shared": 4096}, **how}))


@pytest.mark.parametrize(("value", "said"), [("7", False), ("%r20", True)])
def test_the_finding_says_where_data_decide_a_value(value: str, said: bool) -> None:
    load = "ld.global.b32 %r20, [%rd_data];\n"
    store = f"st.shared.b32 [%r2], {value};"
    (finding,) = check(PLACE + load + store, block=64, how={"shared": 4096}, data=4)
    assert ("other data need not be" in finding.message) == said


@pytest.mark.parametrize("name", ACQUIRED)
def test_what_another_lane_has_acquired(name: str) -> None:
    judge(ACQUIRED[name])
