"""mma: sparsity metadata that means nothing, and combinations that are not there."""

import numpy as np
import pytest
from tests.kernel_run import run

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics import sparsity

FOUR = "{%r1, %r2, %r3, %r4}"
SPARSE = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, "
SPARSE += f"{FOUR}, {FOUR}, %r5, "
DENSE = "mma.sync.aligned.{} {{%r1}}, {{%r1}}, {{%r1}}, {{%r1}};"


@pytest.mark.parametrize(("metadata", "count"), [("0x44444444", 0), ("0x44444054", 1)])
def test_metadata_without_meaning_is_reported(metadata, count):
    ran = run(f"mov.b32 %r5, {metadata}; {SPARSE}1; st.global.u32 [%rd_y], %r1;", y=1)
    assert ran.seen.codes.count("sparsity-metadata-undefined") == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SPARSE}2;", "selector 2 is not 0 to 1"),
        (f"{SPARSE}%r6;", "must be a constant"),
        (SPARSE.replace("k32", "k64") + "0;", "combination"),
        (DENSE.format("m16n8k32.row.col.f32.f16.f16.f32"), "combination"),
        (DENSE.format("m16n8k16.row.col.f16.bf16.bf16.f16"), "combination"),
        (DENSE.format("m8n8k4.f64"), "mma"),
        (
            "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 "
            f"{FOUR}, {FOUR}, {{%r1, %r2}}, {FOUR};",
            "sm_120",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(text, message):
    with pytest.raises(UnsupportedInstructionError, match=message):
        run(text)


def test_kept_pairs_of_four_bits_go_where_the_metadata_says():
    kept = np.arange(1.0, 9.0)[None]
    dense = sparsity.expanded(kept, np.array([[0b1001, 0b1100]], np.uint32), "s4")
    assert dense.tolist() == [[0, 0, 1, 2, 3, 4, 0, 0, 5, 6, 0, 0, 0, 0, 7, 8]]


def test_of_two_tf32_one_is_kept():
    dense = sparsity.expanded(np.array([[1.0, 2.0]]), np.array([[0b1110, 0b0100]]), "tf32")
    assert dense.tolist() == [[0, 1, 2, 0]]
