"""check=True: what is in the result, memory that nobody wrote, orders that decide a result."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from tests.check.checked_run import Program, check, judge
from tests.kernel_run import TID, Recorder, load, setup, source, store

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.cli.report import finding_lines, is_failure
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.errors import DeadlockError
from ptxemu.launch_log import Log
from ptxemu.memory.global_memory import GlobalMemory

# `check=True`: findings in the result, other observers still hear, errors carry what was found.

RACE = TID + "mov.u32 %r1, smem;\nst.shared.b32 [%r1], %r0;\n"
DEADLOCK = RACE + "setp.lt.u32 %p0, %r0, 32;\n@%p0 bra END;\nbar.sync 1, 64;\nEND:\n"
REVERSE = (
    TID
    + """shl.b32 %r1, %r0, 2;
mov.u32 %r2, smem; add.u32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0; bar.sync 0;
xor.b32 %r4, %r1, 252; add.u32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];
mul.wide.u32 %rd0, %r0, 4; add.s64 %rd1, %rd_out, %rd0; st.global.b32 [%rd1], %r5;
"""
)


def test_without_check_there_are_no_findings() -> None:
    assert api.load(source(RACE, shared=64)).launch("k", 1, 64).findings == []


def test_findings_are_in_the_result_and_the_observer_hears_too() -> None:
    recorder = Recorder()
    result = api.load(source(RACE, shared=64)).launch("k", 1, 64, check=True, observer=recorder)
    (finding,) = result.findings
    assert isinstance(finding, Finding)
    assert (finding.code, finding.level) == ("race", "error")
    assert len(recorder.accesses) == 2


def test_a_deadlock_carries_what_was_found_until_then() -> None:
    with pytest.raises(DeadlockError) as caught:
        api.load(source(DEADLOCK, shared=64)).launch("k", 1, 64, check=True)
    assert [finding.code for finding in caught.value.findings] == ["race"]


def test_checking_changes_no_result() -> None:
    module = api.load(source(REVERSE, ["out"], shared=256))
    for checked in (False, True):
        out = np.zeros(64, np.uint32)
        assert module.launch("k", 1, 64, args=[out], check=checked).findings == []
        assert (out == np.arange(64)[::-1]).all()


def test_clusters_that_are_gone_leave_nothing_behind_but_their_findings() -> None:
    own = "mov.u32 %r6, %ctaid.x;\nmul.wide.u32 %rd2, %r6, 256;\nadd.s64 %rd_out, %rd_out, %rd2;\n"
    module = api.load(source(own + REVERSE, ["out"], shared=256))
    out = np.zeros(400 * 64, np.uint32)
    assert module.launch("k", 400, 64, args=[out], check=True).findings == []
    assert (out.reshape(400, 64) == np.arange(64)[::-1]).all()


# A launch that may begin before the end of the launch before, which writes `a`.

FIRST = TID + store("a", "%r0") + "griddepcontrol.launch_dependents;"
GRID_WAIT = "griddepcontrol.wait; "


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (GRID_WAIT + load("%r1", "a"), []),
        (load("%r1", "a") + GRID_WAIT, ["missing-grid-wait"]),
        (store("a", "%r0") + GRID_WAIT, ["missing-grid-wait"]),
        (load("%r1", "b") + GRID_WAIT, []),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 griddepcontrol.wait; bar.sync 0;" + load("%r1", "a"), []),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 griddepcontrol.wait;" + load("%r1", "a"),
         ["missing-grid-wait"]),
    ],
)  # fmt: skip
def test_a_launch_waits_for_what_the_one_before_writes(body: str, expected: list[str]) -> None:
    args = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    first = api.load(source(FIRST, ["a", "b"])).launch("k", 1, 64, args=args, check=True)
    assert first.findings == [] and first.earlier is not None
    module = api.load(source(TID + body, ["a", "b"]))
    found = module.launch("k", 1, 64, args=args, check=True, earlier=first.earlier).findings
    assert [finding.code for finding in found] == expected
    assert module.launch("k", 1, 64, args=args, check=True).findings == []
    assert module.launch("k", 1, 64, args=args, check=True).earlier is None


def test_a_log_knows_the_launch_before() -> None:
    args = (np.zeros(64, np.uint32), np.zeros(64, np.uint32))
    first = setup(source(FIRST, ["a", "b"]), args)
    second = setup(source(TID + load("%r1", "a"), ["a", "b"]), args)
    log = Log()
    for one, is_programmatic in ((first, False), (second, True), (first, True), (second, False)):
        log.run(one, is_programmatic=is_programmatic)
    assert [finding.code for finding in log.findings] == ["missing-grid-wait"]


# Memory of the device that nobody has written, and that a kernel reads.

PAGE = 4096
READ = TID + load("%r1", "a") + store("b", "%r1")
WRITE = TID + store("a", "%r0") + "bar.sync 0;\n"


@pytest.fixture
def device() -> Iterator[EmulatedMemory]:
    with closing(EmulatedMemory(7)) as memory:
        memory.allocated(memory.base, 4 * PAGE, 0)
        memory.allocated(memory.base + 4 * PAGE, 4 * PAGE, 0)
        yield memory


def findings(device: EmulatedMemory, body: str, *, offset: int = 0) -> list[Finding]:
    """Launch on the two allocations, `a` from an offset on."""
    memory = GlobalMemory()
    device.register_in(memory)
    args = [device.base + offset, device.base + 4 * PAGE]
    module = api.load(source(body, ("a", "b")))
    return module.launch("k", 1, 64, args=args, memory=memory, check=True).findings


@pytest.mark.usefixtures("judged_by")
def test_a_read_of_memory_that_nobody_wrote_is_a_warning(device: EmulatedMemory) -> None:
    dropped = TID + load("%r1", "a") + "and.b32 %r1, %r1, 0;" + store("b", "%r1")
    (found,) = findings(device, dropped)
    assert (found.code, found.level) == ("uninitialised-read", "warning")
    assert "of global memory 0x27" in found.message and "nobody has written" in found.message


@pytest.mark.parametrize("is_new", [False, True])
def test_a_result_that_depends_on_it_is_an_error(device: EmulatedMemory, is_new: bool) -> None:
    """`b`, which maybe nobody wrote either, and `a` are then as one run leaves them."""
    output = device.view(device.base + 4 * PAGE, 256)
    if not is_new:
        output[:] = 1
    warning, error = findings(device, READ)
    assert (error.code, error.level) == ("uninitialised-result", "error") != warning.code
    assert "cudaMalloc #1 (16384 bytes) at byte 0 depends on" in error.message
    assert not output.any() and not device.view(device.base, 256).any()


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("bits", "is_padding"),
    [("0xffffff00", True), ("0xffff0000", True), ("0xff", False), ("0x7fffff00", False)],
)
def test_what_is_copied_behind_a_words_first_byte_is_padding(
    device: EmulatedMemory, bits: str, is_padding: bool, is_new: bool
) -> None:
    """As of a struct of a char and an int; a byte that is widened comes first."""
    if not is_new:
        device.view(device.base + 4 * PAGE, 256)[:] = 1
    mixed = f"and.b32 %r1, %r1, {bits}; or.b32 %r1, %r1, %r0;\n"
    found = findings(device, TID + load("%r1", "a") + mixed + store("b", "%r1"))
    assert ("uninitialised-result" in [f.code for f in found]) != is_padding


TO = "mad.wide.u32 %rd1, %r0, 64, %rd_b;\n"
LOST = "and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; @!%p0 mov.u32 %r2, %r1;\n"


@pytest.mark.parametrize(
    ("stores", "is_padding"),
    [  # %r1 is what nobody wrote, %r0 and %r2 are known
        ("st.global.v4.u32 [%rd1], {%r0, %r0, %r0, %r1};", True),
        ("st.global.v2.u32 [%rd1], {%r1, %r0};", True),
        ("st.global.u32 [%rd1], %r0; st.global.v4.u8 [%rd1+4], {%r1, %r1, %r1, %r1};", True),
        ("st.global.v4.u32 [%rd1+16], {%r1, %r1, %r1, %r1}; st.global.u32 [%rd1+12], %r0;", True),
        ("st.global.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};", False),
        ("st.global.v4.u32 [%rd1+16], {%r1, %r1, %r1, %r1}; st.global.u32 [%rd1+8], %r0;", False),
        ("add.u32 %r1, %r1, 1; st.global.v2.u32 [%rd1], {%r0, %r1};", False),
        (f"{LOST} mad.wide.u32 %rd1, %r0, 16, %rd_b; st.global.v4.u32 [%rd1], "
         "{%r2, %r2, %r2, %r2};", False),
        ("st.global.u32 [%rd1], %r0; atom.global.exch.b32 %r4, [%rd1+4], %r1;", False),
        ("mov.u32 %r3, 0; mov.u32 %r2, %r0; L: st.global.u32 [%rd1], %r2; mov.u32 %r2, %r1;"
         "add.s64 %rd1, %rd1, 4; add.u32 %r3, %r3, 1; setp.lt.u32 %p0, %r3, 2; @%p0 bra L;", False),
    ],
)  # fmt: skip
def test_what_a_thread_copies_beside_what_is_known_is_padding(
    device: EmulatedMemory, stores: str, is_padding: bool
) -> None:
    """As of a struct whose padding fills words or vectors; not a row of a tile that is lost."""
    body = f"{TID}{TO}ld.global.u32 %r1, [%rd_a]; mov.u32 %r2, %r0;\n{stores}\n"
    codes = [f.code for f in findings(device, body)]
    assert "uninitialised-read" in codes
    assert ("uninitialised-result" in codes) != is_padding


@pytest.mark.usefixtures("judged_by")
def test_what_the_host_an_earlier_kernel_or_the_kernel_itself_wrote_is_there(
    device: EmulatedMemory,
) -> None:
    device.view(device.base, 256)[:] = 1
    assert findings(device, READ) == []
    assert findings(device, WRITE + READ, offset=PAGE) == []
    assert findings(device, READ, offset=PAGE) == []
    assert "uninitialised-result" in [f.code for f in findings(device, READ, offset=2 * PAGE)]


def test_other_kinds_of_memory_begin_as_zeros(device: EmulatedMemory) -> None:
    for kind in (1, 2):
        device.allocated(device.base, 4 * PAGE, kind)
        assert findings(device, READ) == []


def test_blank_is_what_lies_on_untouched_pages(device: EmulatedMemory) -> None:
    device.view(device.base + PAGE + 100, 4)[:] = 1
    memory = GlobalMemory()
    device.register_in(memory)
    first = [(a - device.base, b - device.base) for a, b in memory.blank]
    assert first == [(0, PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 8 * PAGE)]


def test_arrays_of_the_caller_are_written() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    module = api.load(source(READ, ("a", "b")))
    assert module.launch("k", 1, 64, args=[a, b], check=True).findings == []


# What the order of relaxed accesses decides: old values read as data, sums of floats.

ADD = "red.relaxed.gpu.global.add.u32 [%rd_x], 1;\n"
LOAD = "ld.relaxed.gpu.global.b32 %r6, [%rd_x];\n"
CTA = "mov.u32 %r9, %ctaid.x;\nsetp.eq.u32 %p9, %r9, 0;\n"


STALE, SUMS = "note stale-read", "note unordered-float-additions"
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
    "a flag, asked once": (LOAD + "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra END;\n" + SEVEN, ""),
    "a bit of a flag": (
        LOAD + "and.b32 %r6, %r6, 1;\nsetp.eq.u32 %p1, %r6, 0;\n@%p1 bra END;\n" + SEVEN,
        "",
    ),
    "a value that a loop waits for": (
        f"SPIN: {LOAD}setp.eq.u32 %p1, %r6, 0;\n@%p1 bra SPIN;\n{KEEP}",
        "",
    ),
    "the same with its exit in the middle": (
        f"SPIN: {LOAD}setp.ne.u32 %p1, %r6, 0;\n@%p1 bra DONE;\nnanosleep.u32 100;\nbra SPIN;\n"
        f"DONE: {KEEP}",
        "",
    ),
    "in a loop of another condition": (
        f"mov.u32 %r7, 3;\nSUM: {LOAD}add.u32 %r8, %r8, %r6;\nsub.u32 %r7, %r7, 1;\n"
        f"setp.ne.u32 %p1, %r7, 0;\n@%p1 bra SUM;\n{store('o', '%r8')}",
        STALE,
    ),
    "behind a fence.sc": ("fence.sc.gpu;\n" + LOAD + KEEP, ""),
    "volatile": (LOAD.replace("relaxed.gpu", "volatile") + KEEP, STALE),
}


ONE_LANE = "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra END;\nmov.f32 %f1, 0f00000000;\nmov.u32 %r1, 0;\n"
OWN_WORD = "mul.wide.u32 %rd1, %r0, 4;\nadd.s64 %rd1, %rd1, %rd_x;\n"
ADD_ONE = "mov.f32 %f1, 0f3F800000;\nred.global.add.f32 [%rd1], %f1;\n"
# The counter is complete in every run, as ptxemu's relaxed additions are never late.
BY_FLAG = f"""@!%p9 bra SPIN; {ADD} st.{{}}.gpu.global.b32 [%rd_x+4], 1; bra END;
SPIN: ld.acquire.gpu.global.b32 %r5, [%rd_x+4]; setp.eq.u32 %p1, %r5, 0; @%p1 bra SPIN;
{LOAD}{KEEP}END:
"""
PROGRAMS = {
    **{f"old {name}": Program(f"{ADD_AND_LEAVE}{body}END:\n", found)
       for name, (body, found) in READS.items()},
    "what a barrier orders is not old": Program(
        f"setp.lt.u32 %p1, %r0, 32;\n@%p1 {ADD}bar.sync 0;\n{LOAD}{KEEP}", "",
        {"grid": 1, "block": 64},
    ),
    # Zeros are added: a verdict that the values decide would say little of other values.
    **{f"unordered {add}": Program(f"{ONE_LANE}{add}\nEND:\n", SUMS)
       for add in ("red.global.add.f32 [%rd_x], %f1;", "atom.global.add.f32 %f2, [%rd_x], %f1;",
                   "red.global.add.noftz.bf16x2 [%rd_x], %r1;", "red.global.add.f64 [%rd_x], %fd1;",
                   "red.global.v2.f32.add [%rd_x], {%f1, %f1};")},
    "lanes that add to numbers of their own": Program(OWN_WORD + ADD_ONE, "", {"grid": 1}),
    "lanes that add to one number": Program(
        "and.b32 %r1, %r0, 1;\n" + OWN_WORD.replace("%r0", "%r1") + ADD_ONE, SUMS, {"grid": 1}
    ),
    # A warp's own additions are in its order, and what it reads has them.
    "an old read of its own bytes": Program(f"@%p9 bra END;\n{ADD}{LOAD}{KEEP}END:\n"),
    "extremes and exchanges": Program(
        ONE_LANE + "red.global.max.s32 [%rd_x], %r1;\natom.global.exch.b32 %r2, [%rd_x+4], %r1;\n"
        "END:\n"
    ),
    "wrong on no schedule, and found by its order": Program(
        BY_FLAG.format("relaxed"), f"{STALE}, note weak-order"
    ),
    "the same behind a release": Program(BY_FLAG.format("release")),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_order_decides(name: str) -> None:
    body, found, how = PROGRAMS[name]
    judge(Program(TID + CTA + body, found, {"grid": 2, "x": 32, "o": 64, **how}))


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
