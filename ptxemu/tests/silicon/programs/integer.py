"""Integers: add, sub, mul, mad, sad, div, rem, min, max, abs, neg, carries, dot products."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Program
from tests.silicon.programs.values import integers, typed

WIDTHS = (16, 32, 64)
COUNT = 48


def _op(opcode: str, ins: list[str], out: str, name: str = "", **rest: Any) -> Program:
    return operation("integer", opcode, ins, [out], name, count=COUNT, **rest)


def _simple() -> Iterator[Program]:
    for bits in WIDTHS:
        for sign in "us":
            kind, wide = f"{sign}{bits}", f"{sign}{2 * bits}"
            for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
                if sign == "s" or op not in ("add", "sub", "mul.lo"):  # else the bits of signed
                    yield _op(f"{op}.{kind}", [kind] * 2, kind)
            for op in ("mad.lo", "mad.hi", "sad"):
                yield _op(f"{op}.{kind}", [kind] * 3, kind)
            if bits < 64:
                yield _op(f"mul.wide.{kind}", [kind] * 2, wide)
                yield _op(f"mad.wide.{kind}", [kind, kind, wide], wide)
            yield from _divisions(kind, bits)
        for op in ("abs", "neg"):
            yield _op(f"{op}.s{bits}", [f"s{bits}"], f"s{bits}")


def _divisions(kind: str, bits: int) -> Iterator[Program]:
    for op in ("div", "rem"):
        name = f"integer/{op}.{kind}"
        divisor = integers(f"{name}/divisor", bits, COUNT).view(f"u{bits // 8}").copy()
        divisor[divisor == 0] = 3
        dividend = integers(f"{name}/dividend", bits, COUNT)
        if kind[0] == "s":  # INT_MIN / -1 overflows: left open
            divisor[divisor == (1 << bits) - 1] = (1 << bits) - 3
        yield _op(f"{op}.{kind}", [kind] * 2, kind, data=[dividend, divisor.view(np.uint8)])


def _special() -> Iterator[Program]:
    for op, count in (("add.sat", 2), ("sub.sat", 2), ("mad.hi.sat", 3), ("mad24.hi.sat", 3)):
        yield _op(f"{op}.s32", ["s32"] * count, "s32")
    for op, count in (("mul24", 2), ("mad24", 3)):
        for part in ("lo", "hi"):
            for kind in ("u32", "s32"):
                yield _op(f"{op}.{part}.{kind}", [kind] * count, kind)
    for op in ("min", "max"):
        for kind in ("relu.s32", "relu.s16x2", "u16x2", "s16x2"):
            plain = kind.removeprefix("relu.")
            yield _op(f"{op}.{kind}", [plain] * 2, plain)
    for kind in ("u16x2", "s16x2"):
        yield _op(f"add.{kind}", [kind] * 2, kind)


def _carries() -> Iterator[Program]:
    for bits in (32, 64):
        kind = f"u{bits}"
        for op in ("add", "sub"):
            body = f"{op}.cc.{kind} d, a, b;\n{op}c.cc.{kind} e, b, a;\n{op}c.{kind} f, a, a;"
            name = f"integer/{op}.cc.{kind}"
            yield elementwise(name, body, [kind] * 2, [kind] * 3, count=COUNT)
        for part in ("lo", "hi"):
            body = f"""mad.{part}.cc.{kind} d, a, b, c;
                madc.{part}.cc.{kind} e, b, c, a;
                madc.hi.{kind} f, a, b, c;"""
            name = f"integer/mad.{part}.cc.{kind}"
            yield elementwise(name, body, [kind] * 3, [kind] * 3, count=COUNT)
    body = "sub.cc.u32 d, a, b;\naddc.u32 e, a, b;"
    yield elementwise("integer/sub.cc.addc", body, ["u32"] * 2, ["u32"] * 2, count=COUNT)


def _dots() -> Iterator[Program]:
    for a in "us":
        for b in "us":
            for op in ("dp4a", "dp2a.lo", "dp2a.hi"):
                full = f"{op}.{a}32.{b}32"
                data = [typed(f"integer/{full}/{i}", "b32", COUNT) for i in range(3)]
                yield _op(full, ["b32"] * 3, "b32", data=data)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _simple()
    yield from _special()
    yield from _carries()
    yield from _dots()
