"""Approximate functions: results as close to the hardware's as measured."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.silicon.programs.build import operation
from tests.silicon.programs.case import Bytes, Check, Program
from tests.silicon.programs.values import F32_EDGES, encode, floats, raw

COUNT = 128


def _uniform(label: str, low: float, high: float, count: int, kind: str = "f32") -> Bytes:
    unit = (raw(label, count) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return encode(low + (high - low) * unit, kind)


def _wide(label: str, low: float = -20.0, high: float = 20.0) -> Bytes:
    """The special values, values of every size, and values in a range."""
    edges = np.array(F32_EDGES, dtype=np.uint32).view(np.uint8)
    rest = COUNT - len(F32_EDGES)
    return np.concatenate(
        [edges, floats(label, "f32", rest // 2, 60), _uniform(label, low, high, rest - rest // 2)]
    )


F32 = (
    # Instruction, bound, range of the inputs that are not special. The bound is the ISA's maximum
    # error or twice the largest difference from an H200, whichever is less; measured behind it.
    ("ex2.approx.f32", Check("f32", ulp=2), -30.0, 30.0),  # 2
    ("ex2.approx.ftz.f32", Check("f32", ulp=2), -30.0, 30.0),  # 1
    ("lg2.approx.f32", Check("f32", ulp=2, absolute=2.0**-22), 0.4, 2.2),  # half of it
    ("lg2.approx.ftz.f32", Check("f32", ulp=2, absolute=2.0**-22), 0.4, 2.2),  # half of it
    ("rcp.approx.f32", Check("f32", ulp=1), -4.0, 4.0),  # 1
    ("rcp.approx.ftz.f32", Check("f32", ulp=1), -4.0, 4.0),  # 1
    ("rsqrt.approx.f32", Check("f32", ulp=1), 0.0, 9.0),  # 1
    ("rsqrt.approx.ftz.f32", Check("f32", ulp=1), 0.0, 9.0),  # 1
    ("sqrt.approx.f32", Check("f32", ulp=1), 0.0, 9.0),  # 1
    ("sqrt.approx.ftz.f32", Check("f32", ulp=1), 0.0, 9.0),  # 1
    ("tanh.approx.f32", Check("f32", relative=1.8e-5), -4.0, 4.0),  # 9e-6
)
DIVISIONS = ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32")


def _op(opcode: str, ins: list[str], out: str, check: Check, **rest: Any) -> Program:
    return operation("approx", opcode, ins, [out], check=check, **rest)


def programs() -> Iterator[Program]:
    """All of the family."""
    for op, check, low, high in F32:
        yield _op(op, ["f32"], "f32", check, count=COUNT, data=[_wide(f"approx/{op}", low, high)])
    special = [0, 1 << 31, 0x7F800000, 0x7FC00000, 1, 0x80000001, 0x00800000, 0x3F800000]
    for full in (f"{op}.approx{ftz}.f32" for op in ("sin", "cos") for ftz in ("", ".ftz")):
        words = np.array(special * 4, np.uint32).view(np.uint8)
        data = [np.concatenate([_uniform(f"approx/{full}", -np.pi, np.pi, 96), words])]
        check = Check("f32", absolute=2.0**-20.5)  # measured: 2^-21.3
        yield _op(full, ["f32"], "f32", check, count=COUNT, data=data)
    for op in DIVISIONS:
        data = [_wide(f"approx/{op}/a"), floats(f"approx/{op}/b", "f32", COUNT, 40)]
        check = Check("f32", ulp=2)  # measured: 1
        yield _op(op, ["f32"] * 2, "f32", check, count=COUNT, data=data)
    for op in ("rcp", "rsqrt"):
        yield _op(
            f"{op}.approx.ftz.f64", ["f64"], "f64", Check("f64", relative=2.0**-20)
        )  # 2^-20.0
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        ftz = ".ftz" if kind[0] == "b" else ""
        for op in ("tanh.approx", f"ex2.approx{ftz}"):
            check = Check(kind.removesuffix("x2"), ulp=1)  # measured: 1
            yield _op(f"{op}.{kind}", [kind], kind, check)
