"""Tensor memory: loads that nobody waited for, pairs, its shadow, and two open reports."""

import random

import numpy as np
import pytest
from tests.check.checked_run import POLICIES, check, codes
from tests.kernel_run import TID, store

from ptxemu.check.tmem_page import COLUMNS, ROWS, TmemPage
from ptxemu.sched.policy import Policy

# Registers of tcgen05.ld that are needed before tcgen05.wait::ld.

ALLOC = """
mov.u32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1]; mov.u32 %r3, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
"""
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
BARRIER = "bar.sync 0;\n"
END = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;\n"
USES = {
    "arithmetic and a store": "add.u32 %r5, %r4, 1;\n" + store("out", "%r5"),
    "a store": store("out", "%r4"),
    "a predicate": "setp.eq.u32 %p0, %r4, 7;\n@%p0 bra L;\nL:\n",
    "an address": "mul.wide.u32 %rd0, %r4, 4;\nadd.s64 %rd1, %rd_out, %rd0;\n"
    "ld.global.b32 %r6, [%rd1];\n",
}
HOW = {"arch": "sm_100a", "shared": 1024}
EARLY, MISSING = ("tmem-load-used-early", "warning"), ("tmem-load-not-waited", "error")


def verdict(text: str, policy: Policy | None = None) -> list[tuple[str, str]]:
    return codes(check(TID + ALLOC + text, policy=policy, how=HOW, out=64))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_use_without_a_wait_is_an_error(use: str, policy: Policy) -> None:
    assert verdict(USES[use] + BARRIER + WAIT + END, policy) == [MISSING, EARLY]
    assert verdict(WAIT + USES[use] + BARRIER + END, policy) == []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_use_before_the_wait_is_a_warning(policy: Policy) -> None:
    """The strangers' program, which was found clean, and what Triton 3.9 emits: the ISA keeps the
    true dependency, and the wait comes before anything is handed on."""
    body = "add.u32 %r5, %r4, 1;\n" + store("out", "%r5") + WAIT + END
    assert verdict(body, policy) == [EARLY]


def test_no_wait_at_all() -> None:
    found = check(TID + ALLOC + USES["a store"] + BARRIER, how=HOW, out=64)
    (finding,) = (f for f in found if f.code == "tmem-load-not-waited")
    assert finding.kind == "isa"
    assert "never waited for before arrival (bar.sync)" in finding.message


def test_arithmetic_before_the_wait_is_the_compilers() -> None:
    """NVVM packs and converts the registers of a load at once, and waits behind that."""
    pure = "mov.b64 %rd2, {%r4, %r4};\nmov.b64 {%r5, %r6}, %rd2;\nadd.u32 %r6, %r6, 1;\n"
    assert verdict(pure + WAIT + store("out", "%r6") + END) == []


# Tensor memory of a pair of CTAs: neither frees it while the other one still uses its own.

USE = """
mov.u32 %r1, smem; tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1]; mov.u32 %r3, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
tcgen05.wait::ld.sync.aligned;
"""
OTHER = """
tcgen05.fence::before_thread_sync; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;
"""
FREE = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 32;\n"
SOURCE = {"arch": "sm_100a", "shared": 1024}


def verdict_of_pair(text: str, policy: Policy | None = None) -> list[tuple[str, str]]:
    own = "mov.u32 %r5, %ctaid.x;\nmad.lo.u32 %r0, %r5, 32, %r0;\n"
    body = TID + own + USE + text + store("out", "%r4")
    return codes(check(body, grid=2, cluster=2, policy=policy, how=SOURCE, out=64))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_pair_frees_behind_the_last_use_of_both(policy: Policy) -> None:
    assert verdict_of_pair(OTHER + FREE, policy) == []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_freeing_while_the_other_cta_still_reads_is_an_error(policy: Policy) -> None:
    assert ("tmem-dealloc-race", "error") in verdict_of_pair(FREE, policy)


def test_a_barrier_that_nobody_waits_at_is_not_enough() -> None:
    arrived = OTHER.replace("barrier.cluster.wait.aligned;", "")
    end = "barrier.cluster.wait.aligned;\n"
    assert ("tmem-dealloc-race", "error") in verdict_of_pair(arrived + FREE + end)


# The handovers that two open reports on CUTLASS are about, in programs of our own.

START = """
mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY; mbarrier.init.shared.b64 [%r1+8], 32;
READY: setp.ge.u32 %p1, %r0, 32; @%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ALLOCATED: bar.sync 0; tcgen05.fence::after_thread_sync; ld.shared.b32 %r2, [%r1];
mov.u32 %r3, 7; setp.lt.u32 %p2, %r0, 128; @%p1 bra OTHER;
"""
TELL = "tcgen05.fence::before_thread_sync;\nmbarrier.arrive.shared.b64 _, [%r1+8];\n"
HEAR = """
SPIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r1+8], 0; @!%p3 bra SPIN;
tcgen05.fence::after_thread_sync;
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};\n"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];\n"
STORED, LOADED = "tcgen05.wait::st.sync.aligned;\n", "tcgen05.wait::ld.sync.aligned;\n"
FREE_OWN = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;\n"
HALF = "setp.ge.u32 %p4, %r0, 144;\n@%p4 bra TOLD;\n" + store("out", "%r4") + "TOLD:\n"


def errors_of_five_warps(body: str, policy: Policy) -> list[tuple[str, str | None]]:
    """Code and kind of the errors of five warps; the first and the last have the same lanes."""
    how = {"arch": "sm_100a", "shared": 64}
    found = check(TID + START + body + "END:\n", block=160, policy=policy, how=how, out=160)
    return sorted({(f.code, f.kind) for f in found if f.level == "error"})


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_tmem_is_freed_behind_a_load_that_nobody_waited_for(policy: Policy) -> None:
    """A use by any lane holds the warp back on hardware, and not in the ISA; no use holds none."""
    freed = f"{STORE}{STORED}bar.sync 1, 64;\n{HEAR}{FREE_OWN}bra END;\n"
    other = f"{freed}OTHER:\n@%p2 bra END;\nbar.sync 1, 64;\n{LOAD}"
    assert errors_of_five_warps(other + LOADED + HALF + TELL, policy) == []
    found = [("tmem-load-not-waited", "isa"), ("tmem-read-by-register", "isa")]
    assert errors_of_five_warps(other + HALF + TELL, policy) == found
    assert ("tmem-dealloc-race", "hardware") in errors_of_five_warps(other + TELL, policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_statistics_are_published_behind_a_store_that_nobody_waited_for(policy: Policy) -> None:
    """The store is waited for in both programs, as it is in the kernel: behind the next one."""
    freed = f"bar.sync 1, 64;\n{FREE_OWN}bra END;\n"
    loaded = f"{HEAR}{LOAD}{LOADED}{store('out', '%r4')}bar.sync 1, 64;\n"
    other = f"{freed}OTHER:\n@%p2 bra END;\n{loaded}"
    assert errors_of_five_warps(STORE + STORED + TELL + other, policy) == []
    assert errors_of_five_warps(STORE + TELL + STORED + other, policy) == [("race", "hardware")]


# The shadow of tensor memory knows of each cell what a shadow of single cells knows.


def pieces(choose):
    """Starts and bytes of an access: most are rectangles, some of lanes apart or of any cells."""
    kind = choose.randrange(8)
    if kind == 0:
        cells = sorted(choose.sample(range(ROWS * COLUMNS), 5))
        return np.array(cells, np.int64) * 4, 4
    fine = choose.random() < 0.2
    columns = choose.choice([1, 2, 4] if fine else [8, 16, 64, 512])
    column = choose.randrange(0, COLUMNS - columns + 1, 1 if fine else 8)
    if kind == 1:
        lanes = [lane for lane in range(64) if lane % 32 < 16]
    else:
        count = choose.choice([1, 16] if fine else [32, 64, 128])
        first = choose.randrange(0, ROWS - count + 1, 1 if fine else count)
        lanes = list(range(first, first + count))
    return np.array(lanes, np.int64) * 2048 + column * 4, 4 * columns


@pytest.mark.parametrize("seed", range(12))
def test_cells_have_the_states_that_accesses_gave_them(seed):
    choose = random.Random(seed)
    page, cells = TmemPage(0), np.zeros(ROWS * COLUMNS, np.int32)
    for number in range(1, 40):
        starts, size = pieces(choose)
        mine = ((starts >> 2)[:, None] + np.arange(size >> 2)).reshape(-1)
        before, first = [], {}
        for index in page.select(starts, size):
            ids, index = page.located(index)
            old = ids[index].copy()
            before += old.reshape(-1).tolist()
            for state in set(old.reshape(-1).tolist()) - set(first):
                first[state] = page.address(index, int(np.argmax(old == state)))
            ids[index] = number
        assert set(before) == set(cells[mine].tolist())
        assert first == {s: 4 * int(mine[np.argmax(cells[mine] == s)]) for s in set(before)}
        cells[mine] = number
    whole = {page.address(slice(0, len(page.ids)), k): n for k, n in enumerate(page.ids.tolist())}
    assert all(cells[address // 4] == number for address, number in whole.items())
