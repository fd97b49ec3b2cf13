"""Tensor copies that an H200 cannot show: Blackwell's modes, pairs, and what observers hear."""

import numpy as np
import pytest
from tests.engines.copy_runner import EAGER, LATE, address, aligned, run
from tests.kernel_run import Recorder

from ptxemu.descriptors.swizzle import Swizzle, swizzled
from ptxemu.descriptors.tensor_map import decode, encode_tiled
from ptxemu.errors import ExecutionError
from ptxemu.events import AccessKind, Proxy, Space

INIT = "@%p0 mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async; bar.sync 0;"
WAIT = """
  @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {tx};
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], 0; @!%p2 bra WAIT;
"""
DUMP = """
  shl.b32 %r20, %tid, 2; mul.wide.u32 %rd8, %rank, {size}; add.u64 %rd8, %out, %rd8;
DUMP: add.u32 %r21, %smem, %r20; ld.shared.u32 %r22, [%r21];
  cvt.u64.u32 %rd9, %r20; add.u64 %rd9, %rd8, %rd9; st.global.u32 [%rd9], %r22;
  add.u32 %r20, %r20, 128; setp.lt.u32 %p3, %r20, {size}; @%p3 bra DUMP;
"""
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes{group}"
MATRIX = np.arange(32 * 64, dtype=np.uint16).reshape(32, 64)


def matrix_map(array: np.ndarray = MATRIX, *, box: tuple[int, int], swizzle: int = 0) -> bytes:
    rows, columns = array.shape
    return encode_tiled(1, address(array), (columns, rows), (2 * columns,), box, swizzle=swizzle)


def load(coordinates: str, *, mode: str = "tile", group: str = "") -> str:
    """Initialise the mbarrier, and let thread 0 issue a load from %map."""
    opcode = LOAD.format(mode=mode, group=group)
    return f"{INIT} @%p0 {opcode} [%smem], [%map, {{{coordinates}}}], [%bar];"


def landed(tx: int, size: int) -> str:
    """Wait for bytes, and dump shared memory to %out."""
    return WAIT.format(tx=tx) + DUMP.format(size=size)


def placed(rows: np.ndarray, swizzle: int, size: int) -> np.ndarray:
    """Shared memory, zero at first, after rows of bytes have landed at its start."""
    span = Swizzle(swizzle).span if swizzle else rows.shape[1]
    linear = np.arange(rows.shape[0])[:, None] * max(span, rows.shape[1])
    places = swizzled((linear + np.arange(rows.shape[1])).astype(np.int64), Swizzle(swizzle))
    out = np.zeros(size, np.uint8)
    out[places] = rows
    return out


@pytest.mark.parametrize("swizzle", range(7))
def test_gather4_loads_four_rows_anywhere(swizzle: int) -> None:
    width = 16 if swizzle == 1 else 32
    out = np.zeros(1024, np.uint8)
    body = load("16, 5, 31, 0, 5", mode="tile::gather4", group=".cta_group::1")
    body += landed(8 * width, 1024)
    args = {"map": matrix_map(box=(width, 1), swizzle=swizzle), "out": out, "in": MATRIX}
    run(body, args, target="sm_100a")
    rows = MATRIX[[5, 31, 0, 5], 16 : 16 + width]
    assert np.array_equal(out, placed(rows.view(np.uint8), swizzle, 1024))


def test_gather4_fills_rows_outside_and_counts_them() -> None:
    out = np.full(512, 9, np.uint8)
    body = load("48, -1, 3, 32, 100000", mode="tile::gather4") + landed(4 * 64, 512)
    run(body, {"map": matrix_map(box=(32, 1)), "out": out, "in": MATRIX}, target="sm_100a")
    expected = np.zeros((4, 32), np.uint16)
    expected[1, :16] = MATRIX[3, 48:]
    assert np.array_equal(out[:256], expected.view(np.uint8).reshape(-1))


def test_gather4_wants_a_box_of_one_row() -> None:
    body = load("0, 1, 2, 3, 4", mode="tile::gather4")
    with pytest.raises(ExecutionError, match="box of one row"):
        run(body, {"map": matrix_map(box=(32, 4)), "in": MATRIX}, target="sm_100a")


def test_scatter4_stores_four_rows_and_skips_those_outside() -> None:
    array = np.zeros((8, 64), np.uint16)
    body = """
      shl.b32 %r0, %tid, 3; add.u32 %r1, %smem, %r0; add.u32 %r2, %tid, 1;
      st.shared.v2.u32 [%r1], {%r2, %r2}; fence.proxy.async; bar.sync 0;
      @%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group
        [%map, {32, 6, 2, 8, 3}], [%smem];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    run(body, {"map": matrix_map(array, box=(32, 1)), "in": array}, target="sm_100a")
    words = np.repeat(np.arange(1, 33, dtype=np.uint32), 2).view(np.uint16).reshape(4, 32)
    expected = np.zeros_like(array)
    expected[[6, 2, 3], 32:] = words[[0, 1, 3]]
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("swizzle", [4, 5, 6])
def test_swizzles_with_larger_atoms_go_there_and_back(swizzle: int) -> None:
    array, out = MATRIX.copy(), np.zeros(4096, np.uint8)
    body = f"""{load("0, 0")} {landed(4096, 4096)} bar.sync 0; fence.proxy.async;
      @%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%back, {{0, 0}}], [%smem];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    back = np.zeros_like(array)
    args = {
        "map": matrix_map(array, box=(64, 32), swizzle=swizzle),
        "back": matrix_map(back, box=(64, 32), swizzle=swizzle),
        "out": out,
        "in": array,
        "to": back,
    }
    run(body, args, target="sm_100a")
    assert np.array_equal(out, placed(array.view(np.uint8), swizzle, 4096))
    assert np.array_equal(back, array)


@pytest.mark.parametrize(("data_type", "kept"), [(14, 8), (15, 12)])
def test_padded_types_leave_gaps_in_every_16_bytes(data_type: int, kept: int) -> None:
    packed = np.random.default_rng(1).integers(0, 256, (4, 8 * kept), dtype=np.uint8)
    pitch = 32 * -(-8 * kept // 32)
    padded = aligned(4 * pitch).reshape(4, pitch)
    padded[:, : 8 * kept] = packed
    out = np.zeros(1024, np.uint8)
    made = encode_tiled(
        data_type, address(padded), (128, 4), (padded.shape[1],), (128, 2), swizzle=3
    )
    body = load("0, 1") + landed(2 * 8 * kept, 1024)
    run(body, {"map": made, "out": out, "in": padded}, target="sm_100a")
    rows = np.zeros((2, 8, 16), np.uint8)
    rows[:, :, :kept] = packed[1:3].reshape(2, 8, kept)
    assert np.array_equal(out, placed(rows.reshape(2, 128), 3, 1024))


def test_unpadded_sub_byte_type_moves_packed_bytes() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    out = np.zeros(256, np.uint8)
    made = encode_tiled(13, address(packed), (128, 4), (64,), (64, 4))
    body = load("32, 0") + landed(128, 256)
    run(body, {"map": made, "out": out, "in": packed}, target="sm_100a")
    assert np.array_equal(out[:128].reshape(4, 32), packed[:, 16:48])


PAIR = """
  @%p0 mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  fence.proxy.async; barrier.cluster.arrive; barrier.cluster.wait;
  and.b32 %r1, %bar, -16777217; setp.eq.u32 %p4, %rank, 0; and.pred %p5, %p4, %p0;
  @%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {tx};
  {load}
  @!%p4 bra END;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%bar], 0; @!%p2 bra WAIT;
END: barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_both_ctas_of_a_pair_signal_the_leader(space: str) -> None:
    out = np.zeros((2, 256), np.uint8)
    load = f"""@%p0 cp.async.bulk.tensor.2d.{space}.global.tile.mbarrier::complete_tx::bytes
      .cta_group::2 [%smem], [%map, {{0, %rank}}], [%r1];""".replace("\n      ", "")
    body = PAIR.format(tx=256, load=load) + DUMP.format(size=256)
    args = {"map": matrix_map(box=(64, 1)), "out": out, "in": MATRIX}
    for policy in (LATE, EAGER):
        run(body, args, target="sm_100a", cluster=2, policy=policy)
        assert np.array_equal(out[:, :128].copy().view(np.uint16), MATRIX[:2])


def test_multicast_of_a_pair_signals_the_cta_that_the_address_names() -> None:
    out = np.zeros((2, 256), np.uint8)
    load = """mov.b16 %h0, 3; setp.eq.u32 %p6, %rank, 1; and.pred %p6, %p6, %p0;
      @%p6 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      .multicast::cluster.cta_group::2 [%smem], [%map, {0, 7}], [%r1], %h0;"""
    load = load.replace("\n      .multi", ".multi")
    body = PAIR.format(tx=256, load=load) + DUMP.format(size=256)
    args = {"map": matrix_map(box=(64, 1)), "out": out, "in": MATRIX}
    run(body, args, target="sm_100a", cluster=2)
    assert np.array_equal(out[:, :128].copy().view(np.uint16), MATRIX[[7, 7]])


def test_mbarrier_outside_the_pair_is_an_error() -> None:
    load = """mapa.shared::cluster.u32 %r5, %bar, 2;
      @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      .cta_group::2 [%smem], [%map, {0, 7}], [%r5];""".replace("\n      .cta", ".cta")
    body = PAIR.format(tx=128, load=load)
    args = {"map": matrix_map(box=(64, 1)), "in": MATRIX}
    with pytest.raises(ExecutionError, match="not of its pair"):
        run(body, args, target="sm_100a", cluster=4)


def test_load_reads_and_writes_late() -> None:
    array, out = MATRIX.copy(), np.zeros(4096, np.uint8)
    body = load("0, 0") + "@%p0 st.global.u16 [%in], 999;" + landed(128, 128)
    args = {"map": matrix_map(array, box=(64, 1)), "out": out, "in": array}
    run(body, args, policy=LATE)
    assert out.view(np.uint16)[:2].tolist() == [999, 1]
    array[0, 0] = 0
    run(body, args, policy=EAGER)
    assert out.view(np.uint16)[:2].tolist() == [0, 1]


@pytest.mark.parametrize("policy", [LATE, EAGER])
def test_bytes_that_come_before_they_are_expected_count(policy: object) -> None:
    out = np.zeros(128, np.uint8)
    body = load("0, 3") + "bar.sync 0; nanosleep.u32 9;" + landed(128, 128)
    args = {"map": matrix_map(box=(64, 1)), "out": out, "in": MATRIX}
    run(body, args, policy=policy)  # type: ignore[arg-type]
    assert np.array_equal(out.view(np.uint16), MATRIX[3])


def test_accesses_are_the_operations_own_and_of_the_async_proxy() -> None:
    observer = Recorder()
    body = load("32, 30") + WAIT.format(tx=512)
    args = {"map": matrix_map(box=(32, 8), swizzle=3), "in": MATRIX}
    run(body, args, observer=observer)
    read, written = observer.by_operations
    assert (read.space, read.kind, read.proxy) == (Space.GLOBAL, AccessKind.READ, Proxy.ASYNC)
    rows = address(MATRIX) + 128 * np.arange(30, 32) + 64
    assert (read.starts.tolist(), read.size) == (rows.tolist(), 64)
    assert (written.space, written.kind) == (Space.SHARED, AccessKind.WRITE)
    assert written.size * len(written.starts) == 8 * 64
    assert written.owner == 0


def test_map_in_global_memory_is_read_through_the_tensormap_proxy() -> None:
    observer = Recorder()
    made = aligned(128)
    made[:] = np.frombuffer(matrix_map(box=(64, 1)), np.uint8)
    body = load("0, 0") + WAIT.format(tx=128)
    run(body, {"map": made, "in": MATRIX}, observer=observer)
    first = observer.by_operations[0]
    assert (first.proxy, first.size) == (Proxy.TENSORMAP, 128)
    assert first.starts.tolist() == [address(made)]


def test_reduction_is_reported_as_atomic() -> None:
    observer = Recorder()
    body = """
      @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%in], [%smem], 16;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    run(body, {"in": np.zeros(4, np.uint32)}, observer=observer)
    kinds = [(a.space, a.kind, a.order, a.scope) for a in observer.by_operations]
    assert kinds == [
        (Space.SHARED, AccessKind.READ, "weak", ""),
        (Space.GLOBAL, AccessKind.ATOMIC, "relaxed", "gpu"),
    ]


def test_reductions_of_two_ctas_add_up() -> None:
    total = np.full(32, 10, np.uint32)
    body = """
      shl.b32 %r0, %tid, 2; add.u32 %r1, %smem, %r0; add.u32 %r2, %rank, 1;
      st.shared.u32 [%r1], %r2; fence.proxy.async; bar.sync 0;
      @%p0 cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group
        [%map, {0}], [%smem];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    made = encode_tiled(2, address(total), (20,), (), (32,))
    run(body, {"map": made, "in": total}, cluster=2)
    assert total.tolist() == [13] * 20 + [10] * 12


def test_byte_mask_chooses_bytes_of_every_16() -> None:
    out = np.zeros(64, np.uint8)
    body = """
      shl.b32 %r0, %tid, 2; add.u32 %r1, %smem, %r0; st.shared.u32 [%r1], 0x04030201;
      fence.proxy.async; bar.sync 0; mov.b16 %h0, 0x8005;
      @%p0 cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%out], [%smem], 64, %h0;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    run(body, {"out": out}, target="sm_100a")
    expected = np.zeros(16, np.uint8)
    expected[[0, 2, 15]] = (1, 3, 4)
    assert np.array_equal(out, np.tile(expected, 4))


def test_prefetch_only_checks_its_operands() -> None:
    body = """@%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%map, {0, 0}];
      @%p0 cp.async.bulk.prefetch.L2.global [%in], 64;"""
    args = {"map": matrix_map(box=(64, 1)), "in": MATRIX}
    assert run(body, args).async_operations == 0
    with pytest.raises(ExecutionError, match="multiple of 16"):
        run(body.replace("64;", "40;"), args)


def test_replaced_map_is_used_behind_the_copy_to_global_memory() -> None:
    array, out = MATRIX.copy(), np.zeros(128, np.uint8)
    held = aligned(128)
    body = f"""{INIT}
      shl.b32 %r0, %tid, 2; add.u32 %r1, %smem, %r0; cvt.u64.u32 %rd0, %r0;
      add.u64 %rd1, %old, %rd0; ld.global.u32 %r2, [%rd1]; st.shared.u32 [%r1], %r2; bar.sync 0;
      @%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%smem], %new;
      @%p0 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%smem], 0, 16; bar.sync 0;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%made], [%smem], 128;
      fence.proxy.tensormap::generic.acquire.gpu [%made], 128;
      @%p0 {LOAD.format(mode="tile", group="")} [%smem+1024], [%made, {{0, 1}}], [%bar];
      {WAIT.format(tx=128)} add.u32 %smem, %smem, 1024; {DUMP.format(size=128)}"""
    args = {
        "old": np.frombuffer(matrix_map(box=(64, 1)), np.uint8).copy(),
        "new": array,
        "made": held,
        "out": out,
    }
    run(body, args)
    assert np.array_equal(out.view(np.uint16)[:16], array[1, :16])
    assert not out[32:].any()
    assert decode(held.tobytes()).dims == (16, 32)
