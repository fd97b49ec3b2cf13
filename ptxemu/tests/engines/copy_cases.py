"""Cases of copies: programs with their arrays, to record on an H200 and to compare with it.

`tests.silicon` has the families bulk, tma and im2col besides; what is here they lack.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tests.engines.copy_ptx import (
    ALONE,
    CLUSTER,
    COORDINATES,
    CP_ASYNC,
    HEADER,
    LOAD,
    REPLACE,
    STORE,
    STORE_TENSOR,
)
from tests.tensor_map_arguments import TensorMap

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """One launch of 32 threads: arrays are changed in place and are its result."""

    name: str
    ptx: str
    kernel: str
    arrays: tuple[Bytes, ...]
    args: tuple[int | TensorMap | str, ...]
    """A number (32 bits), a map, or "array k" for an array's address."""
    smem: int = 0
    grid: int = 1


def _operands(rank: int) -> str:
    return ", ".join(f"%r{10 + i}" for i in range(rank))


def _program(body: str) -> str:
    return HEADER + body


def _load_case(
    name: str,
    spec: TensorMap,
    data: Bytes,
    coords: tuple[int, ...],
    *,
    tx: int,
    at: int = 0,
    size: int = 1024,
    alone: str = ALONE,
    instruction_rank: int = 0,
) -> Case:
    rank = len(coords)
    named = instruction_rank or rank
    ptx = LOAD.format(
        name="load", coordinates=COORDINATES, rank=named, operands=_operands(named), alone=alone
    )
    out = np.zeros(size + 16, np.uint8)
    args = (spec, "array 1", size, at, tx, *coords, *(0,) * (5 - rank))
    return Case(name, _program(ptx), "load", (data, out), args, smem=size)


def _store_case(
    name: str,
    opcode: str,
    spec: TensorMap,
    data: Bytes,
    source: Bytes,
    coords: tuple[int, ...],
    *,
    alone: str = ALONE,
) -> Case:
    rank = len(spec.dims)
    body = STORE_TENSOR.format(opcode=opcode, operands=_operands(rank))
    ptx = STORE.format(
        name="store", target=".param .align 64 .b8 map[128]", coordinates=COORDINATES, body=body,
        alone=alone,
    )  # fmt: skip
    args = (spec, "array 1", len(source), 0, *coords, *(0,) * (5 - rank))
    return Case(name, _program(ptx), "store", (data, source), args, smem=len(source))


ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}


def _ramp(count: int) -> Bytes:
    """Bytes whose 16-bit words count up, so that any misplaced one shows."""
    return np.arange(count // 2, dtype=np.uint16).view(np.uint8).copy()


def element_stride_cases() -> Iterator[Case]:
    """Element strides: a box of ceil(box / stride) elements lands."""
    for steps, box in (
        ((1, 2), (16, 8)),
        ((1, 3), (16, 8)),
        ((2, 1), (16, 4)),
        ((1, 8), (16, 9)),
        ((3, 2), (32, 4)),
    ):
        spec = TensorMap(0, 1, (48, 20), (96,), box, element_strides=steps)
        landed = 2 * box[0] * -(-box[1] // steps[1])
        for where, coords in (("inside", (8, 2)), ("below", (-8, -3)), ("above", (40, 15))):
            name = f"step_{steps[0]}_{steps[1]}_{where}"
            yield _load_case(name, spec, _ramp(1920), coords, tx=landed)
            if where == "below":
                continue
            source = _ramp(-(-landed // 128) * 128) ^ 0x80
            opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
            yield _store_case(f"{name}_store", opcode, spec, _ramp(1920), source, coords)
        if box[1] * steps[1] > box[1]:
            full = 2 * box[0] * box[1]
            yield _load_case(
                f"step_{steps[0]}_{steps[1]}_full_tx", spec, _ramp(1920), (8, 2), tx=full
            )


SPECIAL = {
    2: (0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC0, 0x7E00, 0x7C01, 0x3C00),
    4: (0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x007FFFFF,
        0x00800000, 0x80400001, 0x3F800FFF, 0x3F801000, 0x3F801001),
    8: (0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 1 << 51),
}  # fmt: skip
"""Bits of zeros, subnormals, infinities and NaNs of the float types of each size."""


def _float_pair(dtype: int) -> tuple[Bytes, Bytes]:
    """256 values of a float type twice: every special one meets every other, then random ones."""
    size = ELEMENT_BYTES[dtype]
    special = np.array(SPECIAL[size], dtype=f"u{size}")
    left, right = np.repeat(special, len(special)), np.tile(special, len(special))
    rng = np.random.default_rng(dtype)
    if size == 2:
        values = [rng.integers(0, 65536, 256 - len(left)).astype(np.uint16) for _ in range(2)]
        values[1] = (values[0] & 0xFC00) ^ (values[1] & 0x83FF)  # near in magnitude
    else:
        values = [rng.standard_normal(256 - len(left)).astype(f"f{size}") for _ in range(2)]
    left, right = (
        np.concatenate([a, v.view(a.dtype)]) for a, v in zip((left, right), values, strict=True)
    )
    return left.view(np.uint8), right.view(np.uint8)


def fill_cases() -> Iterator[Case]:
    """Zero and NaN fill of every type, and what a type's load changes."""
    for dtype, size in ELEMENT_BYTES.items():
        for fill in (0, 1):
            if fill and dtype < 6:
                continue
            values = _float_pair(dtype)[1] if dtype >= 6 else _ramp(256)
            samples = values[: 16 * size].copy()
            spec = TensorMap(0, dtype, (16,), (), (32,), oob_fill=fill)
            at = (-16 // size,)
            yield _load_case(f"fill_{fill}_type_{dtype}", spec, samples, at, tx=32 * size)


OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def tensor_reduce_cases() -> Iterator[Case]:
    """cp.reduce.async.bulk.tensor: every operation on every type; hardware lacks some."""
    for dtype, size in ELEMENT_BYTES.items():
        for operation in OPERATIONS:
            left, right = _operand_pair(dtype)
            count = len(left) // size
            spec = TensorMap(0, dtype, (count,), (), (count,))
            opcode = (
                f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{operation}.tile.bulk_group"
            )
            yield _store_case(f"reduce_{operation}_{dtype}", opcode, spec, left, right, (0,))


def _operand_pair(dtype: int) -> tuple[Bytes, Bytes]:
    """Two arrays of 256 values."""
    if dtype >= 6:
        return _float_pair(dtype)
    rng = np.random.default_rng(dtype)
    size = ELEMENT_BYTES[dtype]
    left, right = (rng.integers(0, 256, 256 * size, dtype=np.uint8) for _ in range(2))
    left.view(f"u{size}")[:8] = (0, 1, 5, 7, 127, 3, 9, 0)
    right.view(f"u{size}")[:8] = (0, 1, 5, 3, 1, 9, 3, 7)
    return left, right


BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
NO_MAP = TensorMap(0, 0, (16,), (), (16,))


def _cluster_case(
    name: str, body: str, *, tx: tuple[int, int], size: int, spec: TensorMap = NO_MAP
) -> Case:
    arrays = (_ramp(2048), _ramp(2 * size) ^ 0x80, np.zeros(2 * size, np.uint8))
    args = (spec, "array 0", "array 1", "array 2", size, *tx)
    ptx = CLUSTER.format(name="pair", body=body)
    return Case(name, _program(ptx), "pair", arrays, args, smem=size, grid=2)


def cluster_cases() -> Iterator[Case]:
    """Multicast whose addresses are those of the other CTA."""
    spec = TensorMap(0, 1, (64, 16), (128,), (16, 4), swizzle=1)
    opcode = "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
    opcode += ".mbarrier::complete_tx::bytes.multicast::cluster"
    body = f"{opcode} [%r20], [%rd0, {{%r19, %r19}}], [%r21], %h0;"
    yield _cluster_case("tensor_multicast_peer_address", body, tx=(128, 128), size=512, spec=spec)


def thread_copy_cases() -> Iterator[Case]:
    """cp.async of every size: whole, cut by src-size, and ignored by a predicate."""
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        for mode, last in (("whole", ""), ("src_size", ", %r5"), ("ignore_src", ", %p0")):
            ptx = CP_ASYNC.format(
                name="copy", size=size, opcode=f"cp.async.{cache}.shared.global",
                operands=f"{size}{last}",
            )  # fmt: skip
            counts = (np.arange(32, dtype=np.uint32) * 7 % (size + 1)).view(np.uint8)
            arrays = (_ramp(32 * size) + 1, counts.copy(), np.zeros(32 * size, np.uint8))
            args = ("array 0", "array 1", "array 2", 0)
            name = f"thread_{size}_{cache}_{mode}"
            yield Case(name, _program(ptx), "copy", arrays, args, smem=32 * size)
            if mode == "whole":
                arrays = (_ramp(64 * size), counts.copy(), np.zeros(32 * size, np.uint8))
                args = ("array 0", "array 1", "array 2", size // 2)
                yield Case(
                    f"{name}_misaligned", _program(ptx), "copy", arrays, args, smem=32 * size
                )


def whole_warp_cases() -> Iterator[Case]:
    """Instructions that 32 lanes execute with the same operands."""
    spec = TensorMap(0, 1, (64, 32), (128,), (16, 4))
    ramp = _ramp(4096)
    for times in (1, 2, 32):
        yield _load_case(
            f"warp_load_expects_{times}", spec, ramp.copy(), (8, 2), tx=128 * times, alone=""
        )
    source = _ramp(128) ^ 0x80
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    yield _store_case("warp_store", opcode, spec, ramp.copy(), source.copy(), (8, 2), alone="")
    spec = TensorMap(0, 2, (32, 32), (128,), (8, 4))
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    yield _store_case("warp_reduce", opcode, spec, ramp.copy(), source.copy(), (8, 2), alone="")


def placement_cases() -> Iterator[Case]:
    """Own addresses and mbarriers elsewhere, ranks that differ: what hardware accepts."""
    done = "mbarrier::complete_tx::bytes"
    add = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{done}.add.u32"
    copy = f"cp.async.bulk.shared::cluster.shared::cta.{done}"
    for name, opcode in (("reduce", add), ("copy", copy)):
        body = f"add.u32 %r22, %r1, 256;\n{opcode} [%r22], [%r1], 128, [%r5];"
        yield _cluster_case(f"place_{name}_own", body, tx=(128, 0), size=512)
        body = f"add.u32 %r22, %r20, 256;\n{opcode} [%r22], [%r1], 128, [%r5];"
        yield _cluster_case(f"place_{name}_own_barrier", body, tx=(128, 0), size=512)
    load = f"cp.async.bulk.shared::cluster.global.{done}"
    body = f"add.u32 %r22, %r20, 256;\n{load} [%r22], [%rd6], 128, [%r5];"
    yield _cluster_case("place_load_own_barrier", body, tx=(128, 0), size=512)
    body = f"mov.b16 %h0, 7;\n{load}.multicast::cluster [%r1], [%rd6], 128, [%r5], %h0;"
    yield _cluster_case("place_mask_beyond", body, tx=(128, 128), size=512)
    body = f"mov.b16 %h0, 0;\n{load}.multicast::cluster [%r1], [%rd6], 128, [%r5], %h0;"
    yield _cluster_case("place_mask_empty", body, tx=(0, 0), size=512)
    flat = TensorMap(0, 1, (64, 32), (128,), (16, 4))
    deep = TensorMap(0, 1, (64, 4, 8), (128, 512), (16, 4, 1))
    yield _load_case("place_rank_3_of_2", flat, _ramp(4096), (8, 2, 0), tx=128, instruction_rank=3)
    yield _load_case("place_rank_2_of_3", deep, _ramp(4096), (8, 2, 0), tx=128, instruction_rank=2)


def odd_cases() -> Iterator[Case]:
    """What the manual forbids or leaves open; most of them are errors on hardware."""
    ramp = _ramp(4096)
    for dtype, size in ((0, 1), (1, 2), (7, 4), (8, 8)):
        spec = TensorMap(0, dtype, (128 // size, 32), (128,), (32 // size, 4))
        for shift in sorted({-16 // size, -1, 8 // size}):
            name = f"odd_coordinate_{dtype}_{shift}"
            yield _load_case(name, spec, ramp.copy(), (16 + shift, 2), tx=128)
    spec = TensorMap(0, 1, (64, 32), (128,), (16, 4))
    for at in (16, 64):
        yield _load_case(f"odd_destination_{at}", spec, ramp.copy(), (8, 2), tx=128, at=at)
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    for x, y in ((8, -1), (-8, 2), (1000, 2), (8, 30), (8, 300), (1000, 100)):
        name = f"odd_store_{x}_{y}"
        yield _store_case(name, opcode, spec, ramp.copy(), _ramp(128) ^ 0x80, (x, y))
    for at in (16, 64, 128):
        case = _store_case(f"odd_source_{at}", opcode, spec, ramp.copy(), _ramp(512) ^ 0x80, (8, 2))
        yield replace(case, args=(*case.args[:3], at, *case.args[4:]))
    for x, y in ((2**31 - 8, 0), (-(2**31), 0), (8, 2**31 - 1), (8, -(2**31))):
        yield _load_case(f"odd_far_{x}_{y}", spec, ramp.copy(), (x, y), tx=128)
    for size in (0, 8, 24):
        body = f"{BULK_LOAD} [%r1], [%rd6], %r16, [%r5];"
        yield _cluster_case(f"odd_size_{size}", body, tx=(size, 0), size=512)
    for source, target in ((8, 0), (0, 8), (16, 0), (0, 16)):
        body = (
            f"add.u64 %rd6, %rd6, {source};\nadd.u32 %r22, %r1, {target};\n"
            f"{BULK_LOAD} [%r22], [%rd6], 64, [%r5];"
        )
        yield _cluster_case(f"odd_alignment_{source}_{target}", body, tx=(64, 0), size=512)


REPLACEMENTS: tuple[tuple[str, int | None, int], ...] = (
    ("global_address", None, 0x123456789AB0),
    *(("rank", None, v) for v in range(5)),
    *(("box_dim", k, v) for k in range(5) for v in (1, 16, 256)),
    *(("global_dim", k, v) for k in range(5) for v in (1, 77, 0xFFFFFFFF)),
    *(("global_stride", k, v) for k in range(4) for v in (16, 4096, (1 << 40) - 16)),
    *(("element_stride", k, v) for k in range(5) for v in (1, 2, 8)),
    *(("elemtype", None, v) for v in range(13)),
    *(("interleave_layout", None, v) for v in range(3)),
    *(("swizzle_mode", None, v) for v in range(4)),
    *(("fill_mode", None, v) for v in range(2)),
)


def replace_cases(base: Bytes) -> Iterator[Case]:
    """tensormap.replace of every field; the result is the changed 128 bytes."""
    for field_, ordinal, value in REPLACEMENTS:
        wide = field_ in ("global_address", "global_stride")
        immediate = field_ in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
        source = str(value) if immediate else ("%rd3" if wide else "%r6")
        operands = source if ordinal is None else f"{ordinal}, {source}"
        opcode = f"tensormap.replace.tile.{field_}.shared::cta.b1024.{'b64' if wide else 'b32'}"
        ptx = REPLACE.format(
            name="replace", low=value & 0xFFFFFFFF, value=value, opcode=opcode, operands=operands
        )
        name = f"replace_{field_}_{'' if ordinal is None else ordinal}_{value:x}"
        arrays = (base.copy(), np.zeros(128, np.uint8))
        yield Case(name, _program(ptx), "replace", arrays, ("array 0", "array 1"), smem=128)
    for value in (0, 6, 7, 11):  # from a TF32 map
        opcode = "tensormap.replace.tile.elemtype.shared::cta.b1024.b32"
        ptx = REPLACE.format(name="replace", low=0, value=0, opcode=opcode, operands=str(value))
        tf32 = base.copy()
        tf32.view(np.uint64)[1] |= 1 << 16
        arrays = (tf32, np.zeros(128, np.uint8))
        name = f"replace_tf32_elemtype_{value}"
        yield Case(name, _program(ptx), "replace", arrays, ("array 0", "array 1"), smem=128)


REPLACE_BASE = np.array(
    [0x7F0012345600, 0x0000_0040_0004_2192, 0x0000_0C00_0000_0300, 0x0000_0000_0000_3000]
    + [0x0000_0007_0000_000F, 0x0000_0005_0000_0006, 0x0F00_0000_0000_0004, 0x0000_0000_0102_0304]
    + [0] * 8,
    dtype=np.uint64,
).view(np.uint8)


def all_cases() -> list[Case]:
    """Every case; names are unique."""
    cases = [
        *element_stride_cases(), *fill_cases(), *tensor_reduce_cases(), *cluster_cases(),
        *thread_copy_cases(), *whole_warp_cases(), *placement_cases(), *odd_cases(),
        *replace_cases(REPLACE_BASE),
    ]  # fmt: skip
    assert len({case.name for case in cases}) == len(cases)
    return cases
