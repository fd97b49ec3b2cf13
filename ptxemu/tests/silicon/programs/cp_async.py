"""cp.async: sizes, zero fill, ignored sources, groups, and arrivals on an mbarrier."""

from collections.abc import Iterator

from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import random_bytes

COPY = """
mul.lo.u32 %r0, %t, 16; cvt.u64.u32 %x0, %r0; add.u64 %x1, %in, %x0; add.u64 %x2, %out, %x0;
add.u32 %r1, %s, %r0; mov.u32 %r9, 0x77777777; st.shared.v4.u32 [%r1], {{%r9, %r9, %r9, %r9}};
{copy}
{wait}
bar.sync 0; xor.b32 %r2, %r0, 16; add.u32 %r2, %s, %r2;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2]; st.global.v4.u32 [%x2], {{%r4, %r5, %r6, %r7}};
"""
WAIT_ALL = "cp.async.wait_all;"
WAIT_GROUP = "cp.async.commit_group; cp.async.wait_group 0;"
SPIN = """mov.u32 %r20, 0;
SPIN: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%s+1024], 0; @%p2 bra THROUGH;
add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 1000000; @%p3 bra SPIN;
THROUGH:"""


def _program(name: str, copy: str, wait: str) -> Program:
    body = COPY.format(copy=copy, wait=wait)
    args = [("out", result(1024)), ("in", Array(random_bytes(f"cp_async/{name}", 1024)))]
    return kernel(f"cp_async/{name}", body, args, block=64, smem=1280)


def programs() -> Iterator[Program]:
    """All of the family."""
    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        full = f"cp.async.{cache}.shared.global"
        yield _program(f"{cache}.{size}", f"{full} [%r1], [%x1], {size};", WAIT_ALL)
        hint = f"{full}.L2::128B [%r1], [%x1], {size};"
        yield _program(f"{cache}.{size}.hint", hint, WAIT_GROUP)
        for source in sorted({0, 1, size // 2, size - 1, size}):
            copy = f"{full} [%r1], [%x1], {size}, {source};"
            yield _program(f"{cache}.{size}.from{source}", copy, WAIT_ALL)
        copy = f"and.b32 %r3, %t, {size}; {full} [%r1], [%x1], {size}, %r3;"
        yield _program(f"{cache}.{size}.lane", copy, WAIT_GROUP)
        copy = f"""and.b32 %r3, %t, 3; setp.eq.u32 %p0, %r3, 1;
            {full} [%r1], [%x1], {size}, %p0;"""
        yield _program(f"{cache}.{size}.ignore", copy, WAIT_ALL)
    copy = """cp.async.ca.shared::cta.global [%r1], [%x1], 4; cp.async.commit_group;
        cp.async.ca.shared.global [%r1+4], [%x1+8], 4; cp.async.commit_group;
        cp.async.commit_group; cp.async.ca.shared.global [%r1+8], [%x1], 8;"""
    yield _program("groups", copy, "cp.async.wait_group 1; cp.async.wait_all;")
    copy = """setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared.b64 [%s+1024], {count}; bar.sync 0;
        cp.async.cg.shared.global [%r1], [%x1], 16;
        cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%s+1024];"""
    yield _program("mbarrier.noinc", copy.format(count=64, noinc=".noinc"), SPIN)
    after = "mbarrier.arrive.shared::cta.b64 _, [%s+1024];" + SPIN
    yield _program("mbarrier", copy.format(count=64, noinc=""), after)
