"""Warp collectives: shfl, vote, match, redux, elect, activemask; divergence, loops, calls."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Bytes, Program
from tests.silicon.programs.values import below, integers, random_bytes

CLAMPS = (0x1F, 0x00, 0x181F, 0x1007, 0x100F, 0x1C1F, 0x1E00, 0x0007, 0x1803)
LOAD = """mad.wide.u32 %x0, %t, 4, %in; ld.global.u32 %r1, [%x0];
mad.wide.u32 %x1, %t, 8, %out; mov.u32 %r10, 0xEEEE; mov.u32 %r11, 0xDDDD;
"""
STORE = "\nst.global.u32 [%x1], %r10; st.global.u32 [%x1+4], %r11;"
HALVES = "0x0F0FF0F0"
"""The lanes that take the branch in the programs under divergence."""
SPLIT = f"""shl.b32 %r2, 1, %t; and.b32 %r3, %r2, {HALVES}; setp.ne.u32 %p0, %r3, 0;
"""


def _words(values: list[int]) -> Bytes:
    return (np.array(values, dtype=np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.uint8)


def _program(name: str, body: str, data: Bytes | None = None) -> Program:
    values = random_bytes(f"warp_sync/{name}", 128) if data is None else data
    args = [("out", result(256)), ("in", Array(values))]
    return kernel(f"warp_sync/{name}", LOAD + body + STORE, args)


def _shuffles() -> Iterator[Program]:
    for mode in ("idx", "up", "down", "bfly"):
        for clamp in CLAMPS:
            for source, label in (("3", "3"), ("%r2", "lane")):
                body = f"""mad.lo.u32 %r2, %t, 7, 5; and.b32 %r2, %r2, 31;
                    shfl.sync.{mode}.b32 %r10|%p0, %r1, {source}, {clamp:#x}, -1;
                    selp.u32 %r11, 1, 0, %p0;"""
                yield _program(f"shfl.{mode}.{clamp:x}.{label}", body)
        body = f"""mul.lo.u32 %r2, %t, 0x9E3779B1; shr.u32 %r3, %r2, 7;
            shfl.sync.{mode}.b32 %r10|%p0, %r1, %r2, %r3, 0xffffffff; selp.u32 %r11, 1, 0, %p0;"""
        yield _program(f"shfl.{mode}.random", body)
    body = (
        SPLIT
        + """@%p0 bra YES;
        xor.b32 %r4, %t, 1; shfl.sync.idx.b32 %r10, %r1, %r4, 31, 0xF0F00F0F; bra JOIN;
        YES: shfl.sync.bfly.b32 %r10|%p1, %r1, 2, 31, 0x0F0FF0F0; selp.u32 %r11, 1, 0, %p1;
        JOIN: bar.warp.sync -1;"""
    )
    yield _program("shfl.divergent", body)
    body = """shfl.sync.idx.b32 %r10, %r1, 5, 31, -1; shfl.sync.bfly.b32 %r11, %r10, 16, 31, -1;
        @%p5 mov.u32 %r11, 0; add.u32 %r11, %r11, %r1;"""
    yield _program("shfl.chain", body.replace("@%p5 mov.u32 %r11, 0; ", ""))


def _votes() -> Iterator[Program]:
    sets = {"random": None, "all": _words([5] * 32), "none": _words([0] * 32),
            "one": _words([0] * 9 + [8] + [0] * 22)}  # fmt: skip
    for label, data in sets.items():
        mask = 4 if label == "random" else -1
        body = f"""and.b32 %r2, %r1, {mask}; setp.ne.u32 %p0, %r2, 0;
            vote.sync.ballot.b32 %r10, %p0, -1;
            vote.sync.all.pred %p1, %p0, -1; vote.sync.any.pred %p2, %p0, -1;
            vote.sync.uni.pred %p3, %p0, -1; vote.sync.all.pred %p4, !%p0, -1;
            mov.u32 %r11, 0; @%p1 or.b32 %r11, %r11, 1; @%p2 or.b32 %r11, %r11, 2;
            @%p3 or.b32 %r11, %r11, 4; @%p4 or.b32 %r11, %r11, 8;"""
        yield _program(f"vote.{label}", body, data)
    body = (
        SPLIT
        + """and.b32 %r2, %r1, 4; setp.ne.u32 %p1, %r2, 0;
        @%p0 bra YES; vote.sync.ballot.b32 %r10, %p1, 0xF0F00F0F; activemask.b32 %r11; bra JOIN;
        YES: vote.sync.ballot.b32 %r10, !%p1, 0x0F0FF0F0; activemask.b32 %r11;
        JOIN: bar.warp.sync -1;"""
    )
    yield _program("vote.divergent", body)
    body = "activemask.b32 %r10;"
    yield _program("activemask.full", body)


def _matches() -> Iterator[Program]:
    few = below("match", 32, 4)
    for bits in (32, 64):
        value = "%r2" if bits == 32 else "%x5"
        widen = "and.b32 %r2, %r1, 3; cvt.u64.u32 %x5, %r2; shl.b64 %x5, %x5, 33;"
        body = f"{widen} match.any.sync.b{bits} %r10, {value}, -1;"
        yield _program(f"match.any.b{bits}", body, _words(list(few)))
        for label, data in (("same", [7] * 32), ("other", [7] * 31 + [6])):
            body = f"""{widen} match.all.sync.b{bits} %r10|%p0, {value}, -1;
                selp.u32 %r11, 1, 0, %p0;"""
            yield _program(f"match.all.b{bits}.{label}", body, _words(data))
    body = (
        SPLIT
        + """and.b32 %r2, %r1, 3; @%p0 bra YES;
        match.any.sync.b32 %r10, %r2, 0xF0F00F0F; bra JOIN;
        YES: match.all.sync.b32 %r10|%p1, 5, 0x0F0FF0F0; selp.u32 %r11, 1, 0, %p1;
        JOIN: bar.warp.sync -1;"""
    )
    yield _program("match.divergent", body)


def _reductions() -> Iterator[Program]:
    for op in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32",
               "or.b32", "xor.b32"):  # fmt: skip
        body = f"redux.sync.{op} %r10, %r1, -1;"
        yield _program(f"redux.{op}", body, integers(f"redux/{op}", 32, 32))
    body = (
        SPLIT
        + """@%p0 bra YES;
        redux.sync.add.u32 %r10, %r1, 0xF0F00F0F; bra JOIN;
        YES: redux.sync.max.s32 %r10, %r1, 0x0F0FF0F0;
        JOIN: bar.warp.sync -1;"""
    )
    yield _program("redux.divergent", body)


def _elections() -> Iterator[Program]:
    body = "elect.sync %r10|%p0, -1; selp.u32 %r11, 1, 0, %p0;"
    yield _program("elect.full", body)
    body = (
        SPLIT
        + """@%p0 bra YES;
        elect.sync %r10|%p1, 0xF0F00F0F; selp.u32 %r11, 1, 0, %p1; bra JOIN;
        YES: elect.sync %r10|%p1, 0x0F0FF0F0; selp.u32 %r11, 1, 0, %p1;
        JOIN: bar.warp.sync -1;"""
    )
    yield _program("elect.divergent", body)
    body = """mov.u32 %r2, 0; setp.lt.u32 %p0, %t, 7; @%p0 bra SKIP;
        elect.sync _|%p1, 0xFFFFFF80; @%p1 mov.u32 %r10, 77;
        SKIP: bar.warp.sync 0xFFFFFFFF;"""
    yield _program("elect.late", body)


LOOP = """and.b32 %r2, %r1, 7; mov.u32 %r10, 0; mov.u32 %r3, 0;
AGAIN: setp.ge.u32 %p0, %r3, %r2; @%p0 bra OUT;
mad.lo.u32 %r10, %r10, 3, %r3; add.u32 %r3, %r3, 1; and.b32 %r4, %r3, 1;
setp.eq.u32 %p1, %r4, 0; @%p1 bra AGAIN; xor.b32 %r10, %r10, %t; bra AGAIN;
OUT: bar.warp.sync -1; vote.sync.ballot.b32 %r11, %p1, -1;"""
EXITS = """st.global.u32 [%x1], %t; setp.gt.u32 %p0, %t, 19; @%p0 ret;
setp.eq.u32 %p1, %t, 3; @%p1 exit; activemask.b32 %r10; mov.u32 %r11, %t;
bar.warp.sync 0x000FFFF7;"""
CALLS = """
.func (.param .b32 value) twice(.param .b32 given)
{
  .reg .b32 %a; ld.param.b32 %a, [given]; shl.b32 %a, %a, 1; st.param.b32 [value], %a; ret;
}
"""
CALL = """{ .param .b32 result; .param .b32 argument; st.param.b32 [argument], %r1;
call.uni (result), twice, (argument); ld.param.b32 %r10, [result]; }
and.b32 %r2, %t, 3;
targets: .branchtargets A0, A1, A2, A3; brx.idx %r2, targets;
A0: mov.u32 %r11, 100; bra.uni END;
A1: mov.u32 %r11, 201; bra END;
A2: mov.u32 %r11, 302;
A3: add.u32 %r11, %r11, 1000;
END: bar.warp.sync -1;"""


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _shuffles()
    yield from _votes()
    yield from _matches()
    yield from _reductions()
    yield from _elections()
    yield _program("loop", "setp.ne.u32 %p1, %t, %t;" + LOOP)
    yield _program("exits", EXITS)
    program = _program("calls", CALL)
    ptx = program.ptx.replace(".extern .shared", CALLS + ".extern .shared")
    yield Program(program.name, ptx, program.args)
