"""Copies in im2col mode: ranks, corners, offsets, borders, strides, swizzles, stores."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tests.silicon.programs.bulk import DONE, load_program, store_program
from tests.silicon.programs.case import Array, Bytes, Im2colMap, Program
from tests.silicon.programs.tma import coordinates

U8, U16, U32, F32 = 0, 1, 2, 7
SIZE = {U8: 1, U16: 2, U32: 4, F32: 4}
EXTENTS = (7, 5, 4, 3)
"""Of width, height, depth; the last one is the number of images."""


def _map(rank: int, depth: int = 16, dtype: int = U16, **fields: object) -> Im2colMap:
    dims = (depth, *EXTENTS[: rank - 2], EXTENTS[3])
    strides, stride = [], depth * SIZE[dtype]
    for extent in dims[1:]:
        strides.append(stride)
        stride = stride * extent + 16
    m = Im2colMap(
        1, dtype, dims, tuple(strides), (), lower=(-1,) * (rank - 2), upper=(-1,) * (rank - 2),
        channels=16 // SIZE[dtype], pixels=20,
    )  # fmt: skip
    return replace(m, **fields)  # type: ignore[arg-type]


def _tensor(m: Im2colMap) -> Bytes:
    size = m.strides[-1] * m.dims[-1]
    if m.dtype == F32:
        return np.arange(size // 4, dtype=np.float32).view(np.uint8)
    return np.arange(-(-size // 2), dtype=np.uint16).view(np.uint8).copy()


def _landed(m: Im2colMap) -> tuple[int, int]:
    """Bytes that arrive, and bytes of shared memory that they span."""
    inner = m.channels * SIZE[m.dtype]
    pitch = max(inner, (0, 32, 64, 128)[m.swizzle])
    return inner * m.pixels, pitch * m.pixels


def _load(name: str, m: Im2colMap, coords: tuple[int, ...], offsets: tuple[int, ...]) -> Program:
    sets, operands = coordinates(coords)
    sets += "".join(f"mov.b16 %h{i}, {o};" for i, o in enumerate(offsets))
    listed = ", ".join(f"%h{i}" for i in range(len(offsets)))
    issue = f"""{sets}
        cp.async.bulk.tensor.{len(coords)}d.shared::cluster.global.im2col.{DONE}
        [%r5], [%map, {{{operands}}}], [%s], {{{listed}}};"""
    tx, span = _landed(m)
    rows = -(-max(tx, span) // 128) + 1
    args = [("map", replace(m, array=2)), ("data", Array(_tensor(m)))]
    return load_program(f"im2col/load.{name}", issue, tx, args, rows)


def _store(name: str, m: Im2colMap, coords: tuple[int, ...], op: str = "") -> Program:
    sets, operands = coordinates(coords)
    kind = "cp.reduce.async.bulk.tensor" if op else "cp.async.bulk.tensor"
    suffix = f".{op}" if op else ""
    issue = f"""{sets} {kind}.{len(coords)}d.global.shared::cta{suffix}.im2col_no_offs.bulk_group
        [%map, {{{operands}}}], [%r5];"""
    _, span = _landed(m)
    source = np.arange(-(-span // 128) * 64, dtype=np.uint16).view(np.uint8) ^ 0x80
    args = [("map", m), ("data", Array(_tensor(m), recorded=True)), ("src", Array(source))]
    return store_program(f"im2col/store.{name}", issue, args, len(source) // 128)


def _loads() -> Iterator[Program]:
    for rank in (3, 4, 5):
        m = _map(rank)
        space = rank - 2
        inside, last = (8, *(1,) * space, 1), EXTENTS[3] - 1
        yield _load(f"{rank}d.inside", m, inside, (0,) * space)
        yield _load(f"{rank}d.offsets", m, inside, (2, 1, 2)[:space])
        yield _load(f"{rank}d.first", m, (0, *(-1,) * space, 0), (0,) * space)
        yield _load(f"{rank}d.end", m, (0, *(2,) * space, last), (1,) * space)
        yield _load(f"{rank}d.beyond_images", m, (0, *(0,) * space, last + 1), (1,) * space)
        wide = replace(m, lower=(-2, 0, 1)[:space], upper=(1, -3, -1)[:space])
        yield _load(f"{rank}d.corners", wide, (0, *(1,) * space, 1), (1, 0, 1)[:space])
    m = _map(4)
    for where, coords in (
        ("left_of_box", (0, -3, 1, 1)),
        ("right_of_box", (0, 6, 1, 1)),
        ("far_right", (0, 9, 1, 1)),
        ("above_box", (0, 1, -3, 1)),
        ("below_box", (0, 1, 6, 1)),
        ("last_pixel", (0, 5, 3, 0)),
        ("channels_over", (16, 1, 1, 1)),
        ("channels_below", (-8, 1, 1, 1)),
    ):
        yield _load(f"4d.{where}", m, coords, (1, 1))
    yield _load("4d.large_offsets", m, (0, 1, 1, 1), (200, 1))
    yield _load("4d.positive_corner", replace(m, lower=(1, 2), upper=(2, 1)), (0, 3, 2, 1), (0, 1))
    yield _load("4d.empty_box", replace(m, lower=(3, 3), upper=(-6, -4)), (0, 3, 3, 0), (0, 0))
    for steps in ((1, 2, 1, 1), (1, 1, 2, 1), (1, 2, 3, 1), (1, 3, 2, 2), (2, 1, 1, 1)):
        label = "".join(map(str, steps))
        strided = replace(m, element_strides=steps)
        yield _load(f"4d.steps{label}", strided, (0, -1, -1, 0), (1, 0))
        yield _load(f"4d.steps{label}.odd", strided, (0, 2, 1, 1), (0, 1))
    for swizzle, channels in ((1, 16), (2, 32), (3, 64), (3, 16), (2, 8)):
        swizzled = _map(4, 64, swizzle=swizzle, channels=channels, pixels=24)
        yield _load(f"4d.swizzle{swizzle}.{channels}", swizzled, (8, 3, 2, 1), (1, 2))
    for dtype, fill in ((U8, 0), (U32, 0), (F32, 0), (F32, 1)):
        typed = _map(4, 32 // SIZE[dtype], dtype, oob_fill=fill)
        yield _load(f"4d.type{dtype}.fill{fill}", typed, (0, -1, -1, 0), (0, 0))
    yield _load("4d.many", replace(m, pixels=300), (0, 2, 1, 0), (1, 1))
    yield _load("4d.image_below", m, (0, 3, 3, -1), (1, 1))
    yield _load("4d.channel_at4", m, (4, 1, 1, 0), (1, 1))


def _stores() -> Iterator[Program]:
    for rank in (3, 4, 5):
        space = rank - 2
        m = _map(rank, lower=(0,) * space, upper=(0,) * space)
        yield _store(f"{rank}d.inside", m, (8, *(1,) * space, 1))
        yield _store(f"{rank}d.end", m, (0, *(2,) * space, EXTENTS[3] - 1))
    yield _store("4d.over_border", _map(4), (0, 1, 0, 1))
    yield _store("4d.beyond", _map(4, lower=(0, 0), upper=(2, 1)), (0, 1, 0, 1))
    yield _store("4d.negative_box", _map(4, pixels=3), (0, 1, 0, 1))
    yield _store("4d.negative_image", _map(4, lower=(0, 0), upper=(0, 0)), (0, 1, 0, -1))
    yield _store("4d.corner", _map(4, lower=(1, 0), upper=(0, -1)), (0, 3, 2, 1))
    yield _store("4d.add", _map(4, 8, U32, lower=(0, 0), upper=(0, 0)), (4, 1, 1, 1), "add")
    yield _store("4d.swizzle", _map(4, 32, swizzle=2, channels=32, lower=(0, 0), upper=(0, 0)),
                 (0, 1, 1, 1))  # fmt: skip


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _loads()
    yield from _stores()
