"""cvt: every pair of types of sm_90, roundings, saturation, packed narrow floats; cvt.pack."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.silicon.programs.build import operation
from tests.silicon.programs.case import Program
from tests.silicon.programs.values import floats

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
WIDE = {"f16": 36, "bf16": 80, "f32": 80, "f64": 150}
COUNT = 48


def _op(opcode: str, ins: list[str], out: str, name: str = "", **rest: Any) -> Program:
    return operation("convert", opcode, ins, [out], name, **rest)


def _convert(to: str, source: str, modifiers: str = "", count: int = COUNT) -> Program:
    full, data = f"cvt{modifiers}.{to}.{source}", None
    if source in FLOATS:
        data = [floats(f"convert/{full}", source, count, WIDE[source])]
    if "bf16" in (to, source):  # registers of exactly the type's size
        return _op(full, [source], to, count=count, data=data, narrow=True)
    # elsewhere sub-word results live in 32-bit registers, sign- or zero-extended
    return _op(full, [source], "b32" if to in INTEGERS[:4] else to, count=count, data=data)


def _saturates(to: str, source: str) -> bool:
    """Whether some value of `source` is none of `to`; .sat is refused elsewhere."""
    if source[0] == "s" and to[0] == "u":
        return True
    return int(to[1:]) < int(source[1:]) + (source[0] != to[0])


def _integers() -> Iterator[Program]:
    for source in INTEGERS:
        for to in INTEGERS:
            yield _convert(to, source, count=32)
            if _saturates(to, source):
                yield _convert(to, source, ".sat", count=32)


def _to_float() -> Iterator[Program]:
    for source in INTEGERS:
        for to in FLOATS:
            for rounding in ("rn", "rz", "rm", "rp"):
                small = source in ("u8", "s8") or (source in ("u16", "s16") and to != "f16")
                if rounding != "rn" and (small or (to == "f64" and source[1:] == "32")):
                    continue  # always exact
                yield _convert(to, source, f".{rounding}", count=32)


def _from_float() -> Iterator[Program]:
    for source in FLOATS:
        for to in INTEGERS:
            for rounding in ("rni", "rzi", "rmi", "rpi"):
                if rounding in ("rmi", "rpi") and to not in ("s32", "u64"):
                    continue
                yield _convert(to, source, f".{rounding}")
            if to in ("u8", "s16", "s32", "u64") and source != "bf16":
                yield _convert(to, source, ".rzi.sat")
            if source == "f32":
                yield _convert(to, source, ".rpi.ftz")


def _between_floats() -> Iterator[Program]:
    for source, to, roundings in (
        ("f32", "f16", ("rn", "rz", "rn.relu", "rz.relu", "rn.ftz", "rm", "rp", "rn.sat")),
        ("f32", "bf16", ("rn", "rz", "rn.relu", "rz.relu", "rm", "rp")),
        ("f64", "f32", ("rn", "rz", "rm", "rp", "rn.ftz", "rn.sat")),
        ("f64", "f16", ("rn", "rz", "rm", "rp", "rn.sat")),
        ("f64", "bf16", ("rn", "rz")),
        ("f16", "bf16", ("rn", "rz")),
        ("bf16", "f16", ("rn", "rz")),
        ("f32", "f32", ("rni", "rzi", "rmi", "rpi", "rni.ftz", "rzi.sat", "sat", "ftz.sat")),
        ("f64", "f64", ("rni", "rzi", "rmi", "rpi", "sat")),
        ("f16", "f16", ("rni", "rzi", "rmi", "rpi", "sat")),
        ("bf16", "bf16", ("rni", "rzi", "rmi", "rpi")),
        ("f16", "f32", ("", "ftz", "sat")),
        ("f16", "f64", ("",)),
        ("bf16", "f32", ("",)),
        ("bf16", "f64", ("",)),
        ("f32", "f64", ("", "ftz", "sat")),
    ):
        for rounding in roundings:
            yield _convert(to, source, f".{rounding}" if rounding else "", count=64)
    for rounding in ("rna", "rn", "rz", "rn.relu", "rz.relu"):
        full = f"cvt.{rounding}.tf32.f32"
        yield _op(full, ["f32"], "b32", data=[floats(f"convert/{full}", "f32", 64, 80)])


def _pairs() -> Iterator[Program]:
    for to in ("f16x2", "bf16x2"):
        for rounding in ("rn", "rz", "rn.relu", "rz.relu"):
            full = f"cvt.{rounding}.{to}.f32"
            near = 36 if to == "f16x2" else 60
            data = [floats(f"convert/{full}/{i}", "f32", 64, near) for i in "ab"]
            yield _op(full, ["f32"] * 2, to, data=data)
    for narrow in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            near = 24 if narrow[1] == "4" else 44
            full = f"cvt.rn.satfinite{relu}.{narrow}.f32"
            data = [floats(f"{full}/{i}", "f32", 96, near) for i in "ab"]
            yield _op(full, ["f32"] * 2, "b16", count=96, data=data)
            full = f"cvt.rn.satfinite{relu}.{narrow}.f16x2"
            data = [floats(full, "f16", 192, min(near, 28))]
            yield _op(full, ["f16x2"], "b16", count=96, data=data)
            every = np.arange(256, dtype=np.uint8)
            yield _op(f"cvt.rn{relu}.f16x2.{narrow}", ["b16"], "f16x2", count=128, data=[every])


def _packs() -> Iterator[Program]:
    for to in ("u16", "s16"):
        yield _op(f"cvt.pack.sat.{to}.s32", ["s32"] * 2, "b32", f"cvt.pack.{to}", count=32)
    for to in ("u8", "s8", "u4", "s4", "u2", "s2"):
        ins, name = ["s32", "s32", "b32"], f"cvt.pack.{to}"
        yield _op(f"cvt.pack.sat.{to}.s32.b32", ins, "b32", name, count=32)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _integers()
    yield from _to_float()
    yield from _from_float()
    yield from _between_floats()
    yield from _pairs()
    yield from _packs()
