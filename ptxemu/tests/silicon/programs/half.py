"""f16, bf16 and their pairs: add, sub, mul, fma, min, max, abs, neg; mixed compare in `compare`."""

from collections.abc import Iterator

from tests.silicon.programs.build import operation
from tests.silicon.programs.case import Program

COUNT = 64


def _op(opcode: str, kind: str, count: int) -> Program:
    return operation("half", f"{opcode}.{kind}", [kind] * count, [kind], count=COUNT)


def _arithmetic(kind: str) -> Iterator[Program]:
    brain = kind.startswith("b")
    for op in ("add", "sub", "mul"):
        for suffix in ("",) if brain else ("", ".ftz", ".sat", ".ftz.sat"):
            yield _op(f"{op}.rn{suffix}", kind, 2)
    more = () if brain else (".ftz", ".sat", ".ftz.sat", ".ftz.relu")
    for suffix in ("", ".relu", ".oob", ".oob.relu", *more):
        yield _op(f"fma.rn{suffix}", kind, 3)


def _selection(kind: str) -> Iterator[Program]:
    for ftz in ("",) if kind.startswith("b") else ("", ".ftz"):
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    yield _op(f"{op}{ftz}{nan}{sign}", kind, 2)
        for op in ("abs", "neg"):
            yield _op(f"{op}{ftz}", kind, 1)


def programs() -> Iterator[Program]:
    """All of the family."""
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        yield from _arithmetic(kind)
        yield from _selection(kind)
