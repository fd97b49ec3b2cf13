"""CTA barriers: bar.sync, bar.arrive, bar.red, barrier.sync with counts, and what they order."""

from collections.abc import Iterator

from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import random_bytes

LOAD = """mad.wide.u32 %x0, %t, 4, %in; ld.global.u32 %r1, [%x0];
mad.wide.u32 %x1, %t, 4, %out; mad.lo.u32 %r2, %t, 4, %s;
"""
ROTATE = """{first} st.shared.u32 [%r2], %r1; {sync}
add.u32 %r3, %t, 33; and.b32 %r3, %r3, 127; mad.lo.u32 %r3, %r3, 4, %s;
ld.shared.u32 %r4, [%r3]; st.global.u32 [%x1], %r4;"""
PRODUCERS = """setp.lt.u32 %p0, %t, 64; @%p0 bra CONSUME;
st.shared.u32 [%r2], %r1; {arrive}
mov.u32 %r4, 1; bra DONE;
CONSUME: {sync} ld.shared.u32 %r4, [%r2+256];
DONE: st.global.u32 [%x1], %r4;"""
PING_PONG = """mov.u32 %r5, 0; mov.u32 %r6, 0; setp.lt.u32 %p0, %t, 64;
@%p0 bra PING;
PONG: bar.sync 1, 128; ld.shared.u32 %r7, [%r2+-256]; add.u32 %r6, %r6, %r7; bar.arrive 2, 128;
add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5; @%p1 bra PONG; bra DONE;
PING: mad.lo.u32 %r1, %r1, 5, %r5; st.shared.u32 [%r2], %r1; bar.arrive 1, 128; bar.sync 2, 128;
add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5; @%p1 bra PING;
DONE: st.global.u32 [%x1], %r6;"""
WARPS = """shr.u32 %r5, %t, 5; add.u32 %r5, %r5, 1; st.shared.u32 [%r2], %r1;
{sync} xor.b32 %r3, %r2, 64; ld.shared.u32 %r4, [%r3]; st.global.u32 [%x1], %r4;"""


def _program(name: str, body: str) -> Program:
    args = [("out", result(512)), ("in", Array(random_bytes(f"barriers/{name}", 512)))]
    return kernel(f"barriers/{name}", LOAD + body, args, block=128, smem=512)


def programs() -> Iterator[Program]:
    """All of the family."""
    for sync in ("bar.sync 0;", "bar.sync 15;", "barrier.sync 3;", "barrier.sync.aligned 4, 128;",
                 "bar.cta.sync 1;", "barrier.cta.sync.aligned 0;", "bar.sync 7, 128;"):  # fmt: skip
        label = sync.rstrip(";").replace(" ", "_").replace(",", "")
        yield _program(f"rotate.{label}", ROTATE.format(first="", sync=sync))
    register = "mov.u32 %r8, 5; mov.u32 %r9, 128;"
    yield _program("rotate.registers", ROTATE.format(first=register, sync="bar.sync %r8, %r9;"))
    for arrive, sync in (("bar.arrive 1, 128;", "bar.sync 1, 128;"),
                         ("barrier.arrive 2, 128;", "barrier.sync 2, 128;"),
                         ("barrier.cta.arrive.aligned 9, 128;", "bar.sync 9, 128;")):  # fmt: skip
        label = arrive.split()[0]
        yield _program(f"producers.{label}", PRODUCERS.format(arrive=arrive, sync=sync))
    yield _program("ping_pong", PING_PONG)
    yield _program("per_warp", WARPS.format(sync="bar.sync %r5, 32;"))
    for op in ("popc.u32", "and.pred", "or.pred"):
        for what in ("and.b32 %r5, %r1, 4; setp.ne.u32 %p0, %r5, 0;", "setp.ne.u32 %p0, %t, 999;",
                     "setp.eq.u32 %p0, %t, 999;", "setp.eq.u32 %p0, %t, 77;"):  # fmt: skip
            label = f"red.{op}.{what.split('%')[-1].rstrip(';').replace(' ', '').replace(',', '_')}"
            label = f"{label}.{'t' if '%t' in what else 'in'}.{what.split('setp.')[1][:2]}"
            d = "%r4" if op == "popc.u32" else "%p1"
            back = "" if op == "popc.u32" else "selp.u32 %r4, 1, 0, %p1;"
            body = f"{what} bar.red.{op} {d}, 2, %p0; {back} st.global.u32 [%x1], %r4;"
            yield _program(label, body)
    body = """and.b32 %r5, %r1, 4; setp.ne.u32 %p0, %r5, 0; setp.lt.u32 %p2, %t, 64;
        @%p2 bra LOW; bar.red.popc.u32 %r4, 2, 64, !%p0; bra DONE;
        LOW: barrier.red.popc.aligned.u32 %r4, 1, 64, %p0;
        DONE: st.global.u32 [%x1], %r4;"""
    yield _program("red.two_halves", body)
