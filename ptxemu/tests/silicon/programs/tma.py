"""Tensor copies: every rank, border, swizzle, element stride, type, reduction; multicast."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
from tests.silicon.programs.bulk import DONE, load_program, pair_program, store_program
from tests.silicon.programs.case import Array, Bytes, Program, TensorMap
from tests.silicon.programs.values import random_bytes, typed

U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32_FTZ, TF32, TF32_FTZ = range(13)
SIZE = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
KIND = ("b8", "b16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32", "f32", "f32")
ALL = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
REDUCTIONS = {
    U32: ALL, S32: ("add", "min", "max", "and", "or", "xor"), U64: ("add", "min", "max", "and"),
    S64: ("min", "max"), F16: ("add", "min", "max"), BF16: ("add", "min", "max"), F32: ("add",),
    F64: ("add",), F32_FTZ: ("add",), TF32: ("add",),
}  # fmt: skip


def _ramp(count: int) -> Bytes:
    """Bytes whose 16-bit words count up, so that any misplaced one shows."""
    return np.arange(count // 2, dtype=np.uint16).view(np.uint8).copy()


def coordinates(coords: tuple[int, ...]) -> tuple[str, str]:
    """PTX that sets registers to coordinates, and the operands."""
    sets = "".join(f"mov.b32 %r{40 + i}, {c};" for i, c in enumerate(coords))
    return sets, ", ".join(f"%r{40 + i}" for i in range(len(coords)))


def _landed(m: TensorMap) -> int:
    """Bytes of a box: dimension 0 ignores its element stride."""
    steps = (1, *m.steps[1:])
    return SIZE[m.dtype] * prod(-(-b // s) for b, s in zip(m.box, steps, strict=True))


def _footprint(m: TensorMap) -> int:
    """Bytes of shared memory that a tile spans: a swizzle sets the pitch of its rows."""
    inner = m.box[0] * SIZE[m.dtype]
    pitch = max(inner, (0, 32, 64, 128)[m.swizzle])
    return _landed(m) // inner * pitch


def _load(
    name: str, m: TensorMap, data: Bytes, coords: tuple[int, ...], at: int = 0, tx: int = 0
) -> Program:
    sets, operands = coordinates(coords)
    tx = tx or _landed(m)
    issue = f"""{sets} add.u32 %r6, %r5, {at};
        cp.async.bulk.tensor.{len(coords)}d.shared::cluster.global.tile.{DONE}
        [%r6], [%map, {{{operands}}}], [%s];"""
    rows = -(-(at + max(tx, _landed(m), _footprint(m))) // 128) + 1
    return load_program(f"tma/{name}", issue, tx, [("map", m), ("data", Array(data))], rows)


def _store(
    name: str, m: TensorMap, data: Bytes, source: Bytes, coords: tuple[int, ...], op: str = ""
) -> Program:
    sets, operands = coordinates(coords)
    opcode = (
        f"cp.reduce.async.bulk.tensor.{len(coords)}d"
        if op
        else f"cp.async.bulk.tensor.{len(coords)}d"
    )
    full = f"{opcode}.global.shared::cta{'.' + op if op else ''}.tile.bulk_group"
    issue = f"{sets} {full} [%map, {{{operands}}}], [%r5];"
    padded = np.resize(source, -(-max(len(source), _footprint(m)) // 128) * 128)
    args = [("map", m), ("data", Array(data, recorded=True)), ("src", Array(padded))]
    return store_program(f"tma/{name}", issue, args, len(padded) // 128)


def _ranks() -> Iterator[Program]:
    dims, box = (24, 6, 5, 4, 3), (16, 3, 2, 2, 2)
    for rank in range(1, 6):
        strides, stride = [], 2
        for extent in dims[: rank - 1]:
            stride = -(-(stride * extent) // 16) * 16 + 16
            strides.append(stride)
        data = _ramp(dims[rank - 1] * (strides[-1] if strides else 2))
        m = TensorMap(1, U16, dims[:rank], tuple(strides), box[:rank])
        source = _ramp(_landed(m)) ^ 0x80
        for where, coords in (
            ("inside", (8, 2, 1, 1, 1)),
            ("below", (-8, -1, -1, -1, -1)),
            ("above", (16, 4, 4, 3, 2)),
            ("outside", (1000, 8, 7, 7, 7)),
            ("left", (-800, -100, 1, 1, 1)),
        ):
            yield _load(f"load.{rank}d.{where}", m, data, coords[:rank])
            if min(coords[:rank]) >= 0 or (rank, where) == (2, "below"):
                # hardware refuses stores at negative coordinates: one shows it
                yield _store(f"store.{rank}d.{where}", m, data, source, coords[:rank])


def _swizzles() -> Iterator[Program]:
    for swizzle, span in ((0, 48), (1, 32), (2, 64), (3, 128), (3, 64), (2, 32), (1, 16)):
        for dtype in (U8, U16, F32, F64):
            size = SIZE[dtype]
            m = TensorMap(1, dtype, (128 // size, 32), (128,), (span // size, 16), swizzle=swizzle)
            name = f"swizzle{swizzle}.{span}.type{dtype}"
            yield _load(f"load.{name}", m, _ramp(4096), (0, 5))
        for at in (128, 384, 512):
            m = TensorMap(1, U16, (64, 32), (128,), (span // 2, 16), swizzle=swizzle)
            yield _load(f"load.swizzle{swizzle}.{span}.at{at}", m, _ramp(4096), (0, 5), at=at)
        yield _store(
            f"store.swizzle{swizzle}.{span}", m, _ramp(4096), _ramp(span * 16) ^ 0x80, (0, 5)
        )
    m = TensorMap(1, U16, (64, 4, 6), (128, 512), (32, 3, 4), swizzle=2)
    yield _load("load.swizzle2.3d", m, _ramp(3072), (32, -1, 3))
    yield _store("store.swizzle2.3d", m, _ramp(3072), _ramp(768) ^ 0x80, (32, 2, 3))


def _element_strides() -> Iterator[Program]:
    for steps, box in (((1, 2), (16, 8)), ((1, 3), (16, 8)), ((2, 1), (16, 4)), ((1, 8), (16, 9)),
                       ((2, 2), (16, 6))):  # fmt: skip
        m = TensorMap(1, U16, (48, 20), (96,), box, element_strides=steps)
        label = f"steps{steps[0]}{steps[1]}"
        for where, coords in (("inside", (8, 2)), ("below", (-8, -3)), ("above", (40, 15))):
            yield _load(f"load.{label}.{where}", m, _ramp(1920), coords)
        yield _store(f"store.{label}", m, _ramp(1920), _ramp(_landed(m)) ^ 0x80, (8, 2))
        full = 2 * box[0] * box[1]
        if full != _landed(m):
            yield _load(f"load.{label}.whole_box_expected", m, _ramp(1920), (8, 2), tx=full)


def _types() -> Iterator[Program]:
    for dtype, size in enumerate(SIZE):
        data = typed(f"tma/type{dtype}", KIND[dtype], 384 // size)
        m = TensorMap(1, dtype, (384 // size,), (), (min(256, 512 // size),))
        yield _load(f"load.type{dtype}", m, data, (-16 // size,))
        if dtype >= F16:
            m = TensorMap(1, dtype, (384 // size,), (), (min(256, 512 // size),), oob_fill=1)
            yield _load(f"load.type{dtype}.nan_fill", m, data, (-16 // size,))
        m = TensorMap(1, dtype, (384 // size,), (), (256 // size,), l2_promotion=dtype % 4)
        source = typed(f"tma/type{dtype}/source", KIND[dtype], 256 // size)
        yield _store(f"store.type{dtype}", m, data, source, (256 // size,))
    for dtype, operations in REDUCTIONS.items():
        size = SIZE[dtype]
        for op in operations:
            name = f"reduce.{op}.type{dtype}"
            data = [typed(f"tma/{name}/{i}", KIND[dtype], 384 // size) for i in range(2)]
            m = TensorMap(1, dtype, (384 // size,), (), (384 // size // 2,))
            yield _store(name, m, data[0], data[1][:192], (128 // size,), op)
    m = TensorMap(1, U32, (8, 12), (48,), (8, 4), swizzle=1)
    yield _store(
        "reduce.2d.swizzle",
        m,
        random_bytes("tma/r2", 576),
        random_bytes("tma/r3", 128),
        (4, 10),
        "add",
    )


def _clusters() -> Iterator[Program]:
    data = ("data", Array(_ramp(4096)))
    m = TensorMap(1, U16, (64, 32), (128,), (32, 8), swizzle=2)
    map_, source = ("map", m), ("src", Array(random_bytes("tma/pair", 2048)))
    args = [map_, data, source]
    multicast = f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{DONE}.multicast::cluster"
    for label, coords, mask in (
        ("inside", (32, 3), 3),
        ("over", (48, 28), 3),
        ("mask1", (0, 9), 1),
        ("mask2", (0, 9), 2),
    ):
        sets, operands = coordinates(coords)
        issue = f"""mov.b16 %h1, {mask}; {sets} {multicast}
            [%r5], [%map, {{{operands}}}], [%s], %h1;"""
        name = f"tma/multicast.{label}"
        yield _moved(pair_program(name, issue, "512", args, 8, both=mask != 2))
    sets, operands = coordinates((0, 9))
    issue = f"""{sets} cp.async.bulk.tensor.2d.shared::cluster.global.tile.{DONE}
        [%r6], [%map, {{{operands}}}], [%r7];"""
    yield _moved(pair_program("tma/to_peer", issue, "512", args, 8, both=False))


def _moved(program: Program) -> Program:
    """The map stands behind `out`: it is over argument 2, `data`."""
    args = list(program.args)
    index = next(i for i, a in enumerate(args) if isinstance(a, TensorMap))
    old = args[index]
    assert isinstance(old, TensorMap)
    args[index] = replace(old, array=index + 1)
    return replace(program, args=tuple(args))


def programs() -> Iterator[Program]:
    """All of the family."""
    for group in (_ranks, _swizzles, _element_strides, _types):
        for program in group():
            yield _moved(program)
    yield from _clusters()
