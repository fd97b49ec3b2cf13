"""wgmma.mma_async.sp: every type, both sources of A, both majors; and wgmma of single bits.

As in the family wgmma, shared memory is full of small integers, and sums are exact.
"""

from collections.abc import Iterator
from itertools import product

from tests.silicon.programs.build import kernel
from tests.silicon.programs.case import EXACT, Array, Check, Program
from tests.silicon.programs.warp_mma import SPREAD, metadata
from tests.silicon.programs.wgmma import (
    B32,
    B64,
    B128,
    BITS,
    NONE,
    Layout,
    Product,
    arrays,
    descriptor,
    instruction,
)

INT8 = ("s8", "u8")
B_AT = 16 << 10
IMAGE = B_AT + (20 << 10)
BOUNDS = {
    ("f16", 16): 1.6e-2,
    ("f16", 8): 3.2e-2,
    ("f32", 32): 6e-6,
    ("f32", 16): 6e-6,
    ("f32", 8): 9e-3,
}
"""Absolute differences on random data in (-1, 1)."""


def _program(p: Product) -> Program:
    registers = p.registers
    lines = [
        f"""mad.wide.u32 %x2, %t, 16, %image; mad.lo.u32 %r0, %t, 16, %s; mov.u32 %r1, 0;
FILL: ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%x2];
st.shared.v4.u32 [%r0], {{%r2, %r3, %r4, %r5}};
add.u64 %x2, %x2, 2048; add.u32 %r0, %r0, 2048; add.u32 %r1, %r1, 1;
setp.lt.u32 %p0, %r1, {IMAGE // 2048}; @%p0 bra FILL;
mad.wide.u32 %x0, %t, {4 * registers}, %out; mad.wide.u32 %x1, %t, {4 * registers}, %c;
mad.wide.u32 %x3, %t, 16, %a; ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%x3];
mad.wide.u32 %x3, %t, 4, %e; ld.global.b32 %r44, [%x3];"""
    ]
    lines += [f"ld.global.b32 %w{i}, [%x1+{4 * i}];" for i in range(registers)]
    lines.append("fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;")
    if p.a is not None:
        lines.append(descriptor("%x20", p.a, 0))
    lines += [descriptor("%x21", p.b, B_AT), f"setp.ne.u32 %p1, {int(p.scale_d)}, 0;"]
    lines.append(instruction(p, "%w", "%r40", "%x20 %x21"))
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"st.global.b32 [%x0+{4 * i}], %w{i};" for i in range(registers)]
    label = f"wgmma_sparse/{p.name}"
    d, a_kind, _ = p.types
    names = ("out", "c", "image", "a")
    args = list(zip(names, arrays(p, label, B_AT, IMAGE, SPREAD), strict=True))
    args.append(("e", Array(metadata(f"{label}/e", a_kind, 128))))
    check = Check(d, absolute=BOUNDS[d, BITS[a_kind]]) if p.random else EXACT
    declarations = f".reg .b32 %w<{registers}>;"
    body = "\n".join(lines)
    return kernel(
        label, body, args, declarations=declarations, version="8.4", block=128, smem=IMAGE,
        check=check,
    )  # fmt: skip


TYPES = (
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "bf16", "bf16"),
    ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e5m2"),
    ("f16", "e5m2", "e4m3"),
    *(("s32", a, b) for a, b in product(INT8, INT8)),
)


def _products() -> Iterator[Product]:
    k_major = Layout(B128), Layout(B128)
    for types in TYPES:
        label = ".".join(types)
        for selector in (0, 1) if BITS[types[1]] > 8 else (0,):
            yield Product(f"{label}.selector{selector}", types, 16, *k_major, selector=selector)
            yield Product(
                f"{label}.selector{selector}.registers", types, 8, None, k_major[1],
                selector=selector,
            )  # fmt: skip
        if types[1] != types[2]:
            yield Product(f"{label}.first", types, 24, *k_major, selector=0, scale_d=False)
    yield Product("negate", TYPES[2], 16, *k_major, selector=1, negate=(-1, 1))
    yield Product("n64", TYPES[2], 64, *k_major, selector=0)
    yield Product("saturate", TYPES[6], 16, *k_major, selector=0, saturate=True)
    for swizzle, span in ((NONE, 16), (B32, 32), (B64, 64), (B128, 128)):
        for left, right in ((False, True), (True, False), (True, True)):
            pair = []
            for transposed in (left, right):
                sbo, lbo = 8 * span, 16
                if swizzle == NONE:
                    sbo, lbo = (512, 128) if not transposed else (384, 1024 + 2048)
                elif transposed:
                    lbo, sbo = 4096 + 8 * span, 8 * span
                pair.append(Layout(swizzle, lbo, sbo, transposed=transposed))
            name = f"swizzle{swizzle}.{'mn' if left else 'k'}.{'mn' if right else 'k'}"
            if swizzle in (NONE, B64, B128):
                yield Product(name, TYPES[2], 32, pair[0], pair[1], selector=0)
    for types in (TYPES[2], TYPES[3], TYPES[4]):
        yield Product(f"{types[1]}.random", types, 8, *k_major, selector=0, random=True)
    bits = ("s32", "b1", "b1")
    yield Product("b1", bits, 16, *k_major)
    yield Product("b1.registers", bits, 8, None, k_major[1])


def programs() -> Iterator[Program]:
    """All of the family."""
    return map(_program, _products())
