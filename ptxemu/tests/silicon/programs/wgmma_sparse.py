"""wgmma.mma_async.sp: every type, both sources of A, both majors; and wgmma of single bits.

As in the family wgmma, shared memory is full of small integers, and sums are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import EXACT, Array, Check, Program
from tests.silicon.programs.values import factors, sums
from tests.silicon.programs.warp_mma import SPREAD, metadata
from tests.silicon.programs.wgmma import B32, B64, B128, BITS, NONE, Layout

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


_K_MAJOR = Layout(B128)


@dataclass(frozen=True)
class Product:
    """One product m64 n k; `selector` is None where A is dense."""

    name: str
    types: tuple[str, str, str]
    n: int = 16
    a: Layout | None = _K_MAJOR
    b: Layout = _K_MAJOR
    selector: int | None = 0
    scale_d: bool = True
    negate: tuple[int, int] = (1, 1)
    saturate: bool = False
    random: bool = False


def _descriptor(register: str, layout: Layout, region: int) -> str:
    start = region + layout.offset
    return f"""add.u32 %r1, %s, {start}; shr.u32 %r1, %r1, 4; and.b32 %r1, %r1, 0x3fff;
        cvt.u64.u32 {register}, %r1; or.b64 {register}, {register}, {layout.high:#x};"""


def _instruction(p: Product, registers: int) -> str:
    d, a, b = p.types
    k = 256 if a == "b1" else (256 if p.selector is None else 512) // BITS[a]
    accumulators = ", ".join(f"%w{i}" for i in range(registers))
    left = "{%r40, %r41, %r42, %r43}" if p.a is None else "%x20"
    sparse = "" if p.selector is None else ".sp"
    saturate = ".satfinite" if p.saturate else ""
    behind = ".and.popc" if a == "b1" else ""
    text = f"wgmma.mma_async{sparse}.sync.aligned.m64n{p.n}k{k}.{d}.{a}.{b}{behind}{saturate}"
    text += f" {{{accumulators}}}, {left}, %x21"
    text += "" if p.selector is None else f", %r44, {p.selector}"
    text += ", %p1"
    if d != "s32":
        text += f", {p.negate[0]}, {p.negate[1]}"
    if BITS.get(a) == 16:
        text += "" if p.a is None else f", {int(p.a.transposed)}"
        text += f", {int(p.b.transposed)}"
    return text + ";"


def _program(p: Product) -> Program:
    d, a_kind, b_kind = p.types
    registers = p.n // 2 if d != "f16" else p.n // 4
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
        lines.append(_descriptor("%x20", p.a, 0))
    lines += [_descriptor("%x21", p.b, B_AT), f"setp.ne.u32 %p1, {int(p.scale_d)}, 0;"]
    lines.append(_instruction(p, registers))
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"st.global.b32 [%x0+{4 * i}], %w{i};" for i in range(registers)]
    label = f"wgmma_sparse/{p.name}"
    image = [
        factors(f"{label}/a", a_kind, B_AT, SPREAD, random=p.random),
        factors(f"{label}/b", b_kind, IMAGE - B_AT, SPREAD, random=p.random),
    ]
    size = 4 * registers * 128
    args = [
        ("out", result(size)),
        ("c", Array(sums(f"{label}/c", d, size, saturate=p.saturate, random=p.random))),
        ("image", Array(np.concatenate(image))),
        ("a", Array(factors(f"{label}/registers", a_kind, 2048, SPREAD, random=p.random))),
        ("e", Array(metadata(f"{label}/e", a_kind, 128))),
    ]
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
            yield Product(f"{label}.first", types, 24, *k_major, scale_d=False)
    yield Product("negate", TYPES[2], 16, *k_major, selector=1, negate=(-1, 1))
    yield Product("n64", TYPES[2], 64, *k_major)
    yield Product("saturate", TYPES[6], 16, *k_major, saturate=True)
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
                yield Product(name, TYPES[2], 32, pair[0], pair[1])
    for types in (TYPES[2], TYPES[3], TYPES[4]):
        yield Product(f"{types[1]}.random", types, 8, *k_major, random=True)
    bits = ("s32", "b1", "b1")
    yield Product("b1", bits, 16, *k_major, selector=None)
    yield Product("b1.registers", bits, 8, None, k_major[1], selector=None)


def programs() -> Iterator[Program]:
    """All of the family."""
    return map(_program, _products())
