"""Scales of rows in shared memory, as fp32."""

from typing import Any

from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import THREAD_ROWS
from flashdsa.dsl.smem import load_words
from flashdsa.kernels.attention.sm90.core.tile import FP32
from flashdsa.kernels.attention.sm90.decode.shared.words import load_float

LANE_ROWS = 8
"""Rows from a lane's first row of an accumulator to its second one."""


def load_scale(plan: Any, row: Any, group: int) -> Any:
    """Load a group's scale of the row at that address."""
    at = row + plan.form.scales_at
    return load_float(at + FP32 * group) if plan.form.scale == "fp32" else load_e8m0(at + group)


def load_scales(plan: Any, row: Any) -> list[list[Any]]:
    """Load the scales of the lane's two keys. `row`: the address of the first one."""
    rows = [row + LANE_ROWS * h * plan.row_pitch for h in range(THREAD_ROWS)]
    groups = range(plan.form.num_scales)
    if plan.form.scale == "fp32":
        loaded = [load_words(one + plan.form.scales_at, Float32) for one in rows]
        return [[words[group] for group in groups] for words in loaded]
    return [[load_scale(plan, one, group) for group in groups] for one in rows]


def load_e8m0(address: Any) -> Any:
    """Load 2^(byte - 127), NaN of 255; 0 of 0, as products with 2^-127 are."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 byte; .reg .b32 bits; .reg .pred nan; ld.shared.u8 byte, [{$r0}]; "
        "cvt.u32.u16 bits, byte; setp.eq.u32 nan, bits, 255; shl.b32 bits, bits, 23; "
        "selp.b32 bits, 0x7FFFFFFF, bits, nan; mov.b32 {$w0}, bits; }",
        write_only_types=[Float32],
        read_only_args=[Int32(address)],
    )
