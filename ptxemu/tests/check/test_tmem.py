"""Tensor memory: loads that nobody waited for, pairs, its shadow, and two open reports."""

import random

import numpy as np
import pytest
from tests.check.checked_run import Program, check, judge
from tests.kernel_run import TID, store

from ptxemu.check.tmem_page import COLUMNS, ROWS, TmemPage

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
EARLY, MISSING = "warning tmem-load-used-early", "isa tmem-load-not-waited"
FREED_EARLY, NO_FENCE = "error tmem-dealloc-race", "note missing-tcgen05-fence"
# Tensor memory of a pair of CTAs: neither frees it while the other one still uses its own.
STARTED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n"
PAIR = (
    STARTED
    + """
mov.u32 %r5, %ctaid.x; mad.lo.u32 %r0, %r5, 32, %r0;
mov.u32 %r1, smem; tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1]; mov.u32 %r3, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
tcgen05.wait::ld.sync.aligned;
"""
)
MEET = """tcgen05.fence::before_thread_sync; barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned; tcgen05.fence::after_thread_sync;
"""
FREE = "tcgen05.dealloc.cta_group::{}.sync.aligned.b32 %r2, 32;\n"
FREED = FREE.format(2) + store("out", "%r4")
# The handovers that two open reports on CUTLASS are about, in programs of our own, of five warps;
# the first and the last have the same lanes.
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
HALF = "setp.ge.u32 %p4, %r0, 144;\n@%p4 bra TOLD;\n" + store("out", "%r4") + "TOLD:\n"
# A use by any lane holds the warp back on hardware, and not in the ISA; no use holds none.
FREES = f"{STORE}{STORED}bar.sync 1, 64;\n{HEAR}{FREE.format(1)}bra END;\n"
FREES += f"OTHER:\n@%p2 bra END;\nbar.sync 1, 64;\n{LOAD}"
# The store is waited for in both programs, as it is in the kernel: behind the next one.
PUBLISHED = f"bar.sync 1, 64;\n{FREE.format(1)}bra END;\nOTHER:\n@%p2 bra END;\n{HEAR}{LOAD}"
PUBLISHED += f"{LOADED}{store('out', '%r4')}bar.sync 1, 64;\n"
PROGRAMS = {
    **{
        f"{name} {when} the wait": Program(ALLOC + body, found)
        for name, use in USES.items()
        for when, body, found in (
            ("behind", WAIT + use + BARRIER + END, ""),
            ("and no arrival before", use + BARRIER + WAIT + END, f"{MISSING}, {EARLY}"),
        )
    },
    # The strangers' program, which was found clean, and what Triton 3.9 emits: the ISA keeps the
    # true dependency, and the wait comes before anything is handed on.
    "a use before the wait": Program(
        f"{ALLOC} add.u32 %r5, %r4, 1; {store('out', '%r5')}{WAIT}{END}", EARLY
    ),
    # NVVM packs and converts the registers of a load at once, and waits behind that.
    "arithmetic before the wait": Program(
        f"{ALLOC} mov.b64 %rd2, {{%r4, %r4}}; mov.b64 {{%r5, %r6}}, %rd2; add.u32 %r6, %r6, 1;"
        + WAIT + store("out", "%r6") + END
    ),
    **{
        f"a pair frees behind {name}": Program(PAIR + before + FREED + end, found,
                                               {"grid": 2, "cluster": 2})
        for name, before, end, found in (
            ("the last use of both", MEET, "", ""),
            ("its own use", "", "", FREED_EARLY),
            ("an arrival that nobody waits for", MEET.replace("barrier.cluster.wait.aligned;", ""),
             "barrier.cluster.wait.aligned;\n", FREED_EARLY),
        )
    },
    "a pair allocates before both are known to run": Program(
        PAIR.removeprefix(STARTED) + MEET + FREED, "isa tmem-alloc-entry",
        {"grid": 2, "cluster": 2},
    ),
    **{
        f"five warps: {name}": Program(f"{START}{body}END:\n", found, {"block": 160, "out": 160})
        for name, body, found in (
            ("freed behind a wait for the load", FREES + LOADED + HALF + TELL, NO_FENCE),
            ("freed behind a use of the load", FREES + HALF + TELL,
             f"{MISSING}, isa tmem-read-by-register, {NO_FENCE}, {EARLY}"),
            ("freed behind a load", FREES + TELL,
             f"{FREED_EARLY}, {NO_FENCE}, warning read-after-exit | "
             f"{FREED_EARLY}, error tmem-deallocated, warning read-after-exit"),
            ("published behind a wait for the store", STORE + STORED + TELL + PUBLISHED, NO_FENCE),
            ("published behind a store", STORE + TELL + STORED + PUBLISHED,
             f"error race | error race, {NO_FENCE}"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    body, found, how = PROGRAMS[name]
    judge(Program(TID + body, found, {"how": HOW, "out": 64, **how}))


def test_no_wait_at_all() -> None:
    found = check(TID + ALLOC + USES["a store"] + BARRIER, how=HOW, out=64)
    (finding,) = (f for f in found if f.code == "tmem-load-not-waited")
    assert finding.kind == "isa"
    assert "never waited for before arrival (bar.sync)" in finding.message


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
