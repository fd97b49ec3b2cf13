"""Litmus tests of classical CUDA: the PTX memory model's verdict of a program, and ptxemu's.

Each thread of a program is a CTA's (or a warp's) first. `x` and `y` are data, `f` and `g` flags;
all are 0 at first.
"""

from typing import NamedTuple


class Litmus(NamedTuple):
    """One program."""

    name: str
    threads: tuple[str, ...]
    """PTX of each thread."""
    model: str
    """The PTX model's verdict: ordered, race, or what outcome is allowed."""
    codes: frozenset[str]
    """ptxemu's errors and warnings, and its notes of old values and of the order of additions."""
    warps: bool = False
    """The threads are warps of one CTA, not CTAs."""
    block: int = 32


def codes(*names: str) -> frozenset[str]:
    """A set of codes."""
    return frozenset(names)


CLEAN = codes()
RACE = codes("race")


def spin(load: str = "ld.acquire.gpu.global.b32", flag: str = "f", value: int = 1) -> str:
    """Wait until a flag has a value; the label is made unique later."""
    look = f"SPIN{flag}@: {load} %r5, [%rd_{flag}];\nsetp.ne.u32 %p1, %r5, {value};\n"
    return f"{look}@%p1 bra SPIN{flag}@;\n"


WRITE = "st.global.b32 [%rd_x], 7;\n"
READ = "ld.global.b32 %r6, [%rd_x];\n"
RELEASE = "st.release.gpu.global.b32 [%rd_f], 1;\n"
RELAXED = "st.relaxed.gpu.global.b32 [%rd_f], 1;\n"
STORE = "st.relaxed.gpu.global.b32 [%rd_f], 2;\n"
LOOK_AGAIN = "ld.acquire.gpu.global.b32 %r5, [%rd_f];\n"
TOLD = "st.relaxed.gpu.global.b32 [%rd_g], 1;\n"
SPIN_TOLD = spin("ld.relaxed.gpu.global.b32", "g")
VOLATILE = "st.volatile.global.b32 [%rd_x],"
RED = "red.relaxed.gpu.global.add.u32 [%rd_f], 1;\n"
ATOM = "atom.relaxed.gpu.global.add.u32 %r5, [%rd_f], 1;\n"
SPIN_RELAXED = spin("ld.relaxed.gpu.global.b32")
FENCE = "fence.acq_rel.gpu;\n"
MEMBAR = "membar.gl;\n"
BAR = "bar.sync 0;\n"
FIRST = "@!%p0 bra SKIP@;\n"
SKIP = "SKIP@:\n"
TICKET = "atom.global.add.u32 %r5, [%rd_f], 1;\n"
LAST = (
    "mov.u32 %r8, smem;\n"
    + FIRST
    + TICKET
    + "st.shared.b32 [%r8], %r5;\n"
    + SKIP
    + BAR
    + "ld.shared.b32 %r5, [%r8];\nsetp.eq.u32 %p2, %r5, 0;\n@%p2 bra OUT@;\n"
)
"""Thread 0 takes a ticket; the CTA with the first one leaves."""


def last_block(fence: str, behind: str = "", *, after: str, end: str = "") -> tuple[str, str]:
    """Every thread writes, `fence`; barrier; `behind` by thread 0, its ticket; the last reads.

    Args:
        after: the fence before the last block reads what the others wrote.
        end: what the last block does then.
    """
    write = "shl.b32 %r1, %r0, 2;\nadd.u32 %r1, %r1, {0};\ncvt.u64.u32 %rd0, %r1;\n"
    write += "add.s64 %rd1, %rd_x, %rd0;\nst.global.b32 [%rd1], %r0;\n"
    read = "".join(f"ld.global.b32 %r6, [%rd_x+{4 * n}];\n" for n in range(0, 128, 16))
    rest = fence + BAR + behind + LAST + after + read + end + "OUT@:\n"
    return write.format(0) + rest, write.format(256) + rest


def lock(take: str, behind: str, before: str, give: str) -> str:
    """A spin lock around an increment of x."""
    return (
        f"TAKE@: {take} %r5, [%rd_f], 0, 1;\nsetp.ne.u32 %p1, %r5, 0;\n@%p1 bra TAKE@;\n{behind}"
        f"ld.global.b32 %r6, [%rd_x];\nadd.u32 %r6, %r6, 1;\nst.global.b32 [%rd_x], %r6;\n"
        f"{before}{give}\n"
    )


CAS = "atom.global.cas.b32"
EXCHANGE = "atom.global.exch.b32 %r7, [%rd_f], 0;"
KEEP = "mul.wide.u32 %rd2, %r10, 4;\nadd.s64 %rd2, %rd2, %rd_y;\nst.global.b32 [%rd2+64], %r6;\n"
"""What the thread read is a result."""
EXCHANGE_DATA = "atom.relaxed.gpu.global.exch.b32 %r5, [%rd_x], 1;\n"
GIVE = "st.volatile.global.b32 [%rd_f], 0;"
LOOK = "ld.relaxed.gpu.global.b32 %r6, [%rd_{0}];\n"
SB = "st.relaxed.gpu.global.b32 [%rd_{0}], 1;\n{2}" + LOOK.format("{1}") + KEEP
LB = LOOK.format("{1}") + "st.relaxed.gpu.global.b32 [%rd_{0}], 1;\n" + KEEP
STALE = codes("stale-read")
NOTED = codes("unordered-float-additions")
ADD_FLOAT = "mov.f32 %f0, 0f3F800000;\nred.global.add.f32 [%rd_x], %f0;\n"


def reset(before: str = "", behind: str = "", threads: int = 2) -> tuple[str, ...]:
    """Each thread takes a ticket; the one with the last resets the counter by a plain store."""
    taken = f"{before}{TICKET}setp.ne.u32 %p1, %r5, {threads - 1};\n@%p1 bra SKIP@;\n{behind}"
    return (taken + "st.global.b32 [%rd_f], 0;\n" + SKIP,) * threads


RESET = "@%p0 st.global.b32 [%rd_f], 0;\n"
NARROW = FENCE.replace("gpu", "cta")

TABLE = [
    Litmus("message passing, plain flag", (WRITE + "st.global.b32 [%rd_f], 1;\n",
           spin("ld.volatile.global.b32") + READ), "race", codes("race", "mixed-race")),
    Litmus("message passing, relaxed flag, no fence", (WRITE + RELAXED, SPIN_RELAXED + READ),
           "race", RACE),
    Litmus("message passing of a counter, all relaxed",
           ("red.relaxed.gpu.global.add.u32 [%rd_x], 1;\n" + RELAXED,
            SPIN_RELAXED + LOOK.format("x") + KEEP), "the counter may be old", STALE),
    Litmus("message passing of a counter, release and acquire",
           ("red.relaxed.gpu.global.add.u32 [%rd_x], 1;\n" + RELEASE,
            spin() + LOOK.format("x") + KEEP), "ordered", CLEAN),
    Litmus("a counter that nothing orders",
           ("red.relaxed.gpu.global.add.u32 [%rd_x], 1;\n", LOOK.format("x") + KEEP),
           "the counter may be old", STALE),
    Litmus("message passing, release and acquire", (WRITE + RELEASE, spin() + READ),
           "ordered", CLEAN),
    Litmus("message passing, release without acquire", (WRITE + RELEASE, SPIN_RELAXED + READ),
           "race", RACE),
    Litmus("message passing, relaxed flag between fences",
           (WRITE + FENCE + RELAXED, SPIN_RELAXED + FENCE + READ), "ordered", CLEAN),
    Litmus("message passing, volatile flag between membar's",
           (WRITE + MEMBAR + "st.volatile.global.b32 [%rd_f], 1;\n",
            spin("ld.volatile.global.b32") + MEMBAR + READ), "ordered", CLEAN),
    Litmus("volatile data that two write", (f"{VOLATILE} %r10;\n",) * 2,
           "no race, but one in CUDA C++", codes("volatile-race")),
    Litmus("volatile data that two write alike", (f"{VOLATILE} 7;\n",) * 2, "ordered", CLEAN),
    Litmus("volatile data that one writes and one reads",
           (f"{VOLATILE} 7;\n", "ld.volatile.global.b32 %r6, [%rd_x];\n" + KEEP),
           "no race, but one in CUDA C++", codes("volatile-race")),
    Litmus("message passing of volatile data, membar.cta between CTAs",
           (f"{VOLATILE} 7;\n" + MEMBAR + "st.volatile.global.b32 [%rd_f], 1;\n",
            spin("ld.volatile.global.b32") + "membar.cta;\n"
            + "ld.volatile.global.b32 %r6, [%rd_x];\n" + KEEP),
           "the data may be old", codes("volatile-race")),
    Litmus("message passing of volatile data, volatile flag between membar's",
           (f"{VOLATILE} 7;\n" + MEMBAR + "st.volatile.global.b32 [%rd_f], 1;\n",
            spin("ld.volatile.global.b32") + MEMBAR
            + "ld.volatile.global.b32 %r6, [%rd_x];\n" + KEEP), "ordered", CLEAN),
    Litmus("a volatile flag that goes back and forth",
           ("st.volatile.global.b32 [%rd_f], 1;\n" + spin("ld.volatile.global.b32", value=2),
            spin("ld.volatile.global.b32") + "st.volatile.global.b32 [%rd_f], 2;\n"),
           "ordered", CLEAN),
    Litmus("a volatile store and an exchange", (f"{VOLATILE} 7;\n", EXCHANGE_DATA),
           "no race, but one in CUDA C++", codes("volatile-race")),
    Litmus("a volatile store and an exchange between warps", (f"{VOLATILE} 7;\n", EXCHANGE_DATA),
           "no race, but one in CUDA C++", codes("volatile-race"), warps=True),
    Litmus("a volatile store, a volatile flag between membar's, an exchange",
           (f"{VOLATILE} 7;\n" + MEMBAR + "st.volatile.global.b32 [%rd_f], 1;\n",
            spin("ld.volatile.global.b32") + MEMBAR + EXCHANGE_DATA), "ordered", CLEAN),
    Litmus("message passing, .cta scope between CTAs",
           (WRITE + RELEASE.replace("gpu", "cta"), spin("ld.acquire.cta.global.b32") + READ),
           "race", codes("race", "scope-race")),
    Litmus("message passing, .cta scope between warps",
           (WRITE + RELEASE.replace("gpu", "cta"), spin("ld.acquire.cta.global.b32") + READ),
           "ordered", CLEAN, warps=True),
    Litmus("release sequence: an atomic between release and acquire",
           (WRITE + RELEASE, SPIN_RELAXED + "red.relaxed.gpu.global.add.u32 [%rd_f], 1;\n",
            spin(value=2) + READ), "ordered", CLEAN),
    Litmus("no release sequence: a store between release and acquire",
           (WRITE + RELEASE, SPIN_RELAXED + STORE + TOLD, SPIN_TOLD + LOOK_AGAIN + READ),
           "race", RACE),
    Litmus("a store between the release and the acquire, a strong read before it",
           (WRITE + RELEASE, SPIN_TOLD + STORE + TOLD.replace("rd_g", "rd_y"),
            SPIN_RELAXED + TOLD + SPIN_TOLD.replace("_g", "_y").replace("SPINg", "SPINy")
            + LOOK_AGAIN + READ), "ordered", CLEAN),
    Litmus("three threads, release and acquire twice",
           (WRITE + RELEASE, spin() + RELEASE.replace("rd_f", "rd_g"), spin(flag="g") + READ),
           "ordered", CLEAN),
    Litmus("last block: membar.gl, barrier, atomic; barrier, membar.gl",
           last_block(MEMBAR, after=MEMBAR), "ordered", CLEAN, block=64),
    Litmus("last block: fence.acq_rel before the barrier only",
           last_block(FENCE, after=FENCE), "race", RACE, block=64),
    Litmus("last block: fence.acq_rel by thread 0 behind the barrier",
           last_block("", FENCE, after=FENCE), "race", RACE, block=64),
    Litmus("last block: the same with membar.gl, read behind membar.gl",
           last_block("", MEMBAR, after=MEMBAR), "ordered", CLEAN, block=64),
    Litmus("last block: no fence", last_block("", after=MEMBAR), "race", RACE, block=64),
    Litmus("last block: no fence before the reads", last_block(MEMBAR, after=""), "race", RACE,
           block=64),
    Litmus("last block: membar.gl, barrier, atomic; it resets the counter by a plain store",
           last_block(MEMBAR, after=MEMBAR, end=RESET), "ordered", CLEAN, block=64),
    Litmus("a counter that the last of two resets", reset(), "ordered", CLEAN),
    Litmus("a counter that the last of three resets", reset(threads=3), "ordered", CLEAN),
    Litmus("a counter that the last resets, behind a fence", reset(behind=FENCE), "ordered", CLEAN),
    Litmus("a counter that the last resets, and each has read before",
           reset(READ.replace("rd_x", "rd_f")), "race", codes("race", "mixed-race")),
    Litmus("a relaxed store that an atomic observes, then a plain store", (RELAXED,
           "TAKE@: atom.relaxed.gpu.global.cas.b32 %r5, [%rd_f], 1, 2;\nsetp.ne.u32 %p1, %r5, 1;\n"
           "@%p1 bra TAKE@;\nst.global.b32 [%rd_f], 0;\n"), "ordered", CLEAN),
    Litmus("release fences of gpu scope, then of cta scope",
           (WRITE + FENCE + NARROW + RELAXED, spin() + READ), "ordered", CLEAN),
    Litmus("release fences of cta scope, then of gpu scope",
           (WRITE + NARROW + FENCE + RELAXED, spin() + READ), "ordered", CLEAN),
    Litmus("release fence of sys scope between narrower ones",
           (WRITE + FENCE + FENCE.replace("gpu", "sys") + NARROW + RELAXED, spin() + READ),
           "ordered", CLEAN),
    Litmus("release fences membar.gl, then fence.acq_rel.cta",
           (WRITE + MEMBAR + NARROW + RELAXED, spin() + READ), "ordered", CLEAN),
    Litmus("release fence of cta scope between CTAs", (WRITE + NARROW + RELAXED, spin() + READ),
           "race", RACE),
    *(Litmus(f"acquire fence {kind}.cta between CTAs",
             (WRITE + FENCE + RELAXED, SPIN_RELAXED + f"fence.{kind}.cta;\n" + READ), "race", RACE)
      for kind in ("acq_rel", "sc", "acquire")),
    Litmus("membar.cta at the reader, as __threadfence_block() between blocks",
           (WRITE + MEMBAR + RELAXED, SPIN_RELAXED + "membar.cta;\n" + READ), "race", RACE),
    Litmus("acquire fences of cta scope, then of gpu scope",
           (WRITE + FENCE + RELAXED, SPIN_RELAXED + NARROW + FENCE + READ), "ordered", CLEAN),
    Litmus("a release, then a relaxed store of the same flag",
           (WRITE + RELEASE + STORE, spin(value=2) + READ), "ordered", CLEAN),
    Litmus("red, then a fence: no acquire",
           (WRITE + RELEASE + TOLD, SPIN_TOLD + RED + FENCE + READ), "race", RACE),
    Litmus("atom, then a fence: an acquire",
           (WRITE + RELEASE + TOLD, SPIN_TOLD + ATOM + FENCE + READ), "ordered", CLEAN),
    Litmus("an atomic of cta scope of another CTA between release and acquire",
           (WRITE + RELEASE, SPIN_RELAXED + RED.replace("gpu", "cta") + TOLD,
            SPIN_TOLD + LOOK_AGAIN + READ), "race", codes("race", "scope-race")),
    Litmus("a release of 8 bytes, an acquire of 4",
           (WRITE + "mov.u64 %rd9, 1;\nst.release.gpu.global.b64 [%rd_f], %rd9;\n", spin() + READ),
           "race", RACE),
    Litmus("spin lock, acquire and release",
           (lock("atom.acquire.gpu.global.cas.b32", "", "",
                 "atom.release.gpu.global.exch.b32 %r7, [%rd_f], 0;"),) * 2, "ordered", CLEAN),
    Litmus("spin lock, relaxed between membar's", (lock(CAS, MEMBAR, MEMBAR, EXCHANGE),) * 2,
           "ordered", CLEAN),
    Litmus("spin lock, given back by a volatile store between membar's",
           (lock(CAS, MEMBAR, MEMBAR, GIVE),) * 2, "ordered", CLEAN),
    Litmus("spin lock, given back by a volatile store and by an exchange",
           (lock(CAS, MEMBAR, MEMBAR, GIVE), lock(CAS, MEMBAR, MEMBAR, EXCHANGE)),
           "ordered", CLEAN),
    Litmus("spin lock, no membar before it is given back", (lock(CAS, MEMBAR, "", EXCHANGE),) * 2,
           "race", RACE),
    Litmus("spin lock, no membar behind its taking", (lock(CAS, "", MEMBAR, EXCHANGE),) * 2,
           "race", RACE),
    Litmus("store buffering, relaxed", (SB.format("x", "y", ""), SB.format("y", "x", "")),
           "both may read 0", STALE),
    Litmus("store buffering, fence.sc", (SB.format("x", "y", "fence.sc.gpu;\n"),
           SB.format("y", "x", "fence.sc.gpu;\n")), "ordered", CLEAN),
    Litmus("load buffering, relaxed", (LB.format("x", "y"), LB.format("y", "x")),
           "both may read 1", STALE),
    Litmus("store buffering, plain",
           tuple(SB.format(*names, "").replace(".relaxed.gpu", "") for names in ("xy", "yx")),
           "race", RACE),
    Litmus("a plain store and atomics on one word",
           ("st.global.b32 [%rd_x], 0;\nred.global.add.u32 [%rd_x], 1;\n",
            "red.global.add.u32 [%rd_x], 1;\n"), "race", codes("lost-update")),
    Litmus("atomics of .cta scope from two CTAs",
           ("red.relaxed.cta.global.add.u32 [%rd_x], 1;\n",) * 2, "race", codes("scope-race")),
    Litmus("additions of floats from two CTAs", (ADD_FLOAT,) * 2, "in any order", NOTED),
    Litmus("additions of floats, release and acquire between them",
           (ADD_FLOAT + RELEASE, spin() + ADD_FLOAT), "ordered", CLEAN),
    Litmus("additions of floats, a relaxed flag between them",
           (ADD_FLOAT + RELAXED, SPIN_RELAXED + ADD_FLOAT), "in any order", NOTED),
    Litmus("additions of integers from two CTAs",
           ("red.global.add.u32 [%rd_x], 1;\n",) * 2, "in any order, one sum", CLEAN),
    Litmus("ld.global.nc of what the kernel wrote",
           (WRITE + RELEASE, spin() + READ.replace("global", "global.nc")), "undefined",
           codes("non-coherent-read")),
]  # fmt: skip


def program(test: Litmus) -> str:
    """The body (`kernel_run.source`) of all threads."""
    which = "%r9" if test.warps else "%ctaid.x"
    body = ["mov.u32 %r0, %tid.x;\nsetp.eq.u32 %p0, %r0, 0;\nshr.u32 %r9, %r0, 5;\n"]
    body.append(f"mov.u32 %r10, {which};\n")
    for number, thread in enumerate(test.threads):
        body.append(f"setp.ne.u32 %p3, %r10, {number};\n@%p3 bra NEXT{number};\n")
        # One lane of each thread's warp, but for programs of whole CTAs.
        if test.block == 32:
            body.append("mov.u32 %r11, %laneid;\nsetp.ne.u32 %p4, %r11, 0;\n@%p4 bra END;\n")
        body.append(thread.replace("@:", f"_{number}:").replace("@;", f"_{number};"))
        body.append(f"bra END;\nNEXT{number}:\n")
    return "".join(body) + "END:\n"
