"""tcgen05.mma.sp: metadata in TMEM as CUTLASS's tmem_e_frg lays it out, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tensor_cores import mma_run
from tests.tensor_cores import tensor_core_run as run
from tests.tensor_cores.mma_run import Case

from ptxemu.errors import ExecutionError

E_AT = 400
"""Column of the metadata in TMEM."""
PATTERNS = {0b0100: (0, 1), 0b1000: (0, 2), 0b1100: (0, 3), 0b1001: (1, 2), 0b1101: (1, 3)}
PATTERNS |= {0b1110: (2, 3)}
TF32_PATTERNS = {0b0100: (0,), 0b1110: (1,)}


def sparse_matrix(
    rng: np.random.Generator, rows: int, k: int, kind: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.uint64]]:
    """Dense rows (m, k), what is kept of them, and four bits for every chunk."""
    patterns = TF32_PATTERNS if kind == "tf32" else PATTERNS
    chunk = {"tf32": 2}.get(kind, 4)
    unit = chunk // 4 or 1
    dense = np.zeros((rows, k), np.int64)
    kept = np.zeros((rows, k // 2), np.int64)
    codes = np.zeros((rows, k // chunk), np.uint64)
    for row in range(rows):
        for c in range(k // chunk):
            code = int(rng.choice(list(patterns)))
            codes[row, c] = code
            places = [chunk * c + unit * p + u for p in patterns[code] for u in range(unit)]
            values = rng.integers(1, 4, len(places)) * rng.choice([-1, 1], len(places))
            dense[row, places] = values
            kept[row, c * chunk // 2 : (c + 1) * chunk // 2] = values
    return dense, kept, codes


def metadata_cells(codes: NDArray[np.uint64], kind: str) -> NDArray[np.uint32]:
    """Lanes and columns that hold the metadata of 128, 64 or 32 rows.

    tmem_e_frg: of f16 and tf32 row r's second eight columns' bits are 8 lanes further, those of row
    r + 8 in the upper half of row r's; of others a row's bits are on its lane.
    """
    rows, chunks = codes.shape
    if kind not in ("f16", "tf32"):
        cells = np.zeros((rows, 2), np.uint64)
        for row in range(rows):
            for c in range(chunks):
                cells[row, c // 8] |= codes[row, c] << np.uint64(4 * (c % 8))
        return cells.astype(np.uint32)
    cells = np.zeros((rows, 1), np.uint64)
    for row in range(rows):
        for c in range(chunks):
            second, within = divmod(c, 4)
            lane = row % 8 + 8 * second + 16 * (row // 16)
            cells[lane, 0] |= codes[row, c] << np.uint64(4 * within + 16 * (row // 8 % 2))
    return cells.astype(np.uint32)


def multiply(
    case: Case, k: int, *, selector: int = 0, spoil: int | None = None
) -> tuple[run.Recorder, NDArray[Any]]:
    """Run one sparse instruction on random small integers; gives what D should be."""
    rng = np.random.default_rng(7)
    dense, kept, codes = sparse_matrix(rng, case.m, k, case.kind)
    b = rng.integers(-3, 4, (case.n, k))
    if spoil is not None:
        codes[0, 0] = spoil
    parts = np.split(codes, case.group)
    copies = {64: 2, 32: 4}.get(case.m, 1) if case.ws else 1

    def setup(cta: Any) -> None:
        cells = np.tile(metadata_cells(parts[cta.rank], case.kind), (copies, 1))
        at = E_AT + selector
        cta.tmem[: len(cells), at : at + cells.shape[1]] = cells

    recorder = mma_run.multiply(
        case, run.codes(kept, case.atype), run.codes(b, case.btype), setup=setup,
        extra=f"mov.b32 %r8, {E_AT};", metadata="[%r8], ",
        idesc=replace(case.descriptor, sparsity=True, sparsity_selector=selector).encode(),
    )  # fmt: skip
    return recorder, dense @ b.T


@pytest.mark.parametrize(
    ("case", "k", "selector"),
    [
        (Case(128, 16, atype="f16", btype="f16"), 32, 0),
        (Case(128, 16, atype="bf16", btype="bf16"), 32, 1),
        (Case(256, 32, group=2), 32, 0),
        (Case(128, 16, a_in_tmem=True), 32, 0),
        (Case(128, 16, "tf32", atype="tf32", btype="tf32"), 16, 1),
        (Case(128, 16, "i8", "s32", "s8", "s8"), 64, 0),
        (Case(128, 16, "f8f6f4", "f32", "e4m3", "e4m3"), 64, 0),
        (Case(128, 64, ws=True), 32, 0),
        (Case(64, 64, ws=True), 32, 0),
        (Case(32, 64, "i8", "s32", "s8", "s8", ws=True), 64, 0),
    ],
    ids=str,
)
def test_only_the_elements_that_the_metadata_names_count(case, k, selector):
    recorder, expected = multiply(case, k, selector=selector)
    np.testing.assert_array_equal(mma_run.read_d(recorder, case), expected)


def test_metadata_without_meaning_is_reported():
    recorder, _ = multiply(Case(128, 16), 32, spoil=0b0101)
    assert "sparsity-metadata-undefined" in [entry[1] for entry in recorder.complaints]


def test_opcode_and_instruction_descriptor_must_agree():
    case = Case(128, 16)
    with pytest.raises(ExecutionError, match=r"has \.sp"):
        issue = f"""mov.b32 %r6, 0; mov.b32 %r7, {case.descriptor.encode()}; mov.b32 %r8, 400;
        mov.b64 %rd0, {1 << 46}; mov.pred %p3, 0;
        tcgen05.mma.sp.cta_group::1.kind::f16 [%r6], %rd0, %rd0, [%r8], %r7, %p3;"""
        run.launch(mma_run.program(issue))


def test_rows_whose_metadata_layout_is_not_known_are_refused():
    with pytest.raises(ExecutionError, match="layout of sparsity metadata"):
        multiply(Case(64, 16), 32)
