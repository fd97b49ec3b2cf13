"""Instructions element by element: integers, f32, f64, halves, and comparisons of all types."""

import re
from collections.abc import Iterator
from itertools import product

import numpy as np
from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Program
from tests.silicon.programs.values import integers, typed

INTEGERS = "t:u16,s16,u32,s32,u64,s64"
ROUNDINGS = "rn,rz,rm,rp"
CLASSES = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
FORMS = f"""
integer 48: {{add,sub,mul.lo}}.{{t:s16,s32,s64}}: t t > t
integer 48: {{mul.hi,min,max}}.{{{INTEGERS}}}: t t > t
integer 48: {{mad.lo,mad.hi,sad}}.{{{INTEGERS}}}: t t t > t
integer 48: mul.wide.{{t:u16,s16,u32,s32}}: t t > wide
integer 48: mad.wide.{{t:u16,s16,u32,s32}}: t t wide > wide
integer 48: {{abs,neg}}.{{t:s16,s32,s64}}: t > t
integer 48: {{add.sat,sub.sat}}.s32: s32 s32 > s32
integer 48: {{mad.hi.sat,mad24.hi.sat}}.s32: s32 s32 s32 > s32
integer 48: mul24.{{lo,hi}}.{{t:u32,s32}}: t t > t
integer 48: mad24.{{lo,hi}}.{{t:u32,s32}}: t t t > t
integer 48: {{min,max}}.relu.{{t:s32,s16x2}}: t t > t
integer 48: {{min,max,add}}.{{t:u16x2,s16x2}}: t t > t
float32 64: {{add,mul}}.{{{ROUNDINGS}}}{{,.ftz,.sat,.ftz.sat}}.f32: f32 f32 > f32
float32 64: sub.{{{ROUNDINGS}}}.ftz.f32: f32 f32 > f32
float32 64: fma.{{{ROUNDINGS}}}{{,.ftz,.sat,.ftz.sat}}.f32: f32 f32 f32 > f32
float32 64: div.{{{ROUNDINGS}}}{{,.ftz}}.f32: f32 f32 > f32
float32 64: {{rcp,sqrt}}.{{{ROUNDINGS}}}{{,.ftz}}.f32: f32 > f32
float32 64: {{min,max}}{{,.ftz}}{{,.NaN}}{{,.xorsign.abs}}.f32: f32 f32 > f32
float32 64: {{abs,neg}}{{,.ftz}}.f32: f32 > f32
float32 64: copysign.f32: f32 f32 > f32: copysign
float64 48: {{add,mul,div}}.{{{ROUNDINGS}}}.f64: f64 f64 > f64
float64 48: sub.rn.f64: f64 f64 > f64
float64 48: fma.{{{ROUNDINGS}}}.f64: f64 f64 f64 > f64
float64 48: {{rcp,sqrt}}.{{{ROUNDINGS}}}.f64: f64 > f64
float64 48: {{n:min,max,copysign}}.f64: f64 f64 > f64: n
float64 32: {{n:abs,neg}}.f64: f64 > f64: n
half 64: {{add,sub,mul}}.rn{{,.ftz,.sat,.ftz.sat}}.{{t:f16,f16x2}}: t t > t
half 64: {{add,sub,mul}}.rn.{{t:bf16,bf16x2}}: t t > t
half 64: fma.rn{{,.ftz,.sat,.ftz.sat,.ftz.relu}}.{{t:f16,f16x2}}: t t t > t
half 64: fma.rn{{.relu,.oob,.oob.relu}}.{{t:f16,f16x2,bf16,bf16x2}}: t t t > t
half 64: fma.rn.{{t:bf16,bf16x2}}: t t t > t
half 64: {{min,max}}{{,.ftz}}{{,.NaN}}{{,.xorsign.abs}}.{{t:f16,f16x2}}: t t > t
half 64: {{min,max}}{{,.NaN}}{{,.xorsign.abs}}.{{t:bf16,bf16x2}}: t t > t
half 64: {{abs,neg}}{{,.ftz}}.{{t:f16,f16x2}}: t > t
half 64: {{abs,neg}}.{{t:bf16,bf16x2}}: t > t
compare 32: set.lt.{{o:u32,s32,f32}}.{{t:u32,s32,s64,f32,f64}}: t t > o
compare 64: set.lt.{{o:f16,u16,u32}}.f16: f16 f16 > o
compare 64: set.lt.{{o:bf16,s16,s32}}.bf16: bf16 bf16 > o
compare 64: set.lt.f16.{{t:s32,f32}}: t t > f16
compare 64: set.lt.bf16.u32: u32 u32 > bf16
compare 64: set.gtu.{{t:f16x2.f16x2,bf16x2.bf16x2}}: half half > half
compare 32: slct.{{t:b16,u32,s64,f32,f64}}.s32: t t s32 > t
compare 32: slct{{,.ftz}}.{{t:b16,u32,s64,f32,f64}}.f32: t t f32 > t
"""
"""Family and number of elements; opcode, with choices in braces; operands and result; name."""


def _expanded(pattern: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every choice of a pattern, and what was chosen in the braces that have a letter."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.rpartition(":")[2].split(",") for part in parts[1::2]]
    letters = [part.rpartition(":")[0] for part in parts[1::2]]
    for chosen in product(*choices):
        opcode = parts[0] + "".join(c + p for c, p in zip(chosen, parts[2::2], strict=True))
        yield opcode, dict(zip(letters, chosen, strict=True))


def _forms() -> Iterator[Program]:
    for line in FORMS.strip().splitlines():
        family, count, rest = line.replace(":", " ", 1).split(maxsplit=2)
        pattern, operands, *name = re.split(r": (?![^{]*\})", rest)
        for opcode, known in _expanded(pattern):
            kind = known.get("t", "")
            known |= {"half": kind.partition(".")[0]}
            known |= {"wide": f"{kind[:1]}{2 * int(kind[1:])}"} if "wide" in operands else {}
            ins, _, out = operands.partition(" > ")
            types = [known.get(one, one) for one in ins.split()]
            own = known.get(name[0], name[0]) if name else ""
            yield operation(family, opcode, types, [known.get(out, out)], own, count=int(count))


def _divisions() -> Iterator[Program]:
    for op, bits, sign in product(("div", "rem"), (16, 32, 64), "us"):
        name, kind = f"integer/{op}.{sign}{bits}", f"{sign}{bits}"
        divisor = integers(f"{name}/divisor", bits, 48).view(f"u{bits // 8}").copy()
        divisor[divisor == 0] = 3
        if sign == "s":  # INT_MIN / -1 overflows: left open
            divisor[divisor == (1 << bits) - 1] = (1 << bits) - 3
        data = [integers(f"{name}/dividend", bits, 48), divisor.view(np.uint8)]
        yield operation("integer", f"{op}.{kind}", [kind] * 2, [kind], count=48, data=data)


def _carries() -> Iterator[Program]:
    for kind in ("u32", "u64"):
        for op in ("add", "sub"):
            body = f"{op}.cc.{kind} d, a, b;\n{op}c.cc.{kind} e, b, a;\n{op}c.{kind} f, a, a;"
            yield elementwise(f"integer/{op}.cc.{kind}", body, [kind] * 2, [kind] * 3, count=48)
        for part in ("lo", "hi"):
            body = f"""mad.{part}.cc.{kind} d, a, b, c;
                madc.{part}.cc.{kind} e, b, c, a;
                madc.hi.{kind} f, a, b, c;"""
            name = f"integer/mad.{part}.cc.{kind}"
            yield elementwise(name, body, [kind] * 3, [kind] * 3, count=48)
    body = "sub.cc.u32 d, a, b;\naddc.u32 e, a, b;"
    yield elementwise("integer/sub.cc.addc", body, ["u32"] * 2, ["u32"] * 2, count=48)


def _dots() -> Iterator[Program]:
    for a, b, op in product("us", "us", ("dp4a", "dp2a.lo", "dp2a.hi")):
        full = f"{op}.{a}32.{b}32"
        data = [typed(f"integer/{full}/{i}", "b32", 48) for i in range(3)]
        yield operation("integer", full, ["b32"] * 3, ["b32"], count=48, data=data)


def _classes() -> Iterator[Program]:
    for kind, name in product(("f32", "f64"), CLASSES):
        body = f"testp.{name}.{kind} p, a;\nselp.b32 d, 1, 0, p;"
        yield elementwise(f"float{kind[1:]}/testp.{name}", body, [kind], ["b32"], count=32)


FLOAT_OPERATORS = (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
)  # fmt: skip
OPERATORS = {
    "b": ("eq", "ne"),
    "u": ("eq", "ne", "lo", "ls", "hi", "hs", "lt", "ge"),
    "s": ("eq", "ne", "lt", "le", "gt", "ge"),
    "f": FLOAT_OPERATORS,
}
TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f16", "bf16", "f32", "f64")


def _comparisons() -> Iterator[Program]:
    """All operators of a type in one program: a bit each."""
    for kind in TYPES:
        for ftz in ("", ".ftz") if kind in ("f16", "f32") else ("",):
            lines = ["mov.b32 d, 0;"]
            operators = FLOAT_OPERATORS if kind == "bf16" else OPERATORS[kind[0]]
            for bit, operator in enumerate(operators):
                lines.append(f"setp.{operator}{ftz}.{kind} p, a, b;")
                lines.append(f"@p or.b32 d, d, {1 << bit};")
            name = f"compare/setp{ftz}.{kind}"
            yield elementwise(name, "\n".join(lines), [kind] * 2, ["b32"], count=96)
    lines = ["setp.gt.s32 r, a, 100;", "mov.b32 d, 0;"]
    for bit, op in enumerate(("and", "or", "xor")):
        lines += [f"setp.lt.{op}.u32 p|q, a, b, r;", f"@p or.b32 d, d, {1 << bit};"]
        lines += [f"@q or.b32 d, d, {8 << bit};", f"setp.ne.{op}.f32 p, a, b, !r;"]
        lines += [f"@p or.b32 d, d, {64 << bit};"]
    yield elementwise("compare/setp.bool", "\n".join(lines), ["b32"] * 2, ["b32"], count=64)
    for kind, ftz in (("f16x2", ""), ("f16x2", ".ftz"), ("bf16x2", "")):
        lines = ["mov.b32 d, 0;"]
        for bit, operator in enumerate(FLOAT_OPERATORS):
            lines.append(f"setp.{operator}{ftz}.{kind} p|q, a, b;")
            lines.append(f"@p or.b32 d, d, {1 << bit};\n@q or.b32 d, d, {1 << 16 + bit};")
        name = f"compare/setp{ftz}.{kind}"
        yield elementwise(name, "\n".join(lines), [kind] * 2, ["b32"], count=96)
    body = """setp.gt.s32 p, a, 100;
        set.ge.and.u32.f32 d, a, b, p;
        set.ltu.xor.ftz.f32.f32 e, a, b, !p;"""
    yield elementwise("compare/set.bool", body, ["f32"] * 2, ["u32", "f32"], count=64)
    for kind in ("b16", "b32", "b64", "f32", "f64"):
        body = f"setp.lt.s32 p, c, 7;\nselp.{kind} d, a, b, p;"
        yield elementwise(f"compare/selp.{kind}", body, [kind, kind, "s32"], [kind], count=32)


def programs() -> Iterator[Program]:
    """All of the families integer, float32, float64, half and compare."""
    yield from _forms()
    yield from _divisions()
    yield from _carries()
    yield from _dots()
    yield from _classes()
    yield from _comparisons()
