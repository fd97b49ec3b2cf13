"""A loop that was timed and is no kernel of ours: a backward split by dims, on Hopper.

It has the structure of the Blackwell backward, two CTAs that hold all heads and half of the dims
each, and was written to see what that costs: its results were not checked, and it was not tuned.
"""

from __future__ import annotations

from workbench.model.predict import Work
from workbench.model.shapes import GRADIENT_ROW_BYTES, QUERIES, ROW_BYTES, TOPK, ss
from workbench.model.traffic import Footprint, Traffic

KEYS, HEADS, VALUE_DIMS, ROPE_DIMS = 64, 128, 256, 32
"""Of a unit: a block of keys in one CTA, whose dims these are."""
S_KV = 8192
SOURCE = "a probe of one H200, 2026-11-20"
CLOCKS = 12_972
"""Of a unit, measured."""


def dims_split_backward() -> Work:
    """P, dP and dKV without dQ: partial sums of P and dP go to the peer in fp32, S and dS come back
    in bf16, each CTA completing half of the keys; dKV is added in device memory."""
    dims = VALUE_DIMS + ROPE_DIMS
    scores = KEYS * HEADS
    exchange = 2 * (scores // 2) * 4 + 2 * (scores // 2) * 2
    halves = HEADS // 64
    added = KEYS * GRADIENT_ROW_BYTES // 2
    return Work(
        "backward split by dims, H=128, without dQ",
        Traffic(
            useful_flop=2.0 * scores * (dims + VALUE_DIMS + VALUE_DIMS + dims),
            matmuls=(
                ss("P", halves * dims / 16, 64, KEYS),
                ss("dP", halves * VALUE_DIMS / 16, 64, KEYS),
                ss("dV", HEADS / 16, KEYS, VALUE_DIMS),
                ss("dK", HEADS / 16, KEYS, dims),
            ),
            shared_bytes=KEYS * ROW_BYTES / 2 + 2 * exchange + 2 * scores * 2,
            dsmem_bytes=exchange,
            read_bytes=KEYS * ROW_BYTES / 2,
            reduce_bytes=added,
            red_bytes=added,
            exps=scores / 2,
        ),
        units=QUERIES * TOPK / KEYS * 2.0,
        footprint=Footprint(reduced=S_KV * GRADIENT_ROW_BYTES, read=S_KV * ROW_BYTES),
    )
