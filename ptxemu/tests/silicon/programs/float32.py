"""IEEE arithmetic on f32 in every rounding mode, with .ftz and .sat; min, max, signs, classes."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise
from tests.silicon.programs.case import Program

ROUNDINGS = ("rn", "rz", "rm", "rp")
CLASSES = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
ONE, TWO, THREE = ["f32"], ["f32"] * 2, ["f32"] * 3
COUNT = 64


def _arithmetic() -> Iterator[Program]:
    for rounding in ROUNDINGS:
        for suffix in ("", ".ftz", ".sat", ".ftz.sat"):
            for op, ins, operands in (("add", TWO, "a, b"), ("sub", TWO, "a, b"),
                                      ("mul", TWO, "a, b"), ("fma", THREE, "a, b, c")):  # fmt: skip
                if op == "sub" and suffix != ".ftz":
                    continue
                full = f"{op}.{rounding}{suffix}.f32"
                yield elementwise(
                    f"float32/{full}", f"{full} d, {operands};", ins, ONE, count=COUNT
                )
        for ftz in ("", ".ftz"):
            full = f"div.{rounding}{ftz}.f32"
            yield elementwise(f"float32/{full}", f"{full} d, a, b;", TWO, ONE, count=COUNT)
            for op in ("rcp", "sqrt"):
                full = f"{op}.{rounding}{ftz}.f32"
                yield elementwise(f"float32/{full}", f"{full} d, a;", ONE, ONE, count=COUNT)


def _selection() -> Iterator[Program]:
    for op in ("min", "max"):
        for ftz in ("", ".ftz"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    full = f"{op}{ftz}{nan}{sign}.f32"
                    yield elementwise(f"float32/{full}", f"{full} d, a, b;", TWO, ONE, count=COUNT)
    for op in ("abs", "neg"):
        for ftz in ("", ".ftz"):
            full = f"{op}{ftz}.f32"
            yield elementwise(f"float32/{full}", f"{full} d, a;", ONE, ONE, count=COUNT)
    yield elementwise("float32/copysign", "copysign.f32 d, a, b;", TWO, ONE, count=COUNT)
    for name in CLASSES:
        body = f"testp.{name}.f32 p, a;\nselp.b32 d, 1, 0, p;"
        yield elementwise(f"float32/testp.{name}", body, ONE, ["b32"], count=32)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _arithmetic()
    yield from _selection()
