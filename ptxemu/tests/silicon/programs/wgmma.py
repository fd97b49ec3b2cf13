"""wgmma: every type, both sources of A, majors, swizzles, scale-d, negation, chains.

The shared memory is full of small integers of the operand's type, so a wrong address gives a wrong
sum, and sums are exact. Registers of D are stored raw. `random` programs bound the real rounding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from tests.silicon.programs.build import header, result
from tests.silicon.programs.case import EXACT, Array, Check, Program
from tests.silicon.programs.values import factors, random_bytes, sums

B_AT = 20 << 10
"""Operand B's region begins here; A's is before it."""
NONE, B128, B64, B32 = range(4)
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
SPREAD = {"f16": 2, "bf16": 8, "tf32": 100, "e4m3": 4, "e5m2": 2}
FP8 = ("e4m3", "e5m2")
INT8 = ("s8", "u8")
TYPES = (
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "bf16", "bf16"),
    ("f32", "tf32", "tf32"),
    *((d, a, b) for d in ("f32", "f16") for a in FP8 for b in FP8),
    *(("s32", a, b) for a in INT8 for b in INT8),
)
BOUNDS = {
    ("f16", 16): 1e-9,  # measured: 0, so equal but for the sign of zero
    ("f16", 8): 1.6e-2,  # 7.9e-3: one unit in the last place of sums above 8
    ("f32", 32): 3e-6,  # 9.6e-7
    ("f32", 16): 3e-6,  # 1.5e-6
    ("f32", 8): 4.3e-3,  # 2.2e-3: an H200 adds products of 8-bit floats with few bits
}
"""Absolute differences on random data in (-1, 1) by type of D and width of A: twice the largest."""
SPECIAL_BOUNDS = {"f16": 1.2e-5, "bf16": 2.4e-7, "tf32": 2.4e-7, "e4m3": 1.9e-2, "e5m2": 5.5e-3}
"""Relative ones on any bits: measured 6.1e-6, 1.2e-7, 1.2e-7, 9.4e-3 and 2.8e-3."""


@dataclass(frozen=True)
class Layout:
    """An operand in shared memory: a matrix descriptor but for its start."""

    swizzle: int = B128
    lbo: int = 16
    sbo: int = 1024
    offset: int = 0
    """Bytes behind the operand's region."""
    base: int = 0
    transposed: bool = False

    @property
    def high(self) -> int:
        """The descriptor without the start address."""
        fields = (self.lbo >> 4) << 16 | (self.sbo >> 4) << 32 | self.base << 49
        return fields | self.swizzle << 62


@dataclass(frozen=True)
class Product:
    """One program: `steps` products into the same D; sparse ones have a `selector`."""

    name: str
    types: tuple[str, str, str]
    n: int = 16
    a: Layout | None = Layout()
    """None: A comes from registers."""
    b: Layout = Layout()
    scale_d: bool = True
    negate: tuple[int, int] = (1, 1)
    saturate: bool = False
    steps: int = 1
    random: bool = False
    selector: int | None = None

    @property
    def registers(self) -> int:
        """Registers of D."""
        return self.n // 2 if self.types[0] != "f16" else self.n // 4


def descriptor(register: str, layout: Layout, start: int) -> str:
    """Make a matrix descriptor; `start` is behind that of the shared memory."""
    return f"""add.u32 %r1, %s, {start + layout.offset}; shr.u32 %r1, %r1, 4;
        and.b32 %r1, %r1, 0x3fff; cvt.u64.u32 {register}, %r1;
        or.b64 {register}, {register}, {layout.high:#x};"""


def instruction(p: Product, d_registers: str, a_registers: str, descriptors: str) -> str:
    """The product; names of registers as D's and A's prefix, and of the two descriptors."""
    d, a, b = p.types
    k = 256 if a == "b1" else (256 if p.selector is None else 512) // BITS[a]
    accumulators = ", ".join(f"{d_registers}{i}" for i in range(p.registers))
    a_descriptor, b_descriptor = descriptors.split()
    first = int(a_registers[2:] or 0)
    left = ", ".join(f"{a_registers[:2]}{first + i}" for i in range(4))
    sparse = "" if p.selector is None else ".sp"
    behind = ".and.popc" if a == "b1" else ""
    saturate = ".satfinite" if p.saturate else ""
    text = f"wgmma.mma_async{sparse}.sync.aligned.m64n{p.n}k{k}.{d}.{a}.{b}{behind}{saturate}"
    text += f" {{{accumulators}}}, {a_descriptor if p.a else f'{{{left}}}'}, {b_descriptor}"
    text += "" if p.selector is None else f", %r44, {p.selector}"
    text += ", %p1"
    if d != "s32":
        text += f", {p.negate[0]}, {p.negate[1]}"
    if BITS.get(a) == 16:
        text += "" if p.a is None else f", {int(p.a.transposed)}"
        text += f", {int(p.b.transposed)}"
    return text + ";"


def arrays(
    p: Product, label: str, b_at: int, image_bytes: int, spread: Mapping[str, int] = SPREAD
) -> list[Array]:
    """D, C, the shared memory with B from `b_at` on, and A's registers."""
    d, a_kind, b_kind = p.types
    image = [
        factors(f"{label}/a", a_kind, b_at, spread, random=p.random),
        factors(f"{label}/b", b_kind, image_bytes - b_at, spread, random=p.random),
    ]
    size = 4 * p.registers * 128
    return [
        result(size),
        Array(sums(f"{label}/c", d, size, saturate=p.saturate, random=p.random)),
        Array(np.concatenate(image)),
        Array(factors(f"{label}/registers", a_kind, 2048, spread, random=p.random)),
    ]


def _program(p: Product) -> Program:
    registers = p.registers
    image_bytes = B_AT + ((20 if p.n <= 144 else 34) << 10)
    lines = [header("8.4"), ".extern .shared .align 1024 .b8 dynamic_smem[];"]
    lines.append(
        ".visible .entry k(.param .u64 pd, .param .u64 pc, .param .u64 pi, .param .u64 pa)"
    )
    lines.append(f"""{{
  .reg .b32 %t, %s, %r<9>, %d<{registers}>, %a<4>; .reg .b64 %x<9>, %xa, %xb; .reg .pred %p<4>;
  mov.u32 %t, %tid.x; mov.u32 %s, dynamic_smem;
  ld.param.u64 %x0, [pd]; ld.param.u64 %x1, [pc]; ld.param.u64 %x2, [pi]; ld.param.u64 %x3, [pa];
  mad.wide.u32 %x2, %t, 16, %x2; mad.lo.u32 %r0, %t, 16, %s; add.u32 %r0, %r0, 1024;
  mov.u32 %r1, 0;
FILL: ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%x2];
  st.shared.v4.u32 [%r0], {{%r2, %r3, %r4, %r5}};
  add.u64 %x2, %x2, 2048; add.u32 %r0, %r0, 2048; add.u32 %r1, %r1, 1;
  setp.lt.u32 %p0, %r1, {image_bytes // 2048}; @%p0 bra FILL;
  mad.wide.u32 %x0, %t, {4 * registers}, %x0; mad.wide.u32 %x1, %t, {4 * registers}, %x1;
  mad.wide.u32 %x3, %t, 16, %x3; ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%x3];""")
    lines += [f"  ld.global.b32 %d{i}, [%x1+{4 * i}];" for i in range(registers)]
    lines.append("  fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;")
    for step in range(p.steps):
        if p.a is not None:
            lines.append("  " + descriptor("%xa", p.a, 1024 + 32 * step))
        lines.append("  " + descriptor("%xb", p.b, 1024 + B_AT + 32 * step))
        lines.append(f"  setp.ne.u32 %p1, {int(p.scale_d or step > 0)}, 0;")
        lines.append("  " + instruction(p, "%d", "%a", "%xa %xb"))
    lines.append("  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"  st.global.b32 [%x0+{4 * i}], %d{i};" for i in range(registers)]
    lines.append("  ret;\n}\n")
    label = f"wgmma/{p.name}"
    d, a_kind, _ = p.types
    check = Check(d, absolute=BOUNDS[d, BITS[a_kind]]) if p.random else EXACT
    args = tuple(arrays(p, label, B_AT, image_bytes))
    return Program(label, "\n".join(lines), args, block=128, smem=1024 + image_bytes, check=check)


def _types() -> Iterator[Product]:
    for types in TYPES:
        label = ".".join(types)
        for n in (8, 16, 64, 256):
            yield Product(f"{label}.n{n}", types, n)
        yield Product(f"{label}.n32.registers", types, 32, a=None)
        yield Product(f"{label}.n24.first", types, 24, scale_d=False)
        yield Product(f"{label}.n16.chain", types, 16, steps=4)
        if types[0] == "s32":
            yield Product(f"{label}.n16.saturate", types, 16, saturate=True)
            continue
        if types[1:] in (("e5m2", "e4m3"), ("e5m2", "e5m2")) and types[0] == "f16":
            continue
        yield Product(f"{label}.n8.random", types, 8, random=True)
        if types[1] == "e5m2":
            continue
        yield Product(f"{label}.n8.random.chain", types, 8, random=True, steps=4)
        yield Product(f"{label}.n8.random.registers", types, 8, a=None, random=True)
    for n in (40, 72, 104, 136, 184, 208, 248):
        yield Product(f"bf16.n{n}", TYPES[2], n)


def _layouts() -> Iterator[Product]:
    bf16 = TYPES[2]
    spans = {NONE: 16, B32: 32, B64: 64, B128: 128}
    for swizzle, span in spans.items():
        for left in (False, True):
            for right in (False, True):
                pair = []
                for transposed in (left, right):
                    # strides that differ from each other and overlap nowhere in the image
                    sbo, lbo = 8 * span, 16
                    if swizzle == NONE:
                        sbo, lbo = (256, 128) if not transposed else (384, 1024 + 2048)
                    elif transposed:
                        lbo, sbo = 2048 + 8 * span, 8 * span
                    pair.append(Layout(swizzle, lbo, sbo, transposed=transposed))
                name = f"layout.swizzle{swizzle}.{'mn' if left else 'k'}.{'mn' if right else 'k'}"
                yield Product(name, bf16, 64, pair[0], pair[1])
                wide = [
                    Layout(x.swizzle, x.lbo + 128, x.sbo + 1024, transposed=x.transposed)
                    for x in pair
                ]
                yield Product(f"{name}.wide", bf16, 32, wide[0], wide[1])
                if left is right:
                    name = f"layout.swizzle{swizzle}.registers.{'mn' if right else 'k'}"
                    yield Product(name, bf16, 32, None, pair[1])
        for kind in ("tf32", "e4m3", "s8"):
            types = next(t for t in TYPES if t[1] == kind)
            sbo, lbo = (256, 128) if swizzle == NONE else (8 * span, 16)
            layout = Layout(swizzle, lbo, sbo)
            yield Product(f"layout.swizzle{swizzle}.{kind}", types, 32, layout, layout)
        if swizzle != NONE:
            for offset in range(32, span, 32):
                a, b = Layout(swizzle, sbo=8 * span, offset=offset), Layout(swizzle, sbo=8 * span)
                yield Product(f"layout.swizzle{swizzle}.at{offset}", bf16, 16, a, b)
            for offset in (8 * span, 1024 + 8 * span, 128):
                a, b = Layout(swizzle, sbo=8 * span), Layout(swizzle, sbo=8 * span, offset=offset)
                yield Product(f"layout.swizzle{swizzle}.b_at{offset}", bf16, 16, a, b)


def _offsets() -> Iterator[Product]:
    """Base offsets, and fields that a swizzled K-major layout ignores."""
    bf16 = TYPES[2]
    for base in (1, 3, 7):
        for offset in (0, 128 * base):
            a = Layout(B128, offset=offset, base=base)
            yield Product(f"layout.base{base}.at{offset}", bf16, 16, a)
    for swizzle, span in ((B64, 64), (B32, 32)):
        a = Layout(swizzle, sbo=8 * span, offset=128, base=1)
        yield Product(f"layout.swizzle{swizzle}.base1", bf16, 16, a, Layout(swizzle, sbo=8 * span))
    for lbo in (0, 16, 1024):
        a = Layout(B128, lbo=lbo)
        yield Product(f"layout.lbo{lbo}_ignored", bf16, 16, a)


def _signs() -> Iterator[Product]:
    for types in (TYPES[0], TYPES[2], TYPES[3], TYPES[4]):
        for a, b in ((-1, 1), (1, -1), (-1, -1)):
            yield Product(f"negate.{types[1]}.{a}.{b}", types, 16, negate=(a, b))


def _specials() -> Iterator[Program]:
    """Infinities, NaNs, subnormals, large exponents: any bits as operands."""
    for types in (TYPES[0], TYPES[2], TYPES[3], TYPES[4], TYPES[7]):
        program = _program(Product(f"specials.{types[1]}", types, 8))
        image = random_bytes(program.name, len(program.args[2].data))  # type: ignore[union-attr]
        if BITS[types[1]] == 32:
            image = (image.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.uint8).copy()
        check = Check("f32", relative=SPECIAL_BOUNDS[types[1]])
        args = (*program.args[:2], Array(image), program.args[3])
        yield Program(program.name, program.ptx, args, block=128, smem=program.smem, check=check)


def programs() -> Iterator[Program]:
    """All of the family."""
    for group in (_types, _layouts, _offsets, _signs):
        for product in group():
            yield _program(product)
    yield from _specials()
