"""Copies that the other families lack: special values, single errors, placement, replaced maps.

The recordings are of the same kernels under other names, without the parameter `data`, which the
loads and stores do not read: it is what their map is over.
"""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import header
from tests.silicon.programs.case import Array, Bytes, Program, TensorMap

HEADER = header("8.6") + ".extern .shared .align 1024 .b8 smem[];\n"
COORDINATES = ", ".join(f".param .s32 c{i}" for i in range(5))
LOAD = """
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u64 out,
    .param .u32 size, .param .u32 at, .param .u32 tx, {coordinates})
{{
  .reg .b32 %r<20>; .reg .b64 %rd<5>; .reg .pred %p<5>; .shared .align 8 .b64 bar;
  mov.u32 %r0, %tid.x; mov.u32 %r1, smem; ld.param.u32 %r2, [size]; shl.b32 %r3, %r0, 2;
FILL: add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], 0xEEEEEEEE; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; setp.ne.u32 %p1, %r0, 0; mov.u32 %r5, bar;
  @!%p1 mbarrier.init.shared::cta.b64 [%r5], 1; fence.proxy.async; bar.sync 0; mov.u32 %r6, 0;
  {alone}
  ld.param.u32 %r7, [tx]; @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r7;
  ld.param.u32 %r8, [at]; add.u32 %r8, %r1, %r8; mov.b64 %rd0, map; cvta.param.u64 %rd0, %rd0;
  ld.param.s32 %r10, [c0]; ld.param.s32 %r11, [c1]; ld.param.s32 %r12, [c2];
  ld.param.s32 %r13, [c3]; ld.param.s32 %r14, [c4];
  cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r8], [%rd0, {{{operands}}}], [%r5];
  @%p1 bra DONE; mov.u32 %r9, 0;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; selp.u32 %r6, 1, 0, %p2;
  add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 3000; and.pred %p3, %p3, !%p2; @%p3 bra WAIT;
DONE: bar.sync 0; ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd1, %rd1; shl.b32 %r3, %r0, 2;
COPY: add.u32 %r4, %r1, %r3; ld.shared.u32 %r15, [%r4]; cvt.u64.u32 %rd2, %r3;
  add.u64 %rd2, %rd1, %rd2; st.global.u32 [%rd2], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra COPY; cvt.u64.u32 %rd3, %r2; add.u64 %rd3, %rd1, %rd3;
  @!%p1 st.global.u32 [%rd3], %r6; ret;
}}
"""
STORE = """
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u64 in,
    .param .u32 size, .param .u32 at, {coordinates})
{{
  .reg .b32 %r<20>; .reg .b64 %rd<5>; .reg .pred %p<5>; mov.u32 %r0, %tid.x; mov.u32 %r1, smem;
  ld.param.u32 %r2, [size]; ld.param.u64 %rd1, [in]; cvta.to.global.u64 %rd1, %rd1;
  shl.b32 %r3, %r0, 2;
FILL: cvt.u64.u32 %rd2, %r3; add.u64 %rd2, %rd1, %rd2; ld.global.u32 %r15, [%rd2];
  add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; fence.proxy.async; bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  {alone}
  ld.param.u32 %r8, [at]; add.u32 %r8, %r1, %r8; ld.param.s32 %r10, [c0];
  ld.param.s32 %r11, [c1]; ld.param.s32 %r12, [c2]; ld.param.s32 %r13, [c3];
  ld.param.s32 %r14, [c4];
  mov.b64 %rd0, map;
  cvta.param.u64 %rd0, %rd0;
  {opcode} [%rd0, {{{operands}}}], [%r8];
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
DONE: ret;
}}
"""
CLUSTER = """
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u64 in,
    .param .u64 out, .param .u32 size, .param .u32 tx0, .param .u32 tx1)
    .explicitcluster .reqnctapercluster 2, 1, 1
{{
  .reg .b32 %r<30>; .reg .b64 %rd<9>; .reg .pred %p<6>; .reg .b16 %h<2>;
  .shared .align 8 .b64 bar; mov.u32 %r0, %tid.x; mov.u32 %r19, %cluster_ctarank;
  mov.u32 %r1, smem; mov.u32 %r5, bar; ld.param.u32 %r2, [size]; ld.param.u64 %rd1, [in];
  cvta.to.global.u64 %rd1, %rd1; mul.wide.u32 %rd2, %r19, %r2; add.u64 %rd1, %rd1, %rd2;
  ld.param.u64 %rd3, [out]; cvta.to.global.u64 %rd3, %rd3; add.u64 %rd3, %rd3, %rd2;
  ld.param.u64 %rd6, [data]; cvta.to.global.u64 %rd6, %rd6; mov.b64 %rd0, map;
  cvta.param.u64 %rd0, %rd0; shl.b32 %r3, %r0, 2;
FILL: cvt.u64.u32 %rd2, %r3; add.u64 %rd4, %rd1, %rd2; ld.global.u32 %r15, [%rd4];
  add.u32 %r4, %r1, %r3; st.shared.u32 [%r4], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra FILL; setp.ne.u32 %p1, %r0, 0; setp.ne.u32 %p4, %r19, 0;
  ld.param.u32 %r16, [tx0]; @%p4 ld.param.u32 %r16, [tx1]; setp.eq.u32 %p5, %r16, 0;
  @%p1 bra READY; mbarrier.init.shared::cta.b64 [%r5], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r16;
READY: fence.proxy.async; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  @%p1 bra DONE; @%p4 bra WAIT; mapa.shared::cluster.u32 %r20, %r1, 1;
  mapa.shared::cluster.u32 %r21, %r5, 1; mov.b16 %h0, 3;
  {body}
WAIT: mov.u32 %r9, 0;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; add.u32 %r9, %r9, 1;
  setp.lt.u32 %p3, %r9, 3000; and.pred %p3, %p3, !%p2; @%p3 bra AGAIN;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; shl.b32 %r3, %r0, 2;
COPY: add.u32 %r4, %r1, %r3; ld.shared.u32 %r15, [%r4]; cvt.u64.u32 %rd2, %r3;
  add.u64 %rd5, %rd3, %rd2; st.global.u32 [%rd5], %r15; add.u32 %r3, %r3, 128;
  setp.lt.u32 %p0, %r3, %r2; @%p0 bra COPY; ret;
}}
"""
REPLACE = """
.visible .entry k(.param .u64 in, .param .u64 out)
{{
  .reg .b32 %r<9>; .reg .b64 %rd<5>; mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shl.b32 %r3, %r0, 2;
  cvt.u64.u32 %rd2, %r3; add.u32 %r4, %r1, %r3; ld.param.u64 %rd1, [in];
  cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2; ld.global.u32 %r5, [%rd1];
  st.shared.u32 [%r4], %r5; bar.sync 0; mov.u32 %r6, {low}; mov.u64 %rd3, {value};
  {opcode} [%r1], {operands}; bar.sync 0; ld.shared.u32 %r5, [%r4]; ld.param.u64 %rd1, [out];
  cvta.to.global.u64 %rd1, %rd1; add.u64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r5; ret;
}}
"""
ALONE = "@%p1 bra DONE;"
"""Lets only the first lane go on."""
DONE = "mbarrier::complete_tx::bytes"
TILE_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
FLAT = TensorMap(1, 1, (64, 32), (128,), (16, 4))
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
SPECIAL = {
    2: (0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC0, 0x7E00, 0x7C01, 0x3C00),
    4: (0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x007FFFFF,
        0x00800000, 0x80400001, 0x3F800FFF, 0x3F801000, 0x3F801001),
    8: (0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 1 << 51),
}  # fmt: skip
"""Bits of zeros, subnormals, infinities and NaNs of the float types of each size."""
REPLACED = np.array(
    [0x7F0012345600, 0x0000_0040_0004_2192, 0x0000_0C00_0000_0300, 0x0000_0000_0000_3000]
    + [0x0000_0007_0000_000F, 0x0000_0005_0000_0006, 0x0F00_0000_0000_0004, 0x0000_0000_0102_0304]
    + [0] * 8,
    dtype=np.uint64,
).view(np.uint8)  # fmt: skip
"""The map of which fields are replaced."""
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


def _ramp(count: int) -> Bytes:
    """Bytes whose 16-bit words count up, so that any misplaced one shows."""
    return np.arange(count // 2, dtype=np.uint16).view(np.uint8).copy()


def _operands(rank: int) -> str:
    return ", ".join(f"%r{10 + i}" for i in range(rank))


def _load(
    name: str,
    map_: TensorMap,
    coords: tuple[int, ...],
    tx: int = 128,
    *,
    at: int = 0,
    alone: str = ALONE,
    rank: int = 0,
    data: int = 4096,
) -> Program:
    """One tile, or one a lane, into 1 KiB of shared memory; `rank` is the instruction's."""
    ptx = LOAD.format(
        coordinates=COORDINATES,
        rank=rank or len(coords),
        operands=_operands(rank or len(coords)),
        alone=alone,
    )
    out = Array(np.zeros(1040, np.uint8), recorded=True)
    args = (map_, Array(_ramp(data), recorded=True), out, 1024, at, tx)
    padded = (*coords, *(0,) * (5 - len(coords)))
    return Program(f"copies/{name}", HEADER + ptx, (*args, *padded), smem=1024)


def _store(
    name: str,
    opcode: str,
    map_: TensorMap,
    data: Bytes,
    source: Bytes,
    coords: tuple[int, ...],
    *,
    at: int = 0,
    alone: str = ALONE,
) -> Program:
    ptx = STORE.format(
        opcode=opcode, operands=_operands(len(map_.dims)), coordinates=COORDINATES, alone=alone
    )
    args = (map_, Array(data, recorded=True), Array(source, recorded=True), len(source), at)
    padded = (*coords, *(0,) * (5 - len(coords)))
    return Program(f"copies/{name}", HEADER + ptx, (*args, *padded), smem=len(source))


def _cluster(name: str, body: str, tx: tuple[int, int], map_: TensorMap | None = None) -> Program:
    arrays = (_ramp(2048), _ramp(1024) ^ 0x80, np.zeros(1024, np.uint8))
    args = (map_ or TensorMap(1, 0, (16,), (), (16,)), *(Array(a, recorded=True) for a in arrays))
    ptx = HEADER + CLUSTER.format(body=body)
    return Program(f"copies/{name}", ptx, (*args, 512, *tx), grid=2, cluster=2, smem=512)


def _element_strides() -> Iterator[Program]:
    """A box of ceil(box / stride) elements lands; over the border, too."""
    for steps, box in (((1, 2), (16, 8)), ((3, 2), (32, 4))):
        map_ = TensorMap(1, 1, (48, 20), (96,), box, element_strides=steps)
        landed = 2 * box[0] * -(-box[1] // steps[1])
        name = f"step_{steps[0]}_{steps[1]}"
        for where, coords in (("inside", (8, 2)), ("below", (-8, -3)), ("above", (40, 15))):
            yield _load(f"{name}_{where}", map_, coords, landed, data=1920)
            if where != "below":
                source = _ramp(-(-landed // 128) * 128) ^ 0x80
                yield _store(f"{name}_{where}_store", TILE_STORE, map_, _ramp(1920), source, coords)
        yield _load(f"{name}_full_tx", map_, (8, 2), 2 * box[0] * box[1], data=1920)


def _values(dtype: int) -> tuple[Bytes, Bytes]:
    """256 values of a type twice: of floats every special one meets every other."""
    size, rng = ELEMENT_BYTES[dtype], np.random.default_rng(dtype)
    if dtype < 6:
        left, right = (rng.integers(0, 256, 256 * size, dtype=np.uint8) for _ in range(2))
        left.view(f"u{size}")[:8] = (0, 1, 5, 7, 127, 3, 9, 0)
        right.view(f"u{size}")[:8] = (0, 1, 5, 3, 1, 9, 3, 7)
        return left, right
    special = np.array(SPECIAL[size], dtype=f"u{size}")
    left, right = np.repeat(special, len(special)), np.tile(special, len(special))
    if size == 2:
        values = [rng.integers(0, 65536, 256 - len(left)).astype(np.uint16) for _ in range(2)]
        values[1] = (values[0] & 0xFC00) ^ (values[1] & 0x83FF)  # near in magnitude
    else:
        values = [rng.standard_normal(256 - len(left)).astype(f"f{size}") for _ in range(2)]
    left, right = (
        np.concatenate([a, v.view(a.dtype)]) for a, v in zip((left, right), values, strict=True)
    )
    return left.view(np.uint8), right.view(np.uint8)


def _reductions() -> Iterator[Program]:
    """Every operation on every type; hardware lacks some."""
    for dtype, size in enumerate(ELEMENT_BYTES):
        for operation in OPERATIONS:
            left, right = _values(dtype)
            count = len(left) // size
            map_ = TensorMap(1, dtype, (count,), (), (count,))
            opcode = "cp.reduce.async.bulk.tensor.1d.global.shared::cta"
            opcode += f".{operation}.tile.bulk_group"
            yield _store(f"reduce_{operation}_{dtype}", opcode, map_, left, right, (0,))


def _warps() -> Iterator[Program]:
    """Instructions that 32 lanes execute with the same operands. (More bytes than were expected
    leave open whether the phase flips: there is no program of two.)"""
    for times in (1, 32):
        yield _load(f"warp_load_expects_{times}", FLAT, (8, 2), 128 * times, alone="")
    source = _ramp(128) ^ 0x80
    yield _store("warp_store", TILE_STORE, FLAT, _ramp(4096), source, (8, 2), alone="")
    words = TensorMap(1, 2, (32, 32), (128,), (8, 4))
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    yield _store("warp_reduce", opcode, words, _ramp(4096), source, (8, 2), alone="")


def _placement() -> Iterator[Program]:
    """Own addresses, masks, ranks that differ: what hardware accepts. (That it also signals an
    mbarrier outside of the destination's CTA is not in the manual, and an error here.)"""
    add = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{DONE}.add.u32"
    copy = f"cp.async.bulk.shared::cluster.shared::cta.{DONE}"
    for name, opcode in (("reduce", add), ("copy", copy)):
        body = f"add.u32 %r22, %r1, 256;\n{opcode} [%r22], [%r1], 128, [%r5];"
        yield _cluster(f"place_{name}_own", body, (128, 0))
    load = f"cp.async.bulk.shared::cluster.global.{DONE}.multicast::cluster"
    for name, mask, bytes_ in (("beyond", 7, 128), ("empty", 0, 0)):
        body = f"mov.b16 %h0, {mask};\n{load} [%r1], [%rd6], 128, [%r5], %h0;"
        yield _cluster(f"place_mask_{name}", body, (bytes_, bytes_))
    deep = TensorMap(1, 1, (64, 4, 8), (128, 512), (16, 4, 1))
    yield _load("place_rank_3_of_2", FLAT, (8, 2, 0), rank=3)
    yield _load("place_rank_2_of_3", deep, (8, 2, 0), rank=2)
    swizzled = TensorMap(1, 1, (64, 16), (128,), (16, 4), swizzle=1)
    opcode = f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{DONE}.multicast::cluster"
    body = f"{opcode} [%r20], [%rd0, {{%r19, %r19}}], [%r21], %h0;"
    yield _cluster("tensor_multicast_peer_address", body, (128, 128), swizzled)


def _odd() -> Iterator[Program]:
    """What the manual forbids or leaves open; most of them are errors on hardware. (Bulk copies of
    8 and 24 bytes move 0 and 16 there, and are errors here.)"""
    for dtype, size in ((0, 1), (1, 2), (7, 4), (8, 8)):
        map_ = TensorMap(1, dtype, (128 // size, 32), (128,), (32 // size, 4))
        for shift in sorted({-16 // size, -1, 8 // size}):
            yield _load(f"odd_coordinate_{dtype}_{shift}", map_, (16 + shift, 2))
    for at in (16, 64):
        yield _load(f"odd_destination_{at}", FLAT, (8, 2), at=at)
    for x, y in ((8, -1), (-8, 2), (1000, 2), (8, 30), (8, 300), (1000, 100)):
        source = _ramp(128) ^ 0x80
        yield _store(f"odd_store_{x}_{y}", TILE_STORE, FLAT, _ramp(4096), source, (x, y))
    for at in (16, 64, 128):
        source = _ramp(512) ^ 0x80
        yield _store(f"odd_source_{at}", TILE_STORE, FLAT, _ramp(4096), source, (8, 2), at=at)
    for x, y in ((2**31 - 8, 0), (-(2**31), 0), (8, 2**31 - 1), (8, -(2**31))):
        yield _load(f"odd_far_{x}_{y}", FLAT, (x, y))
    load = f"cp.async.bulk.shared::cluster.global.{DONE}"
    yield _cluster("odd_size_0", f"{load} [%r1], [%rd6], %r16, [%r5];", (0, 0))
    for source, target in ((8, 0), (0, 8), (16, 0), (0, 16)):
        body = f"add.u64 %rd6, %rd6, {source};\nadd.u32 %r22, %r1, {target};\n"
        body += f"{load} [%r22], [%rd6], 64, [%r5];"
        yield _cluster(f"odd_alignment_{source}_{target}", body, (64, 0))


def _replace(name: str, base: Bytes, value: int, opcode: str, operands: str) -> Program:
    ptx = REPLACE.format(low=value & 0xFFFFFFFF, value=value, opcode=opcode, operands=operands)
    out = Array(np.zeros(128, np.uint8), recorded=True)
    args = (Array(base, recorded=True), out)
    return Program(f"copies/replace_{name}", HEADER + ptx, args, smem=128)


def _replacements() -> Iterator[Program]:
    """tensormap.replace of every field; the result is the changed 128 bytes."""
    for field, ordinal, value in REPLACEMENTS:
        wide = field in ("global_address", "global_stride")
        immediate = field in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
        source = str(value) if immediate else ("%rd3" if wide else "%r6")
        operands = source if ordinal is None else f"{ordinal}, {source}"
        opcode = f"tensormap.replace.tile.{field}.shared::cta.b1024.{'b64' if wide else 'b32'}"
        name = f"{field}_{'' if ordinal is None else ordinal}_{value:x}"
        yield _replace(name, REPLACED, value, opcode, operands)
    for value in (0, 6, 7, 11):  # from a TF32 map
        tf32 = REPLACED.copy()
        tf32.view(np.uint64)[1] |= 1 << 16
        opcode = "tensormap.replace.tile.elemtype.shared::cta.b1024.b32"
        yield _replace(f"tf32_elemtype_{value}", tf32, 0, opcode, str(value))


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _element_strides()
    yield from _reductions()
    yield from _warps()
    yield from _placement()
    yield from _odd()
    yield from _replacements()
