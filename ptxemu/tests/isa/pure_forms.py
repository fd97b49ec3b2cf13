"""Pure instructions with every combination of modifiers and types, right and wrong ones."""

from collections.abc import Iterator
from itertools import product

INTEGERS = ["u16", "s16", "u32", "s32", "u64", "s64"]
BYTES_AND_INTEGERS = ["u8", "s8", *INTEGERS]
BITS = ["b16", "b32", "b64"]
HALVES = ["f16", "bf16", "f16x2", "bf16x2"]
FLOATS = ["f16", "bf16", "f32", "f64"]
NUMBERS = [*INTEGERS, "u8", "b32", "u16x2", "s16x2", "f32", "f64", "f32x2", *HALVES]
PACKED = ["e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "f16x2", "bf16x2"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"]
COMPARISONS += ["equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
DECLARED = (
    ".reg .pred %p<8>; .reg .b8 %c<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>;"
    " .reg .f32 %f<8>; .reg .f64 %e<8>; .reg .b128 %q<8>;"
)
_WIDTHS = {"e2m1x2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m3x2": 16, "e3m2x2": 16, "ue8m0x2": 16}
_WIDTHS |= {"f16": 16, "bf16": 16, "u8": 16, "s8": 16, "b8": 8, "tf32": 32, "b128": 128}
_WIDTHS |= {"f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "f32x2": 64}
_KINDS = {8: "%c", 16: "%h", 32: "%r", 64: "%d", 128: "%q"}


def register(type_: str, index: int) -> str:
    """A register for an operand of the type."""
    kind = {"pred": "%p", "f32": "%f", "f64": "%e"}.get(type_)
    return f"{kind or _KINDS[_WIDTHS.get(type_) or int(type_[1:])]}{index}"


def form(opcode: str, *types: str, extra: str = "") -> str:
    """An instruction with one register for each operand type."""
    return f"{opcode} {', '.join(register(t, i) for i, t in enumerate(types))}{extra};"


def optional(*choices: str | tuple[str, ...]) -> Iterator[str]:
    """All ways to take or leave each modifier, or one of several."""
    options = [("", *(c if isinstance(c, tuple) else (c,))) for c in choices]
    for combination in product(*options):
        yield "".join(f".{modifier}" for modifier in combination if modifier)


def arithmetic() -> Iterator[str]:
    """Opcodes that many types share."""
    for t in NUMBERS:
        for name in ("add", "sub"):
            yield from (form(f"{name}{m}.{t}", t, t, t) for m in optional("sat"))
        for name in ("min", "max"):
            yield from (form(f"{name}{m}.{t}", t, t, t) for m in optional("relu"))
            for m in optional("ftz", "NaN", ("xorsign.abs", "abs")):
                yield form(f"{name}{m}.{t}", t, t, t)
                yield form(f"{name}{m}.{t}", t, t, t, t)
        for name in ("add", "sub", "mul", "div"):
            for m in optional(("rn", "rz", "rm", "rp", "approx", "full"), "ftz", "sat"):
                yield form(f"{name}{m}.{t}", t, t, t)
        for name in ("fma", "mad"):
            for m in optional(("rn", "rz"), "oob", "ftz", ("sat", "relu")):
                yield form(f"{name}{m}.{t}", t, t, t, t)
        for name in ("abs", "neg"):
            yield from (form(f"{name}{m}.{t}", t, t) for m in optional("ftz"))
        for name in ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"):
            for m in optional(("approx", "rn", "rz"), "ftz"):
                yield form(f"{name}{m}.{t}", t, t)
        yield from (form(f"{name}.{t}", t, t, t) for name in ("rem", "div", "copysign", "and"))
        yield form(f"sad.{t}", t, t, t, t)
        yield form(f"testp.subnormal.{t}", "pred", t)
    for half, name in product(("f16", "bf16"), ("add", "sub", "fma")):
        for m in optional(("rn", "rz", "rm", "rp"), "sat", "ftz"):
            halves = (half, half) if name == "fma" else (half,)
            yield form(f"{name}{m}.f32.{half}", "f32", *halves, "f32")


def integers() -> Iterator[str]:
    """Products, bit fields and the carry flag."""
    for t in INTEGERS:
        wide = f"{t[0]}{2 * int(t[1:])}"
        for half in ("lo", "hi"):
            yield form(f"mul.{half}.{t}", t, t, t)
            yield form(f"mul24.{half}.{t}", t, t, t)
            for name, sat in product(("mad", "mad24"), ("", ".sat")):
                yield form(f"{name}.{half}{sat}.{t}", t, t, t, t)
            for name in ("mad.{}.cc", "madc.{}", "madc.{}.cc"):
                yield form(f"{name.format(half)}.{t}", t, t, t, t)
        if t[1:] != "64":
            yield form(f"mul.wide.{t}", wide, t, t)
            yield form(f"mad.wide.{t}", wide, t, t, wide)
        for name in ("add.cc", "addc", "addc.cc", "sub.cc", "subc", "subc.cc"):
            yield form(f"{name}.{t}", t, t, t)
        yield form(f"bfe.{t}", t, t, "u32", "u32")
        yield from (form(f"bfind{m}.{t}", "u32", t) for m in ("", ".shiftamt"))
        yield from (form(f"szext.{m}.{t}", t, t, "u32") for m in ("clamp", "wrap"))
        yield form(f"shr.{t}", t, t, "u32")
    for a, b in product(("u32", "s32", "b32"), repeat=2):
        for name in ("dp4a", "dp2a.lo", "dp2a.hi"):
            yield form(f"{name}.{a}.{b}", *["b32"] * 4)


def bits() -> Iterator[str]:
    """Logic, shifts and permutes."""
    for t in [*BITS, "pred", "u32", "f32", "s16"]:
        yield from (form(f"{name}.{t}", t, t, t) for name in ("and", "or", "xor"))
        yield from (form(f"{name}.{t}", t, t) for name in ("not", "cnot", "brev"))
        yield from (form(f"{name}.{t}", "u32", t) for name in ("popc", "clz"))
        if t != "pred":
            yield from (form(f"{name}.{t}", t, t, "u32") for name in ("shl", "shr"))
            yield form(f"bfi.{t}", t, t, t, "u32", "u32")
    for mode in (".clamp", ".wrap", ""):
        yield form(f"bmsk{mode}.b32", *["b32"] * 3)
        yield from (form(f"shf.{side}{mode}.b32", *["b32"] * 4) for side in "lr")
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16", ".xx"):
        yield form(f"prmt.b32{mode}", *["b32"] * 4)
    yield form("fns.b32", "b32", "b32", "b32", "s32")
    yield form("prmt.b32", *["b32"] * 3, extra=", 0x5410")
    yield form("lop3.b32", *["b32"] * 4, extra=", 0x55")
    yield "lop3.and.b32 %r0|%p1, %r1, %r2, %r3, 0x55, %p2;"
    yield "lop3.or.b32 _|%p1, %r1, %r2, %r3, 0x55, !%p2;"
    yield "lop3.xor.b32 %r0|%p1, %r1, %r2, %r3, 0x55, %p2;"


def comparisons() -> Iterator[str]:
    """setp, set, selp and slct."""
    results = ["u32", "s32", "f32", "u16", "s16", "f16", "bf16", "f16x2", "bf16x2", "u64"]
    for t in [*BITS, *INTEGERS, *HALVES, "f32", "f64"]:
        a, b = register(t, 1), register(t, 2)
        destination = "%p1|%p2" if t.endswith("x2") else "%p1"
        yield from (f"setp.{op}.{t} {destination}, {a}, {b};" for op in COMPARISONS)
        for op in ("lt", "eq", "ltu"):
            yield f"setp.{op}.ftz.{t} {destination}, {a}, {b};"
            yield f"setp.{op}.and.{t} {destination}, {a}, {b}, !%p3;"
            yield f"setp.{op}.{t} %p1|%p2, {a}, {b};"
            yield f"setp.{op}.or.{t} %p1|_, {a}, {b}, %p3;"
            for result in results:
                yield f"set.{op}.{result}.{t} {register(result, 0)}, {a}, {b};"
                yield f"set.{op}.xor.{result}.{t} {register(result, 0)}, {a}, {b}, %p1;"
        yield form(f"selp.{t}", t, t, t, "pred")
        for test in (f"{t}.s32", f"{t}.f32", f"ftz.{t}.f32", f"ftz.{t}.s32"):
            yield form(f"slct.{test}", t, t, t, test[-3:])


def moves() -> Iterator[str]:
    """mov of registers, constants, special registers and vectors."""
    for t in [*BITS, *INTEGERS, *HALVES, "f32", "f64", "pred", "b128", "b8", "u8"]:
        yield form(f"mov.{t}", t, t)
        if t not in ("b128", "b8", "u8"):
            yield form(f"mov.{t}", t, extra=", 1")
    yield from """
mov.b64 %d0, {%r1,%r2};
mov.b64 {%r1,%r2}, %d0;
mov.b64 {%r1,_}, %d0;
mov.u64 %d0, {%r1,%r2};
mov.b64 %d0, {%f1,%f2};
mov.b64 {%h1,%h2,%h3,%h4}, %d1;
mov.b32 {%h1,%h2}, %r1;
mov.b32 %r1, {%c1,%c2,%c3,%c4};
mov.b16 {%c1,%c2}, %h1;
mov.b128 %q1, {%d1,%d2};
mov.b128 {%d1,%d2}, %q1;
mov.b128 %q1, {%r1,%r2,%r3,%r4};
mov.b32 %r1, %tid.x;
mov.u64 %d1, %clock64;
mov.u16 %h1, %tid.x;
mov.b64 %d0, {%r1, 0};
mov.b32 %r1, %d1;
mov.b64 {%f1,%r2}, %d0;
mov.s32 %r1, -1;
mov.f32 %f1, 0f3F800000;
mov.f64 %e1, 1.5;
mov.b32 %f1, %r1;
mov.f32 %r1, %f1;
add.f32 %f1, %f2, 1.5;
add.f32 %r1, %r2, %r3;
add.f32 %f1, %f2, 1;""".strip().splitlines()


def conversions() -> Iterator[str]:
    """cvt and cvt.pack."""
    modes = ("rn", "rz", "rm", "rp")
    whole = ("rni", "rzi", "rmi", "rpi")
    for a, b in product(BYTES_AND_INTEGERS, repeat=2):
        yield from (form(f"cvt{m}.{a}.{b}", a, b) for m in optional("sat", ("rn", "rni")))
    for a, b in product(FLOATS, BYTES_AND_INTEGERS):
        for m in optional((*modes, "rni"), "ftz", "sat"):
            yield form(f"cvt{m}.{a}.{b}", a, b)
        for m in optional((*whole, "rn"), "ftz", "sat"):
            yield form(f"cvt{m}.{b}.{a}", b, a)
    for a, b in product(FLOATS, repeat=2):
        for m in optional((*modes, "rni", "rzi", "rna"), "ftz", "sat", "relu", "satfinite"):
            yield form(f"cvt{m}.{a}.{b}", a, b)
    for a in PACKED:
        for m in optional(("rn", "rz", "rp"), "relu", "satfinite"):
            yield form(f"cvt{m}.{a}.f32", a, "f32", "f32")
            yield from (form(f"cvt{m}.{a}.{b}", a, b) for b in PACKED)
    for m in optional(("rna", "rn", "rz"), "satfinite", "relu"):
        yield form(f"cvt{m}.tf32.f32", "tf32", "f32")
    for t in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        yield form(f"cvt.pack.sat.{t}.s32", "b32", "s32", "s32")
        yield form(f"cvt.pack.sat.{t}.s32.b32", "b32", "s32", "s32", "b32")
        yield form(f"cvt.pack.{t}.s32", "b32", "s32", "s32")
    yield from """
cvt.u16.u32 %h1, %d1;
cvt.u32.u16 %d1, %h1;
cvt.s64.s8 %d1, %r1;
cvt.s8.s32 %r1, %r1;
cvt.rn.f16.f32 %r1, %f1;
cvt.f32.f16 %f1, %r1;
cvt.f32.bf16 %f1, %r1;
cvt.rn.f32.s32 %r1, %r2;
cvt.rn.bf16.f32 %r1, %f1;
cvt.f32.f16 %d1, %h1;
cvt.rzi.s32.f32 %d1, %f1;
cvt.rzi.s16.f32 %r1, %f1;""".strip().splitlines()


def others() -> Iterator[str]:
    """What has no family: stochastic rounding, video, and forms that only look like one."""
    yield from """
lop3.b32 %r0, %r1, %r2, %r3, %r4;
lop3.b32 %r0, %r1, %r2, %r3, 256;
lop3.or.b32 %r0, %r1, %r2, %r3, 1, %p0;
prmt.b32.f5e %r0, %r1, %r2, %r3;
and.pred %p0, %p1, %r1;
not.b32 %p0, %r1;
popc.u32 %r0, %r1;
cvt.rs.e4m3x4.f32 %r0, {%f0, %f1, %f2, %f3}, %r1;
cvt.rs.satfinite.e4m3x4.f32 %r0, {%f0, %f1, %f2, %f3}, %r1;
cvt.rs.satfinite.e4m3x2.f32 %h0, %f0, %f1, %r1;
cvt.rs.bf16x2.f32 %r0, %f0, %f1, %r1;
add.s32 %r0, %r1;
add.s64 %d0, %r1, %d1;
add.s32 %p0, %r1, %r2;
add.f32 %f0, %f1, %e1;
mul.s32 %r0, %r1, %r2;
mul.wide.s64 %d0, %d1, %d2;
mul.wide.f32 %e0, %f1, %f2;
madc.u32 %r0, %r1, %r2, %r3;
addc.sat.s32 %r0, %r1, %r2;
dp4a.u32.u64 %r0, %r1, %r2, %r3;
add.ftz.f32.f16 %f0, %h1, %f2;
mul.rn.f32.f16 %f0, %h1, %f2;
add.rna.f32 %f0, %f1, %f2;
max.xorsign.f32 %f0, %f1, %f2;
mov.b64 %d0, {%r1, %r2, %r3};
mov.f32 %r0, 1;
mov.b32 %r0, %p0;
setp.ftz.lt.f64 %p0, %e1, %e2;
selp.b32 %r0, %r1, %r2, %r3;
slct.b32.u32 %r0, %r1, %r2, %r3;
set.lt.f64.s32 %e0, %r1, %r2;
vadd.s32.u32.u64 %r0, %r1, %r2;
vadd.s32.u32.u32.max %r0, %r1, %r2;
vadd.s32.u32.s32.sat %r0, %r1, %r2;
vadd4.u32.u32.u32.sat.add %r0, %r1, %r2, %r3;
vshl.u32.u32.u32 %r0, %r1, %r2;
vavrg.u32.u32.u32 %r0, %r1, %r2;""".strip().splitlines()


FAMILIES = {
    "arithmetic": arithmetic,
    "integers": integers,
    "bits": bits,
    "comparisons": comparisons,
    "moves": moves,
    "conversions": conversions,
    "others": others,
}
