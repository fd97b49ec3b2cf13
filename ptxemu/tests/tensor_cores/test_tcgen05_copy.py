"""tcgen05.cp and tcgen05.shift: every shape, multicast and decompression."""

from typing import Any

import numpy as np
import pytest
from tests.tensor_cores import mma_run
from tests.tensor_cores import tensor_core_run as run

from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.errors import ExecutionError, IllegalInstructionError

# shape: rows, 32-bit columns, lanes of each row
SHAPES: dict[str, tuple[int, int, Any]] = {
    "128x256b": (128, 8, lambda r: [r]),
    "128x128b": (128, 4, lambda r: [r]),
    "4x256b": (4, 8, lambda r: [32 * r]),
    "64x128b.warpx2::02_13": (64, 4, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda r: [r + 32 * (r // 32), r + 32 * (r // 32) + 32]),
    "32x128b.warpx4": (32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
}


def copy(
    modifiers: str, source: Any, mode: str, *, group: int = 1, column: int = 100
) -> run.Recorder:
    """One tcgen05.cp of `source` (rows, bytes), each CTA from its own shared memory."""
    padded = source if len(source) >= 8 else np.concatenate([source, source[:0]])

    def fill(cta: Any) -> None:
        run.place(cta.shared, padded + np.uint8(cta.rank), run.DATA, mode, "K")

    (placed,) = mma_run.matrix_steps(padded, run.DATA, mode, "K", 1)
    issue = f"""mov.b32 %r6, {column}; mov.b64 %rd0, {mma_run.desc(placed)};
      tcgen05.cp.cta_group::{group}.{modifiers} [%r6], %rd0;"""
    return run.launch(mma_run.program(issue, group=group), cluster=group, fill=fill)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_swizzle(shape: str, mode: str, group: int) -> None:
    rows, columns, lanes = SHAPES[shape]
    rng = np.random.default_rng(1)
    width = max(4 * columns, run.SPANS[mode])
    source = rng.integers(0, 250, (max(rows, 8), width)).astype(np.uint8)
    recorder = copy(shape, source, mode, group=group)
    for cta in recorder.ctas:
        expected = np.zeros((128, 512), np.uint32)
        for row in range(rows):
            words = (source[row] + np.uint8(cta.rank)).view(np.uint32)[:columns]
            for lane in lanes(row):
                expected[lane, 100 : 100 + columns] = words
        assert np.array_equal(cta.tmem, expected)
    assert recorder.complaints == []


def test_copies_report_the_cells_that_they_write() -> None:
    source = np.zeros((32, 16), np.uint8)
    recorder = copy("32x128b.warpx4", source, "none")
    writes = [a for a in recorder.accesses if a.space.value == "tmem" and a.proxy.value == "async"]
    cells = sorted(int(s) for a in writes for s in a.starts)
    assert cells == [lane * 2048 + 400 for lane in range(128)]
    assert {a.size for a in writes} == {16}
    reads = [a for a in recorder.accesses if a.space.value == "shared" and a.kind.value == "read"]
    covered = {
        int(s) + i
        for a in reads
        if a.proxy.value == "async"
        for s in a.starts
        for i in range(a.size)
    }
    assert covered == set(range(run.DATA, run.DATA + 512))


@pytest.mark.parametrize(("source_format", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_decompression_makes_a_byte_of_every_element(source_format: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 1 << bits, (128, 16)).astype(np.uint8)
    source = np.zeros((128, 16), np.uint8)
    for row in range(128):
        packed = sum(int(code) << bits * i for i, code in enumerate(codes[row]))
        source[row] = np.frombuffer(packed.to_bytes(16, "little"), np.uint8)
    recorder = copy(f"128x128b.b8x16.{source_format}", source, "none")
    cells = recorder.ctas[0].tmem[:, 100:104]
    found = np.ascontiguousarray(cells).view(np.uint8)
    assert np.array_equal(found, codes << 2 if bits == 4 else codes)


def test_shapes_need_their_multicast() -> None:
    for modifiers in ("64x128b", "32x128b", "128x256b.warpx4", "32x128b.warpx2::02_13"):
        text = mma_run.program(f"tcgen05.cp.cta_group::1.{modifiers} [%r6], %rd0;")
        with pytest.raises(IllegalInstructionError, match=r"needs .warpx2"):
            run.launch(text)


def test_lanes_beyond_the_last_one_are_errors() -> None:
    value = Tcgen05Descriptor(run.DATA, 16, 128).encode()
    issue = f"""mov.b32 %r6, 0x00200000; mov.b64 %rd0, {value};
      tcgen05.cp.cta_group::1.128x128b [%r6], %rd0;"""
    with pytest.raises(ExecutionError, match="expected lane 0"):
        run.launch(mma_run.program(issue))


@pytest.mark.parametrize("group", [1, 2])
def test_shift_moves_32_rows_of_8_columns_down_by_one(group: int) -> None:
    start = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)

    def fill(cta: Any) -> None:
        cta.tmem[:] = start

    issue = f"mov.b32 %r6, 0x00200010; tcgen05.shift.cta_group::{group}.down [%r6];"
    recorder = run.launch(mma_run.program(issue, group=group), cluster=group, fill=fill)
    for cta in recorder.ctas:
        expected = start.copy()
        expected[33:64, 16:24] = start[32:63, 16:24]
        assert np.array_equal(cta.tmem, expected)


def test_shift_needs_an_aligned_lane() -> None:
    issue = "mov.b32 %r6, 0x00100010; tcgen05.shift.cta_group::1.down [%r6];"
    with pytest.raises(ExecutionError, match="multiple of 32; got 16"):
        run.launch(mma_run.program(issue))
