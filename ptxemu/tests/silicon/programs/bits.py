"""Bits: logic, shifts, funnel shifts, fields, permutations, counts, masks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.silicon.programs.build import elementwise, operation
from tests.silicon.programs.case import Bytes, Program
from tests.silicon.programs.values import below, random_bytes, typed

COUNT = 48
LUTS = (0x00, 0xFF, 0xE8, 0x96, 0xCA, 0x1B, 0x80, 0x01, 0x6D)
PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def _small(label: str, count: int = COUNT) -> Bytes:
    """Shift amounts, positions and lengths: mostly near the ends of a register."""
    near = np.array(
        [0, 1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 127, 128, 255, 256]
    )
    pool = np.concatenate([near, [-1, 1 << 31], below(label, count - len(near) - 2, 40)])
    return (
        (pool & 0xFFFFFFFF)
        .astype(np.uint32)[np.argsort(below(label + "/o", count, 9999))]
        .view(np.uint8)
    )


def _op(opcode: str, ins: list[str], out: str, name: str = "", **rest: Any) -> Program:
    return operation("bits", opcode, ins, [out], name, **{"count": COUNT} | rest)


def _logic() -> Iterator[Program]:
    for bits in (16, 32, 64):
        kind = f"b{bits}"
        for op in ("and", "or", "xor"):
            yield _op(f"{op}.{kind}", [kind] * 2, kind)
        for op in ("not", "cnot"):
            yield _op(f"{op}.{kind}", [kind], kind)
        for op in (f"shl.b{bits}", f"shr.u{bits}", f"shr.s{bits}", f"shr.b{bits}"):
            data = [typed(f"bits/{op}/a", kind, COUNT), _small(f"bits/{op}/b")]
            yield _op(op, [kind, "b32"], kind, data=data)
    body = """setp.ne.b32 p, a, 0; setp.gt.s32 q, b, 5; and.pred r, p, q; selp.b32 d, 1, 0, r;
        or.pred r, p, q; @r or.b32 d, d, 2; xor.pred r, p, q; @r or.b32 d, d, 4;
        not.pred r, p; @r or.b32 d, d, 8;"""
    yield elementwise("bits/pred", body, ["b32"] * 2, ["b32"], count=COUNT)
    for lut in LUTS:
        body = f"lop3.b32 d, a, b, c, {lut:#x};"
        yield elementwise(f"bits/lop3.{lut:02x}", body, ["b32"] * 3, ["b32"], count=COUNT)
    for op in ("and", "or"):
        body = f"""setp.lt.s32 q, a, 0;
            lop3.{op}.b32 d|p, a, b, c, 0x2b, q;
            selp.b32 e, 1, 0, p;"""
        name = f"bits/lop3.bool.{op}"
        yield elementwise(name, body, ["b32"] * 3, ["b32"] * 2, count=COUNT, version="8.3")


def _fields() -> Iterator[Program]:
    for mode in ("wrap", "clamp"):
        for side in "lr":
            name = f"bits/shf.{side}.{mode}"
            data = [typed(f"{name}/{i}", "b32", COUNT) for i in "ab"] + [_small(name)]
            yield _op(f"shf.{side}.{mode}.b32", ["b32"] * 3, "b32", name[5:], data=data)
        name = f"bits/bmsk.{mode}"
        data = [_small(f"{name}/a"), _small(f"{name}/b")]
        yield _op(f"bmsk.{mode}.b32", ["b32"] * 2, "b32", name[5:], data=data)
        for kind in ("u32", "s32"):
            name = f"bits/szext.{mode}.{kind}"
            data = [random_bytes(f"{name}/a", 4 * COUNT), _small(f"{name}/b")]
            yield _op(f"szext.{mode}.{kind}", ["b32"] * 2, "b32", data=data)
    for kind in ("u32", "s32", "u64", "s64"):
        name = f"bits/bfe.{kind}"
        data = [random_bytes(f"{name}/a", int(kind[1:]) // 8 * 96)]
        data += [_small(f"{name}/b", 96), _small(f"{name}/c", 96)]
        yield _op(f"bfe.{kind}", [kind, "b32", "b32"], kind, count=96, data=data)
    for bits in (32, 64):
        name, kind = f"bits/bfi.b{bits}", f"b{bits}"
        data = [random_bytes(f"{name}/{i}", bits // 8 * 96) for i in "ab"]
        data += [_small(f"{name}/c", 96), _small(f"{name}/g", 96)]
        yield _op(f"bfi.{kind}", [kind, kind, "b32", "b32"], kind, count=96, data=data)


def _counts() -> Iterator[Program]:
    for bits in (32, 64):
        for op in ("popc", "clz"):
            yield _op(f"{op}.b{bits}", [f"b{bits}"], "b32")
        yield _op(f"brev.b{bits}", [f"b{bits}"], f"b{bits}")
        for sign in "us":
            for shift in ("", ".shiftamt"):
                yield _op(f"bfind{shift}.{sign}{bits}", [f"b{bits}"], "b32")
    name = "bits/fns.b32"
    offsets = (below(name, COUNT, 9) - 4).astype(np.int32).view(np.uint8)
    bases = below(f"{name}/base", COUNT, 32).astype(np.uint32).view(np.uint8)
    data = [random_bytes(name, 4 * COUNT), bases, offsets]
    yield _op("fns.b32", ["b32"] * 3, "b32", data=data)


def _permutations() -> Iterator[Program]:
    data = [random_bytes(f"bits/prmt/{i}", 4 * 64) for i in range(3)]
    yield _op("prmt.b32", ["b32"] * 3, "b32", "prmt", count=64, data=data)
    for mode in PRMT_MODES:
        name = f"bits/prmt.{mode}"
        data = [random_bytes(f"{name}/{i}", 4 * 16) for i in range(2)]
        data.append((np.arange(16, dtype=np.uint32) ^ 0x130).view(np.uint8))
        yield _op(f"prmt.b32.{mode}", ["b32"] * 3, "b32", name[5:], count=16, data=data)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _logic()
    yield from _fields()
    yield from _counts()
    yield from _permutations()
