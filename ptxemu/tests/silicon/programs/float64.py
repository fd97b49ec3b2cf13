"""IEEE arithmetic on f64 in every rounding mode; min, max, signs, classes."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise
from tests.silicon.programs.case import Program
from tests.silicon.programs.float32 import CLASSES, ROUNDINGS

ONE, TWO, THREE = ["f64"], ["f64"] * 2, ["f64"] * 3
COUNT = 48


def programs() -> Iterator[Program]:
    """All of the family."""
    for rounding in ROUNDINGS:
        for op, ins, operands in (
            ("add", TWO, "a, b"),
            ("sub", TWO, "a, b"),
            ("mul", TWO, "a, b"),
            ("fma", THREE, "a, b, c"),
            ("div", TWO, "a, b"),
            ("rcp", ONE, "a"),
            ("sqrt", ONE, "a"),
        ):
            if op == "sub" and rounding != "rn":
                continue
            full = f"{op}.{rounding}.f64"
            yield elementwise(f"float64/{full}", f"{full} d, {operands};", ins, ONE, count=COUNT)
    for op in ("min", "max"):
        yield elementwise(f"float64/{op}", f"{op}.f64 d, a, b;", TWO, ONE, count=COUNT)
    for op in ("abs", "neg"):
        yield elementwise(f"float64/{op}", f"{op}.f64 d, a;", ONE, ONE, count=32)
    yield elementwise("float64/copysign", "copysign.f64 d, a, b;", TWO, ONE, count=COUNT)
    for name in CLASSES:
        body = f"testp.{name}.f64 p, a;\nselp.b32 d, 1, 0, p;"
        yield elementwise(f"float64/testp.{name}", body, ONE, ["b32"], count=32)
