"""Comparison and selection: setp and set of every operator and type, selp, slct."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Program

COUNT = 64
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


def _operators(kind: str) -> tuple[str, ...]:
    return FLOAT_OPERATORS if kind == "bf16" else OPERATORS[kind[0]]


def _setp() -> Iterator[Program]:
    """All operators of a type in one program: a bit each."""
    for kind in TYPES:
        for ftz in ("", ".ftz") if kind in ("f16", "f32") else ("",):
            lines = ["mov.b32 d, 0;"]
            for bit, operator in enumerate(_operators(kind)):
                lines.append(f"setp.{operator}{ftz}.{kind} p, a, b;")
                lines.append(f"@p or.b32 d, d, {1 << bit};")
            name = f"compare/setp{ftz}.{kind}"
            yield elementwise(name, "\n".join(lines), [kind] * 2, ["b32"], count=96)
    lines = ["setp.gt.s32 r, a, 100;", "mov.b32 d, 0;"]
    for bit, op in enumerate(("and", "or", "xor")):
        lines += [f"setp.lt.{op}.u32 p|q, a, b, r;", f"@p or.b32 d, d, {1 << bit};"]
        lines += [f"@q or.b32 d, d, {8 << bit};", f"setp.ne.{op}.f32 p, a, b, !r;"]
        lines += [f"@p or.b32 d, d, {64 << bit};"]
    yield elementwise("compare/setp.bool", "\n".join(lines), ["b32"] * 2, ["b32"], count=COUNT)
    for kind, ftz in (("f16x2", ""), ("f16x2", ".ftz"), ("bf16x2", "")):
        lines = ["mov.b32 d, 0;"]
        for bit, operator in enumerate(FLOAT_OPERATORS):
            lines.append(f"setp.{operator}{ftz}.{kind} p|q, a, b;")
            lines.append(f"@p or.b32 d, d, {1 << bit};\n@q or.b32 d, d, {1 << 16 + bit};")
        name = f"compare/setp{ftz}.{kind}"
        yield elementwise(name, "\n".join(lines), [kind] * 2, ["b32"], count=96)


def _set() -> Iterator[Program]:
    for out in ("u32", "s32", "f32"):
        for kind in ("u32", "s32", "s64", "f32", "f64"):
            yield operation("compare", f"set.lt.{out}.{kind}", [kind] * 2, [out], count=32)
    body = """setp.gt.s32 p, a, 100;
        set.ge.and.u32.f32 d, a, b, p;
        set.ltu.xor.ftz.f32.f32 e, a, b, !p;"""
    yield elementwise("compare/set.bool", body, ["f32"] * 2, ["u32", "f32"], count=COUNT)
    for out, kind in (("f16", "f16"), ("bf16", "bf16"), ("u16", "f16"), ("s16", "bf16"),
                      ("u32", "f16"), ("s32", "bf16"), ("f16", "s32"), ("bf16", "u32"),
                      ("f16", "f32"), ("f16x2", "f16x2"), ("bf16x2", "bf16x2")):  # fmt: skip
        operator = "lt" if kind[-2:] != "x2" else "gtu"
        opcode = f"set.{operator}.{out}.{kind}"
        yield operation("compare", opcode, [kind] * 2, [out], count=COUNT)


def _select() -> Iterator[Program]:
    for kind in ("b16", "b32", "b64", "f32", "f64"):
        body = f"setp.lt.s32 p, c, 7;\nselp.{kind} d, a, b, p;"
        yield elementwise(f"compare/selp.{kind}", body, [kind, kind, "s32"], [kind], count=32)
    for kind in ("b16", "u32", "s64", "f32", "f64"):
        for by, ftz in (("s32", ""), ("f32", ""), ("f32", ".ftz")):
            opcode = f"slct{ftz}.{kind}.{by}"
            yield operation("compare", opcode, [kind, kind, by], [kind], count=32)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _setp()
    yield from _set()
    yield from _select()
