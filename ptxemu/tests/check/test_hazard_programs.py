"""Programs that lack one instruction: one finding under every schedule; with it, silence."""

from typing import Any, NamedTuple

import pytest
from tests.check.checked_run import check
from tests.kernel_run import TID, store

from ptxemu.check import Finding
from ptxemu.sched.policy import Policy

POLICIES = [
    Policy(asynchronous="eager", warps="round_robin"),
    Policy(asynchronous="late", warps="round_robin"),
    Policy(seed=1),
    Policy(seed=2),
]

ELECT = """
mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; shr.u32 %r9, %r0, 5; setp.eq.u32 %p1, %r9, 0;
setp.eq.u32 %p2, %r9, 1; mov.u32 %r1, smem; add.u32 %r2, %r1, 1024; shl.b32 %r3, %r0, 2;
add.u32 %r4, %r2, %r3;
"""
"""%p0: thread 0; %p1, %p2: warp 0, 1; %r1: the mbarrier; %r2: the buffer; %r4: a thread's word."""


def wait(parity: str = "0", label: str = "W", bar: str = "%r1") -> str:
    """A loop on try_wait."""
    return (
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p9, [{bar}], {parity};\n"
        f"@!%p9 bra {label};\n"
    )


def findings(
    body: str, *, grid: int = 1, block: int = 64, arch: str = "sm_90a", **how: Any
) -> list[Finding]:
    """Errors and warnings of a run; notes are left out."""
    text = {"arch": arch, "shared": 32 * 1024}
    found = check(body, grid=grid, cluster=grid, block=block, how=text, **how)
    return [f for f in found if f.level in ("error", "warning")]


BULK_STORE = (
    ELECT
    + """
st.shared.b32 [%r4], %r0;
FENCE
bar.sync 0; @!%p0 bra END; cp.async.bulk.global.shared::cta.bulk_group [%rd_out], [%r2], 256;
cp.async.bulk.commit_group;
WAIT_GROUP
st.shared.b32 [%r4], 99; cp.async.bulk.wait_group 0;
END:
"""
)


BULK_LOAD = (
    ELECT
    + """
@!%p0 bra READY; mbarrier.init.shared::cta.b64 [%r1], 1;
INIT_FENCE
READY: bar.sync 0; @!%p0 bra CONSUME; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_in], 256, [%r1];
CONSUME:
WAIT_MBARRIER
ld.shared.b32 %r5, [%r4];
"""
    + store("out", "%r5")
    + "LAST_WAIT"
)


DSMEM = (
    ELECT
    + """
st.shared.b32 [%r4], %r0; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p3, %r5, 0; @%p3 bra BEHIND;
mapa.shared::cluster.u32 %r6, %r4, 0; ld.shared::cluster.b32 %r7, [%r6];
BEHIND:
NEEDED
"""
)


MMA_HEAD = (
    ELECT
    + """
@!%p0 bra READY; mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
READY: @!%p1 bra ALLOCATED; add.u32 %r5, %r1, 64;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 64;
ALLOCATED: mov.u32 %r6, 0; mov.u32 %r7, %ntid.x; shl.b32 %r7, %r7, 2;
ZERO: st.shared.b32 [%r4], 0; add.u32 %r4, %r4, %r7; add.u32 %r6, %r6, %r7;
setp.lt.u32 %p4, %r6, 16384; @%p4 bra ZERO; fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.shared.b32 %r10, [%r1+64];
"""
)
"""64 threads: operands of zeros at %r2 (16 KiB), 64 columns at %r10."""

DESCRIPTOR = """
shr.u32 %r11, %r2, 4; and.b32 %r11, %r11, 16383; cvt.u64.u32 %rd0, %r11; or.b64 %rd0, %rd0, DESC;
mov.u32 %r12, IDESC;
"""
# K-major, 128B swizzle (2 in bits 61-63), version 1, SBO = 1024 bytes
_DESC = (2 << 61) | (1 << 46) | ((1024 >> 4) << 32)
# D f32, A and B bf16, N = 64, M = 64
_IDESC = (1 << 4) | (1 << 7) | (1 << 10) | ((64 >> 3) << 17) | ((64 >> 4) << 24)
DESCRIPTOR = DESCRIPTOR.replace("IDESC", str(_IDESC)).replace("DESC", str(_DESC))

COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];\n"
LOAD = "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r14, %r15, %r16, %r17}, [%r18];\n"
TAIL = """
bar.sync 0; @!%p1 bra GONE; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
GONE:
"""


def mma(accumulate: str = "%p8") -> str:
    return f"tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd0, %rd0, %r12, {accumulate};\n"


PREDICATES = "setp.ne.u32 %p8, 0, 0;\nsetp.eq.u32 %p7, 0, 0;\n"
READ_BACK = (
    "tcgen05.fence::after_thread_sync;\nand.b32 %r18, %r9, 3;\nshl.b32 %r18, %r18, 21;\n"
    "add.u32 %r18, %r10, %r18;\n" + LOAD + "tcgen05.wait::ld.sync.aligned;\n"
    "tcgen05.fence::before_thread_sync;\n"
)


class Case(NamedTuple):
    """A program that is silent with `needed` at NEEDED; without it there is one finding."""

    program: str
    needed: str
    code: str
    edge: str
    """A part of the finding's message."""
    opcodes: tuple[str, str | None]
    """Of the instructions at its two sites."""
    level: str = "error"
    how: dict[str, Any] = {}  # noqa: RUF012


IN_OUT = {"in": 64, "out": 64}
BULK_LOAD_OPCODE = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK_STORE_OPCODE = "cp.async.bulk.global.shared::cta.bulk_group"
INIT_FENCE = "fence.mbarrier_init.release.cluster;"
INIT_CASE = Case(
    BULK_LOAD.replace("INIT_FENCE", "NEEDED")
    .replace("WAIT_MBARRIER", wait())
    .replace("LAST_WAIT", ""),
    INIT_FENCE,
    "missing-mbarrier-init-fence",
    "needs fence.mbarrier_init",
    ("mbarrier.init.shared::cta.b64", BULK_LOAD_OPCODE),
    "warning",  # within a CTA and behind a barrier; kernels that ship do without it
    IN_OUT,
)
CASES = {
    "bar.sync between threads that exchange words": Case(
        ELECT
        + "st.shared.b32 [%r4], %r0;\nNEEDED\nxor.b32 %r5, %r3, 128;\nadd.u32 %r5, %r2, %r5;\n"
        + "ld.shared.b32 %r6, [%r5];\n"
        + store("out", "%r6"),
        "bar.sync 0;",
        "race",
        "needs a barrier",
        ("st.shared.b32", "ld.shared.b32"),
        how={"out": 64},
    ),
    "a flag in global memory needs a release": Case(
        ELECT
        + "@!%p0 bra OTHER;\nst.global.b32 [%rd_data], 7;\nNEEDED\n"
        + "st.relaxed.gpu.global.b32 [%rd_flag], 1;\nbra END;\nOTHER: @%p1 bra END;\n"
        + "SPIN: ld.acquire.gpu.global.b32 %r5, [%rd_flag];\nsetp.eq.u32 %p3, %r5, 0;\n"
        + "@%p3 bra SPIN;\nld.global.b32 %r6, [%rd_data];\nEND:",
        "fence.acq_rel.gpu;",
        "race",
        "a release and an acquire",
        ("st.global.b32", "ld.global.b32"),
        how={"data": 1, "flag": 1},
    ),
    "a proxy fence between stores and a bulk store": Case(
        BULK_STORE.replace("FENCE", "NEEDED").replace(
            "WAIT_GROUP", "cp.async.bulk.wait_group.read 0;"
        ),
        "fence.proxy.async.shared::cta;",
        "missing-proxy-fence",
        "needs fence.proxy.async",
        ("st.shared.b32", BULK_STORE_OPCODE),
        how={"out": 64},
    ),
    "wait_group.read before the source of a bulk store changes": Case(
        BULK_STORE.replace("FENCE", "fence.proxy.async;").replace("WAIT_GROUP", "NEEDED"),
        "cp.async.bulk.wait_group.read 0;",
        "missing-wait",
        "needs cp.async.bulk.wait_group.read",
        (BULK_STORE_OPCODE, "st.shared.b32"),
        how={"out": 64},
    ),
    "a wait on the mbarrier before a bulk load is read": Case(
        BULK_LOAD.replace("INIT_FENCE", INIT_FENCE)
        .replace("WAIT_MBARRIER", "NEEDED")
        .replace("LAST_WAIT", wait(label="L")),
        wait(),
        "missing-wait",
        "needs a wait on the mbarrier",
        (BULK_LOAD_OPCODE, "ld.shared.b32"),
        how=IN_OUT,
    ),
    "a fence between mbarrier.init and a bulk load that signals": INIT_CASE,
    "a proxy fence there": INIT_CASE._replace(needed="fence.proxy.async.shared::cta;"),
    "cp.async is waited for": Case(
        ELECT
        + "mul.wide.u32 %rd0, %r0, 4;\nadd.s64 %rd1, %rd_in, %rd0;\n"
        + "cp.async.ca.shared.global [%r4], [%rd1], 4;\ncp.async.commit_group;\nNEEDED\n"
        + "ld.shared.b32 %r5, [%r4];\n"
        + store("out", "%r5")
        + "cp.async.wait_all;",
        "cp.async.wait_group 0;",
        "missing-wait",
        "needs cp.async.wait_group",
        ("cp.async.ca.shared.global", "ld.shared.b32"),
        how=IN_OUT,
    ),
    "a cluster barrier between a DSMEM access and the exit": Case(
        DSMEM,
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
        "dsmem-exit",
        "may have exited: needs a cluster barrier",
        ("ld.shared::cluster.b32", None),
        how={"grid": 2},
    ),
    "a commit is waited for before the accumulator is loaded": Case(
        MMA_HEAD
        + DESCRIPTOR
        + PREDICATES
        + f"@!%p0 bra ISSUED;\n{mma()}{COMMIT}ISSUED:\nNEEDED\n"
        + READ_BACK
        + wait(label="L")
        + TAIL,
        wait(),
        "missing-wait",
        "needs tcgen05.commit and a wait on its mbarrier",
        ("tcgen05.mma.cta_group::1.kind::f16", "tcgen05.ld.sync.aligned.16x256b.x1.b32"),
        how={"arch": "sm_100a"},
    ),
}


pytestmark = pytest.mark.parametrize("policy", POLICIES, ids=["eager", "late", "seed1", "seed2"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_lacks_one_instruction_has_one_finding(case: Case, policy: Policy) -> None:
    assert findings(case.program.replace("NEEDED", case.needed), policy=policy, **case.how) == []
    (finding,) = findings(case.program.replace("NEEDED", ""), policy=policy, **case.how)
    assert (finding.code, finding.level) == (case.code, case.level)
    assert case.edge in finding.message
    sites = tuple(
        None if site is None else site.instruction.split(" ")[0]
        for site in (finding.first, finding.second)
    )
    assert sites == case.opcodes or (case.code == "race" and sites[::-1] == case.opcodes)


def test_fence_mbarrier_init_before_a_relaxed_cluster_barrier(policy: Policy) -> None:
    program = (
        ELECT
        + """
@!%p0 bra READY; mbarrier.init.shared::cta.b64 [%r1], 2;
NEEDED
READY: barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; @!%p0 bra WAITING;
mapa.shared::cluster.u32 %r6, %r1, 0;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
WAITING: mov.u32 %r5, %cluster_ctarank; setp.ne.u32 %p3, %r5, 0; @%p3 bra END;
"""
        + wait()
        + "END:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    )
    found = findings(program.replace("NEEDED", ""), policy=policy, grid=2)
    assert {f.code for f in found} == {"missing-mbarrier-init-fence", "race"}
    fence = "fence.mbarrier_init.release.cluster;"
    assert findings(program.replace("NEEDED", fence), policy=policy, grid=2) == []


def test_two_stages_that_are_refilled_behind_their_empty_barrier_are_silent(policy: Policy) -> None:
    """A producer warp, a consumer warp, full and empty mbarriers, six tiles over two stages."""
    program = (
        TID
        + """
mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0; @!%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r1], 1; mbarrier.init.shared::cta.b64 [%r1+8], 1;
mbarrier.init.shared::cta.b64 [%r1+16], 32; mbarrier.init.shared::cta.b64 [%r1+24], 32;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; mov.u32 %r20, 0; mov.u64 %rd5, %rd_in;
NEXT: and.b32 %r21, %r20, 1; shr.u32 %r22, %r20, 1; and.b32 %r22, %r22, 1; shl.b32 %r23, %r21, 3;
add.u32 %r10, %r1, %r23; add.u32 %r11, %r10, 16; shl.b32 %r24, %r21, 10; add.u32 %r12, %r1, %r24;
add.u32 %r12, %r12, 1024; setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER; @!%p0 bra DONE;
xor.b32 %r25, %r22, 1;
"""
        + wait("%r25", "E", "%r11")
        + """
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd5], 128, [%r10];
bra DONE;
CONSUMER:
FULL_WAIT
sub.u32 %r26, %r0, 32; shl.b32 %r26, %r26, 2; add.u32 %r27, %r12, %r26;
ld.shared.b32 %r28, [%r27]; add.u32 %r29, %r29, %r28;
RELEASE
DONE: add.u64 %rd5, %rd5, 128; add.u32 %r20, %r20, 1; setp.lt.u32 %p2, %r20, 6; @%p2 bra NEXT;
@!%p1 bra END; sub.u32 %r30, %r0, 32;
"""
        + store("out", "%r29", "%r30")
        + "END:"
    )
    release = "mbarrier.arrive.shared::cta.b64 _, [%r11];"
    full = wait("%r22", "F", "%r10")
    arrays = {"in": 6 * 32, "out": 32}
    complete = program.replace("FULL_WAIT", full).replace("RELEASE", release)
    # the consumer's loads are ordered before the refill, but in the generic proxy only
    (warning,) = findings(complete, policy=policy, **arrays)
    assert (warning.code, warning.level) == ("missing-proxy-fence-after-read", "warning")
    fenced = program.replace("FULL_WAIT", full).replace(
        "RELEASE", "fence.proxy.async.shared::cta;\n" + release
    )
    assert findings(fenced, policy=policy, **arrays) == []
    early = program.replace("FULL_WAIT", full + release).replace("RELEASE", "")
    assert {f.code for f in findings(early, policy=policy, **arrays) if f.level == "error"} & {
        "race",
        "missing-wait",
    }


@pytest.mark.parametrize("same_shape", [True, False])
def test_mmas_of_one_thread_are_in_order_only_with_the_same_shape(
    policy: Policy, same_shape: bool
) -> None:
    second = mma("%p7") if same_shape else mma("%p7").replace("%r12", "%r13")
    program = (
        MMA_HEAD
        + DESCRIPTOR
        + PREDICATES
        + f"mov.u32 %r13, {_IDESC - ((32 >> 3) << 17)};\n"
        + "@!%p0 bra ISSUED;\n"
        + mma()
        + second
        + COMMIT
        + "ISSUED:\n"
        + wait()
        + READ_BACK
        + TAIL
    )
    found = findings(program, policy=policy, arch="sm_100a")
    if same_shape:
        assert found == []
        return
    (finding,) = found
    assert (finding.code, finding.level) == ("unordered-mma", "error")
    assert "one accumulator" in finding.message


def test_wait_st_before_an_mma_accumulates_onto_what_was_stored(policy: Policy) -> None:
    program = (
        MMA_HEAD
        + DESCRIPTOR
        + PREDICATES
        + "and.b32 %r18, %r9, 3;\nshl.b32 %r18, %r18, 21;\nadd.u32 %r18, %r10, %r18;\n"
        + "mov.u32 %r14, 0;\n"
        + "".join(
            f"add.u32 %r19, %r18, {column};\n"
            "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r19], "
            "{%r14, %r14, %r14, %r14, %r14, %r14, %r14, %r14};\n"
            for column in range(0, 64, 8)
        )
        + "NEEDED\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        + "tcgen05.fence::after_thread_sync;\n@!%p0 bra ISSUED;\n"
        + mma("%p7")
        + COMMIT
        + "ISSUED:\n"
        + wait()
        + "tcgen05.wait::st.sync.aligned;\n"
        + TAIL
    )
    needed = "tcgen05.wait::st.sync.aligned;"
    assert (
        findings(program.replace("NEEDED", needed), policy=policy, arch="sm_100a", block=128) == []
    )
    found = findings(program.replace("NEEDED", ""), policy=policy, arch="sm_100a", block=128)
    assert {f.code for f in found} == {"missing-tcgen05-wait"}
    assert all("needs tcgen05.wait::st" in f.message for f in found)
