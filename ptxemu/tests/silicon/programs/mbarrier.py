"""mbarrier: what waits answer after every step of a life; states are opaque and not compared."""

from collections.abc import Iterator

from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Program

PROBE = """
{{ .reg .pred %q0, %q1; .reg .b32 %n;
mbarrier.test_wait.parity.shared::cta.b64 %q0, [%s], 0; selp.u32 %n, 1, 0, %q0;
mbarrier.test_wait.parity.shared::cta.b64 %q1, [%s], 1; @%q1 or.b32 %n, %n, 2;
st.global.u32 [%out+{at}], %n; }}
"""
INIT = "mbarrier.init.shared::cta.b64 [%s], {0};"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%s];"

LIVES: dict[str, tuple[str, ...]] = {
    "phases": (INIT.format(2), *(ARRIVE,) * 7),
    "one": (INIT.format(1), *(ARRIVE,) * 4),
    "counts": (
        INIT.format(5),
        "mbarrier.arrive.shared.b64 %x0, [%s], 3;",
        "mbarrier.arrive.shared.b64 %x0, [%s], 2;",
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [%s], 5;",
        "mov.u32 %r5, 4; mbarrier.arrive.shared.b64 _, [%s], %r5;",
        ARRIVE,
    ),
    "transactions": (
        INIT.format(1),
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 128;",
        "mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%s], 64;",
        "mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%s], 64;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 16;",
        ARRIVE,
        "mbarrier.complete_tx.shared::cta.b64 [%s], 16;",
    ),
    "early_transactions": (
        INIT.format(1),
        "mbarrier.complete_tx.shared::cluster.b64 [%s], 48;",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], 64;",
        "mbarrier.complete_tx.shared::cta.b64 [%s], 16;",
        ARRIVE,
    ),
    "expect_only": (
        INIT.format(2),
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 32;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 16;",
        "mbarrier.arrive.shared.b64 _, [%s], 2;",
        "mbarrier.complete_tx.shared::cta.b64 [%s], 32;",
        "mbarrier.complete_tx.shared::cta.b64 [%s], 16;",
        "mbarrier.arrive.shared.b64 _, [%s], 2;",
    ),
    "balanced": (
        INIT.format(1),
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 32;",
        "mbarrier.complete_tx.shared::cta.b64 [%s], 32;",
        ARRIVE,
    ),
    "drop": (
        INIT.format(3),
        "mbarrier.arrive_drop.shared.b64 %x0, [%s];",
        ARRIVE,
        ARRIVE,
        ARRIVE,
        ARRIVE,
        "mbarrier.arrive_drop.shared.b64 _, [%s];",
        ARRIVE,
        ARRIVE,
    ),
    "drop_expect": (
        INIT.format(2),
        "mbarrier.arrive_drop.expect_tx.shared::cta.b64 _, [%s], 32;",
        ARRIVE,
        "mbarrier.complete_tx.shared::cta.b64 [%s], 32;",
        ARRIVE,
    ),
    "no_complete": (
        INIT.format(4),
        "mbarrier.arrive.noComplete.shared.b64 %x0, [%s], 2;",
        "mbarrier.arrive_drop.noComplete.shared.b64 %x0, [%s], 1;",
        ARRIVE,
        "mbarrier.arrive.noComplete.shared.b64 %x0, [%s], 2;",
        ARRIVE,
    ),
    "again": (
        INIT.format(2),
        ARRIVE,
        "mbarrier.inval.shared::cta.b64 [%s]; mbarrier.init.shared::cta.b64 [%s], 1;",
        ARRIVE,
    ),
}

STATES = """
mbarrier.init.shared::cta.b64 [%s], 3; mbarrier.arrive.shared::cta.b64 %x0, [%s];
mbarrier.pending_count.b64 %r1, %x0; st.global.u32 [%out], %r1;
mbarrier.arrive.shared::cta.b64 %x1, [%s];
mbarrier.pending_count.b64 %r1, %x1; st.global.u32 [%out+4], %r1;
mbarrier.test_wait.shared::cta.b64 %p0, [%s], %x0; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+8], %r1; mbarrier.arrive.shared::cta.b64 %x2, [%s];
mbarrier.pending_count.b64 %r1, %x2; st.global.u32 [%out+12], %r1;
mbarrier.test_wait.shared::cta.b64 %p0, [%s], %x0; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+16], %r1;
mbarrier.try_wait.shared::cta.b64 %p0, [%s], %x2; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+20], %r1; mbarrier.arrive.expect_tx.shared::cta.b64 %x3, [%s], 16;
mbarrier.pending_count.b64 %r1, %x3; st.global.u32 [%out+24], %r1;
mbarrier.try_wait.acquire.cta.shared::cta.b64 %p0, [%s], %x3, 200; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+28], %r1; mbarrier.arrive_drop.shared::cta.b64 %x4, [%s], 2;
mbarrier.pending_count.b64 %r1, %x4; st.global.u32 [%out+32], %r1;
mbarrier.test_wait.shared::cta.b64 %p0, [%s], %x4; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+36], %r1; mbarrier.complete_tx.shared::cta.b64 [%s], 16;
mbarrier.test_wait.acquire.cluster.shared::cta.b64 %p0, [%s], %x4; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+40], %r1; mbarrier.arrive.shared::cta.b64 %x5, [%s];
mbarrier.pending_count.b64 %r1, %x5; st.global.u32 [%out+44], %r1;
mbarrier.test_wait.shared::cta.b64 %p0, [%s], %x5; selp.u32 %r1, 1, 0, %p0;
st.global.u32 [%out+48], %r1;
"""

PIPELINE = """
// warp 0 fills two stages, warps 1-3 read them; five rounds
add.u32 %r1, %s, 64;      // full[2]
add.u32 %r2, %s, 80;      // empty[2]
setp.ne.u32 %p0, %t, 0; @%p0 bra READY;
mbarrier.init.shared::cta.b64 [%s+64], 32; mbarrier.init.shared::cta.b64 [%s+72], 32;
mbarrier.init.shared::cta.b64 [%s+80], 96; mbarrier.init.shared::cta.b64 [%s+88], 96;
READY: bar.sync 0; mov.u32 %r3, 0; mov.u32 %r4, 0; setp.lt.u32 %p1, %t, 32; and.b32 %r5, %t, 31;
LOOP: and.b32 %r6, %r3, 1; shr.u32 %r7, %r3, 1; and.b32 %r7, %r7, 1;
mad.lo.u32 %r8, %r6, 8, %r1; mad.lo.u32 %r9, %r6, 8, %r2;
mad.lo.u32 %r10, %r6, 128, %s; mad.lo.u32 %r10, %r5, 4, %r10; @!%p1 bra READER;
xor.b32 %r7, %r7, 1; mov.u32 %r20, 0;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], %r7; @%p2 bra G1;
add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 100000; @%p3 bra W1;
G1: mad.lo.u32 %r11, %r3, 1000, %r5; st.shared.u32 [%r10+128], %r11;
mbarrier.arrive.shared::cta.b64 _, [%r8]; bra NEXT;
READER: mov.u32 %r20, 0;
W2: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r8], %r7; @%p2 bra G2;
add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 100000; @%p3 bra W2;
G2: ld.shared.u32 %r11, [%r10+128]; mad.lo.u32 %r4, %r4, 3, %r11;
mbarrier.arrive.shared::cta.b64 _, [%r9];
NEXT: add.u32 %r3, %r3, 1; setp.lt.u32 %p4, %r3, 5; @%p4 bra LOOP;
mad.wide.u32 %x1, %t, 4, %out; st.global.u32 [%x1], %r4;
"""


def programs() -> Iterator[Program]:
    """All of the family."""
    for label, steps in LIVES.items():
        body = "".join(step + PROBE.format(at=4 * i) for i, step in enumerate(steps))
        yield kernel(f"mbarrier/{label}", body, [("out", result(4 * len(steps)))], block=1, smem=64)
    yield kernel("mbarrier/states", STATES, [("out", result(52))], block=1, smem=64)
    yield kernel("mbarrier/pipeline", PIPELINE, [("out", result(512))], block=128, smem=512)
