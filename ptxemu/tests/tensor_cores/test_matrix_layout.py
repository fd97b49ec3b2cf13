"""Matrix layouts: descriptors find what TMA writes, for every swizzle and major-ness."""

import numpy as np
import pytest

from ptxemu.descriptors.matrix_layout import Major, MatrixLayout, chunk_plan, pieces
from ptxemu.descriptors.swizzle import PERIOD, Swizzle

MODES = {
    "none": Swizzle.NONE,
    "32B": Swizzle.B32,
    "64B": Swizzle.B64,
    "128B": Swizzle.B128,
    "128B_atom_32B": Swizzle.B128_ATOM_32B,
}


def test_base_offset_shifts_the_pattern() -> None:
    """A pattern that starts at 0x880 instead of a 1024-byte boundary has base offset 1."""
    layout = MatrixLayout(Major.K, Swizzle.B128, 16, 1024, 8, 2, 0x880 % PERIOD, base_offset=1)
    chunks = chunk_plan(layout).chunks[:, 0] * 16
    rows = np.arange(8)
    assert chunks.tolist() == (0x80 + rows * 128 + rows * 16).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("major", list(Major))
def test_pieces_are_the_same_bytes_as_the_chunks(mode: str, major: Major) -> None:
    layout = MatrixLayout(major, MODES[mode], 4096, 1024, 16, 2, 64)
    plan = chunk_plan(layout)
    from_chunks = (plan.chunks.reshape(-1, 1) * 16 + np.arange(16)).reshape(-1)
    from_pieces = (plan.starts[:, None] + np.arange(plan.size)).reshape(-1)
    assert sorted(from_chunks.tolist()) == from_pieces.tolist()
    assert plan.end == from_pieces.max() + 1


def test_neighbouring_chunks_become_one_piece() -> None:
    starts, size = pieces(np.array([[0, 16, 128], [144, 256, 272]]))
    assert starts.tolist() == [0, 128, 256]
    assert size == 32
