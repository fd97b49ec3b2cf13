"""Lanes of a warp are ordered by what makes them wait for each other, and by nothing else."""

import pytest
from tests.check.checked_run import POLICIES, check, errors
from tests.kernel_run import TID

from ptxemu.check.lane_races import MOST_NOTED, Meeting, is_ordered
from ptxemu.sched.policy import Policy

# Lanes of a warp are ordered by what makes them wait for each other, and by nothing else.

OWN = (
    TID + "mov.u32 %r2, smem;\nshl.b32 %r1, %r0, 2;\nadd.u32 %r3, %r2, %r1;\n"
    "and.b32 %r9, %r0, 31;\n"
)
"""%r3: address of the lane's own word; %r9: the lane."""
WRITE = "st.shared.b32 [%r3], %r0;\n"
OPPOSITE = "xor.b32 %r4, %r1, {0};\nadd.u32 %r4, %r2, %r4;\nld.shared.b32 %r5, [%r4];\n"
READ = OPPOSITE.format(124)
"""Of the word of lane 31 - lane."""
NEIGHBOUR = OPPOSITE.format(4)
KEEP = "mul.wide.u32 %rd0, %r0, 4;\nadd.s64 %rd0, %rd0, %rd_out;\nst.global.b32 [%rd0], %r5;\n"
FIRST = "setp.eq.u32 %p0, %r9, 0;\n"
SYNC = "bar.warp.sync 0xffffffff;\n"
RACE, NONE = {"lane-race"}, set[str]()


def found(body: str, policy: Policy | None = None, block: int = 32) -> set[str]:
    how = {"shared": 1024}
    return errors(check(OWN + body, policy=policy, how=how, block=block, out=64, flag=4))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("block", [32, 64, 48])
def test_an_exchange_needs_an_order(policy: Policy, block: int) -> None:
    xor = NEIGHBOUR if block == 48 else READ
    assert found(WRITE + xor + KEEP, policy, block) == RACE
    assert found(WRITE + SYNC + xor + KEEP, policy, block) == NONE


@pytest.mark.parametrize(
    "between",
    [
        "bar.sync 0;\n",
        "barrier.sync 0;\n",
        "shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;\n",
        "vote.sync.any.pred %p1, %p0, -1;\n",
        "redux.sync.add.u32 %r6, %r0, -1;\n",
        "elect.sync _|%p1, -1;\n",
    ],
)
def test_lanes_meet_at_what_waits_for_them(between: str) -> None:
    assert found(FIRST + WRITE + between + READ + KEEP) == NONE


@pytest.mark.parametrize(
    "between", ["fence.acq_rel.cta;\n", "membar.cta;\n", "nanosleep.u32 10;\n"]
)
def test_lanes_do_not_meet_at_what_waits_for_no_other(between: str) -> None:
    assert found(WRITE + between + READ + KEEP) == RACE


def test_the_next_round_overwrites_what_another_lane_may_still_read() -> None:
    once = WRITE + SYNC + READ
    assert found(once + KEEP + WRITE) == RACE
    assert found(once + KEEP + SYNC + WRITE) == NONE


@pytest.mark.parametrize("mask", ["0x0000ffff", "0xffff0000"])
def test_some_lanes_meet(mask: str) -> None:
    """Half the warp meets, and its lanes exchange; across the halves there is no order."""
    chosen = "lt" if mask.endswith("ffff") else "ge"
    half = f"setp.{chosen}.u32 %p0, %r9, 16;\n@!%p0 bra END;\n"
    body = half + WRITE + f"bar.warp.sync {mask};\n{NEIGHBOUR}{KEEP}END:\n"
    assert found(body) == NONE
    across = WRITE + half.replace("END", "OVER") + f"bar.warp.sync {mask};\n{READ}{KEEP}OVER:\n"
    assert found(across) == RACE


RELEASE = "st.release.cta.global.b32 [%rd_flag], 1;\n"
BY_FLAG = (
    FIRST
    + "@!%p0 bra READER;\nst.shared.b32 [%r2], 7;\n{0}bra END;\nREADER:\n"
    + "SPIN: {1} %r6, [%rd_flag];\nsetp.eq.u32 %p1, %r6, 0;\n@%p1 bra SPIN;\n"
    + "ld.shared.b32 %r5, [%r2];\n"
    + KEEP
    + "END:\n"
)


def test_a_release_and_an_acquire_order_lanes() -> None:
    assert found(BY_FLAG.format(RELEASE, "ld.acquire.cta.global.b32")) == NONE


def test_a_relaxed_flag_orders_no_lanes() -> None:
    relaxed = RELEASE.replace("release", "relaxed")
    assert found(BY_FLAG.format(relaxed, "ld.relaxed.cta.global.b32")) == RACE


@pytest.mark.parametrize("arrives", [True, False])
def test_an_mbarrier_orders_who_waits_behind_who_arrives(arrives: bool) -> None:
    """Lane 0 writes and arrives, all lanes wait and read; a phase before that orders nothing."""
    store = "@%p0 st.shared.b32 [%r2+64], 7;\n"
    arrive = "@%p0 mbarrier.arrive.shared.b64 %rd1, [%r2];\n"
    wait = "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra WAIT;\n"
    body = FIRST + "@%p0 mbarrier.init.shared.b64 [%r2], 1;\nbar.sync 0;\n"
    body += store + arrive + wait if arrives else arrive + SYNC + store + wait
    assert found(body + "ld.shared.b32 %r5, [%r2+64];\n" + KEEP) == (NONE if arrives else RACE)


def test_bytes_of_one_word_are_apart() -> None:
    own = "add.u32 %r7, %r2, %r0;\n"
    body = own + "st.shared.u8 [%r7], %r0;\nld.shared.u8 %r5, [%r7];\n" + KEEP
    assert found(body) == NONE
    assert found(own + "st.shared.u8 [%r7], %r0;\nld.shared.b32 %r5, [%r2];\n" + KEEP) == RACE


def test_a_vector_covers_words_of_other_lanes() -> None:
    vector = "and.b32 %r4, %r1, 112;\nadd.u32 %r4, %r2, %r4;\n"
    vector += "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4];\n"
    assert found(WRITE + vector + KEEP) == RACE
    assert found(WRITE + SYNC + vector + KEEP) == NONE


def test_atomics_are_no_race_but_beside_a_plain_read() -> None:
    add = "atom.shared.add.u32 %r6, [%r2], 1;\n"
    assert found(add + add + "mov.u32 %r5, 0;\n" + KEEP) == NONE
    assert found(add + "ld.shared.b32 %r5, [%r2];\n" + KEEP) == RACE
    assert found(add + "st.shared.b32 [%r2], 0;\n") == {"lost-update"}
    anywhere = "atom.global.add.u32 %r6, [%rd_flag], 1;\nld.global.b32 %r5, [%rd_flag];\n"
    assert found(anywhere + KEEP) == {"mixed-race"}


def test_one_constant_of_several_lanes_is_a_note() -> None:
    odd = "and.b32 %r6, %r0, 1;\nsetp.eq.u32 %p0, %r6, 0;\n"
    body = OWN + odd + "@%p0 st.shared.b32 [%r2], 7;\n@!%p0 st.shared.b32 [%r2], 7;\n"
    findings = check(body, how={"shared": 256})
    assert [(f.code, f.level) for f in findings] == [("same-value-race", "note")]


def test_equal_data_are_an_error_all_the_same() -> None:
    load = "ld.global.b32 %r6, [%rd_flag];\n"
    body = OWN + FIRST + load + "st.shared.b32 [%r2], %r6;\n" + SYNC
    body += "@%p0 st.shared.b32 [%r2], %r6;\n@!%p0 st.shared.b32 [%r2], %r6;\n"
    (finding,) = (f for f in check(body, how={"shared": 256}, flag=4) if f.level == "error")
    assert finding.code == "lane-race"
    assert "the value was the same in this run" in finding.message


def test_accesses_far_apart_are_judged_too() -> None:
    many = "ld.shared.b32 %r6, [%r3];\n" * (MOST_NOTED // 2 - 4)
    assert found(WRITE + many + READ + KEEP) == RACE
    assert found(many + many + many + WRITE + READ + KEEP) == RACE


def test_lanes_may_be_taken_as_ordered() -> None:
    assert found(WRITE + READ + KEEP, Policy(warp_lanes=False)) == NONE


def test_the_finding_names_lanes_and_what_is_missing() -> None:
    write = "add.u32 %r6, %r0, 1;\nst.shared.b32 [%r3], %r6;\n"
    findings = check(OWN + write + READ + KEEP, how={"shared": 1024}, out=64, flag=4)
    (finding,) = (f for f in findings if f.code == "lane-race")
    assert "lanes 0 and 31 of one warp: needs bar.warp.sync between" in finding.message


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
    ],
)
def test_meetings_of_some_lanes_are_transitive(meetings: list[Meeting], wanted: bool) -> None:
    """Lane 0 does something as number 1, lane 1 as number 2."""
    assert is_ordered(meetings, 1, 0, 2, 1) is wanted


# Lanes of a warp that read what only another lane of it has acquired: bar.warp.sync is missing.

ACQUIRE, RELAXED = "ld.acquire.gpu.global.b32", "ld.relaxed.gpu.global.b32"
SYNC_ALL = "bar.warp.sync 0xffffffff;\n"
READ_DATA = "ld.global.b32 %r6, [%rd_data];\n"
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


def found_of_flag(body: str, policy: Policy | None = None) -> set[str]:
    return errors(check(body, grid=2, policy=policy, data=1, flag=1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("load", [ACQUIRE, RELAXED])
def test_others_read_what_lane_0_acquired(load: str, policy: Policy) -> None:
    fence = "" if load == ACQUIRE else "@%p0 fence.acq_rel.gpu;\n"
    assert found_of_flag(by_flag(fence + READ_DATA, load=load), policy) == {"race"}
    assert found_of_flag(by_flag(fence + SYNC_ALL + READ_DATA, load=load), policy) == set()


@pytest.mark.parametrize(
    "behind",
    [
        "@%p0 " + READ_DATA,
        "shfl.sync.idx.b32 %r5, %r5, 0, 31, 0xffffffff;\n" + READ_DATA,
        "bar.sync 0;\n" + READ_DATA,
    ],
    ids=["lane 0 reads", "a shuffle, which makes lanes wait but orders no memory", "barrier"],
)
def test_what_is_sound_or_doubtful_is_not_reported(behind: str) -> None:
    assert found_of_flag(by_flag(behind)) == set()


def test_the_finding_names_what_is_missing() -> None:
    (finding,) = check(by_flag(READ_DATA), grid=2, data=1, flag=1)
    assert "only other lanes of the warp have acquired it: needs bar.warp.sync" in finding.message


def test_lanes_that_all_acquire_need_no_sync() -> None:
    """Each lane spins for itself, first the even ones."""
    odd = "and.b32 %r2, %r0, 1;\nsetp.eq.u32 %p2, %r2, 1;\n"
    again = f"AGAIN: @%p2 {ACQUIRE} %r5, [%rd_flag];\nsetp.eq.u32 %p3, %r5, 0;\n@%p3 bra AGAIN;\n"
    assert found_of_flag(by_flag(odd + again + READ_DATA, waits=odd + "@%p2 bra DONE;\n")) == set()
    assert found_of_flag(by_flag(READ_DATA, waits=odd + "@%p2 bra DONE;\n")) == {"race"}


@pytest.mark.parametrize("sync", [SYNC_ALL, ""])
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
