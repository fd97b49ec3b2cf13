"""IEEE arithmetic on f64 in every rounding mode; min, max, signs, classes."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Program
from tests.silicon.programs.float32 import CLASSES, ROUNDINGS

ONE, TWO, THREE = ["f64"], ["f64"] * 2, ["f64"] * 3
COUNT = 48


def programs() -> Iterator[Program]:
    """All of the family."""
    for rounding in ROUNDINGS:
        for op in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt"):
            if op != "sub" or rounding == "rn":
                ins = {"fma": THREE, "rcp": ONE, "sqrt": ONE}.get(op, TWO)
                yield operation("float64", f"{op}.{rounding}.f64", ins, ONE, count=COUNT)
    for op, ins in (("min", TWO), ("max", TWO), ("abs", ONE), ("neg", ONE), ("copysign", TWO)):
        count = COUNT if ins is TWO else 32
        yield operation("float64", f"{op}.f64", ins, ONE, op, count=count)
    for name in CLASSES:
        body = f"testp.{name}.f64 p, a;\nselp.b32 d, 1, 0, p;"
        yield elementwise(f"float64/testp.{name}", body, ONE, ["b32"], count=32)
