"""f16, bf16 and their pairs: add, sub, mul, fma, min, max, abs, neg; mixed compare in `compare`."""

from collections.abc import Iterator

from tests.silicon.programs.build import elementwise
from tests.silicon.programs.case import Program

COUNT = 64


def _arithmetic(kind: str) -> Iterator[Program]:
    brain = kind.startswith("b")
    for op in ("add", "sub", "mul"):
        for suffix in ("",) if brain else ("", ".ftz", ".sat", ".ftz.sat"):
            full = f"{op}.rn{suffix}.{kind}"
            yield elementwise(f"half/{full}", f"{full} d, a, b;", [kind] * 2, [kind], count=COUNT)
    suffixes = ("", ".relu", ".oob", ".oob.relu")
    if not brain:
        suffixes = (*suffixes, ".ftz", ".sat", ".ftz.sat", ".ftz.relu")
    for suffix in suffixes:
        full = f"fma.rn{suffix}.{kind}"
        yield elementwise(f"half/{full}", f"{full} d, a, b, c;", [kind] * 3, [kind], count=COUNT)


def _selection(kind: str) -> Iterator[Program]:
    brain = kind.startswith("b")
    for ftz in ("",) if brain else ("", ".ftz"):
        for op in ("min", "max"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    full = f"{op}{ftz}{nan}{sign}.{kind}"
                    yield elementwise(
                        f"half/{full}", f"{full} d, a, b;", [kind] * 2, [kind], count=COUNT
                    )
        for op in ("abs", "neg"):
            full = f"{op}{ftz}.{kind}"
            yield elementwise(f"half/{full}", f"{full} d, a;", [kind], [kind], count=COUNT)


def programs() -> Iterator[Program]:
    """All of the family."""
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        yield from _arithmetic(kind)
        yield from _selection(kind)
