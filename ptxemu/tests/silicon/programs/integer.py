"""Integers: add, sub, mul, mad, sad, div, rem, min, max, abs, neg, carries, dot products."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import elementwise
from tests.silicon.programs.case import Bytes, Program
from tests.silicon.programs.values import integers, typed

WIDTHS = (16, 32, 64)
COUNT = 48


def _simple() -> Iterator[Program]:
    for bits in WIDTHS:
        for sign in "us":
            kind = f"{sign}{bits}"
            for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
                if sign == "u" and op in ("add", "sub", "mul.lo"):
                    continue  # the same bits as signed
                body = f"{op}.{kind} d, a, b;"
                yield elementwise(f"integer/{op}.{kind}", body, [kind] * 2, [kind], count=COUNT)
            for part in ("lo", "hi"):
                body = f"mad.{part}.{kind} d, a, b, c;"
                name = f"integer/mad.{part}.{kind}"
                yield elementwise(name, body, [kind] * 3, [kind], count=COUNT)
            body = f"sad.{kind} d, a, b, c;"
            yield elementwise(f"integer/sad.{kind}", body, [kind] * 3, [kind], count=COUNT)
            if bits < 64:
                wide = f"{sign}{2 * bits}"
                body = f"mul.wide.{kind} d, a, b;"
                yield elementwise(f"integer/mul.wide.{kind}", body, [kind] * 2, [wide], count=COUNT)
                body = f"mad.wide.{kind} d, a, b, c;"
                name = f"integer/mad.wide.{kind}"
                yield elementwise(name, body, [kind, kind, wide], [wide], count=COUNT)
            yield from _divisions(kind, bits)
        for op in ("abs", "neg"):
            body = f"{op}.s{bits} d, a;"
            kind = f"s{bits}"
            yield elementwise(f"integer/{op}.{kind}", body, [kind], [kind], count=COUNT)


def _divisions(kind: str, bits: int) -> Iterator[Program]:
    for op in ("div", "rem"):
        name = f"integer/{op}.{kind}"
        divisor = integers(f"{name}/divisor", bits, COUNT).view(f"u{bits // 8}").copy()
        divisor[divisor == 0] = 3
        dividend = integers(f"{name}/dividend", bits, COUNT)
        if kind[0] == "s":  # INT_MIN / -1 overflows: left open
            divisor[divisor == (1 << bits) - 1] = (1 << bits) - 3
        data: list[Bytes] = [dividend, divisor.view(np.uint8)]
        yield elementwise(name, f"{op}.{kind} d, a, b;", [kind] * 2, [kind], count=COUNT, data=data)


def _special() -> Iterator[Program]:
    for op in ("add.sat", "sub.sat"):
        body = f"{op}.s32 d, a, b;"
        yield elementwise(f"integer/{op}.s32", body, ["s32"] * 2, ["s32"], count=COUNT)
    body = "mad.hi.sat.s32 d, a, b, c;"
    yield elementwise("integer/mad.hi.sat.s32", body, ["s32"] * 3, ["s32"], count=COUNT)
    for op in ("mul24", "mad24"):
        for part in ("lo", "hi"):
            for kind in ("u32", "s32"):
                operands, ins = ("a, b", 2) if op == "mul24" else ("a, b, c", 3)
                name = f"integer/{op}.{part}.{kind}"
                body = f"{op}.{part}.{kind} d, {operands};"
                yield elementwise(name, body, [kind] * ins, [kind], count=COUNT)
    body = "mad24.hi.sat.s32 d, a, b, c;"
    yield elementwise("integer/mad24.hi.sat.s32", body, ["s32"] * 3, ["s32"], count=COUNT)
    for op in ("min", "max"):
        for kind in ("s32", "s16x2"):
            body = f"{op}.relu.{kind} d, a, b;"
            yield elementwise(f"integer/{op}.relu.{kind}", body, [kind] * 2, [kind], count=COUNT)
        for kind in ("u16x2", "s16x2"):
            body = f"{op}.{kind} d, a, b;"
            yield elementwise(f"integer/{op}.{kind}", body, [kind] * 2, [kind], count=COUNT)
    for kind in ("u16x2", "s16x2"):
        body = f"add.{kind} d, a, b;"
        yield elementwise(f"integer/add.{kind}", body, [kind] * 2, [kind], count=COUNT)


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
                name = f"integer/{op}.{a}32.{b}32"
                data = [typed(f"{name}/{i}", "b32", COUNT) for i in range(3)]
                body = f"{op}.{a}32.{b}32 d, a, b, c;"
                yield elementwise(name, body, ["b32"] * 3, ["b32"], count=COUNT, data=data)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _simple()
    yield from _special()
    yield from _carries()
    yield from _dots()
