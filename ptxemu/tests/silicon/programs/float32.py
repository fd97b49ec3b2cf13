"""IEEE arithmetic on f32 in every rounding mode, with .ftz and .sat; min, max, signs, classes."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Program

ROUNDINGS = ("rn", "rz", "rm", "rp")
CLASSES = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
ONE, TWO, THREE = ["f32"], ["f32"] * 2, ["f32"] * 3
COUNT = 64


def _op(opcode: str, ins: list[str], name: str = "") -> Program:
    return operation("float32", f"{opcode}.f32", ins, ONE, name, count=COUNT)


def _arithmetic() -> Iterator[Program]:
    for rounding in ROUNDINGS:
        for suffix in ("", ".ftz", ".sat", ".ftz.sat"):
            for op, ins in (("add", TWO), ("sub", TWO), ("mul", TWO), ("fma", THREE)):
                if op != "sub" or suffix == ".ftz":
                    yield _op(f"{op}.{rounding}{suffix}", ins)
        for ftz in ("", ".ftz"):
            for op, ins in (("div", TWO), ("rcp", ONE), ("sqrt", ONE)):
                yield _op(f"{op}.{rounding}{ftz}", ins)


def _selection() -> Iterator[Program]:
    for ftz in ("", ".ftz"):
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    yield _op(f"{op}{ftz}{nan}{sign}", TWO)
        for op in ("abs", "neg"):
            yield _op(f"{op}{ftz}", ONE)
    yield _op("copysign", TWO, "copysign")
    for name in CLASSES:
        body = f"testp.{name}.f32 p, a;\nselp.b32 d, 1, 0, p;"
        yield elementwise(f"float32/testp.{name}", body, ONE, ["b32"], count=32)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _arithmetic()
    yield from _selection()
