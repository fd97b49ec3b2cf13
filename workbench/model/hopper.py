"""Rooflines of our Hopper kernels on an H200, beside the times that one took.

A roofline knows no waiting: every resource alone, at the clock of busy tensor cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashdsa.problem import INDEX_HEAD_DIM, KV_ROW_BYTES, PAGE_BYTES, PAGE_SIZE
from workbench.model.machine import H200
from workbench.model.predict import Prediction, Work, predict
from workbench.model.traffic import (
    BACKWARD_DIMS,
    D_QK,
    D_V,
    FORWARD_DIMS,
    GRADIENT_ROW_BYTES,
    QUERIES,
    ROW_BYTES,
    S_KV,
    TOPK,
    Footprint,
    Matmul,
    Traffic,
)

MMA_K, KEYS, ROWS = 16, 64, 64
"""K of a wgmma; keys of a tile and rows of Q that a CTA takes."""


def attend(heads: int, queries: int, s_kv: int = S_KV, row_bytes: int = ROW_BYTES) -> Work:
    """Take the forward or the decode, a unit being 64 keys of 64 heads. Half of P V reads P from
    shared memory, half from registers; a query's rows come once for all of its heads."""
    values = Matmul("P V", KEYS / MMA_K, ROWS, D_V // 2)
    own = Matmul("P V", KEYS / MMA_K, ROWS, D_V // 2, a_in_shared=False)
    items = math.ceil(heads / ROWS)
    traffic = Traffic(
        useful_flop=2.0 * ROWS * KEYS * FORWARD_DIMS,
        matmuls=(Matmul("S", D_QK / MMA_K, ROWS, KEYS), values, own),
        shared_bytes=KEYS * ROW_BYTES,
        read_bytes=KEYS * row_bytes / items,
        exps=ROWS * KEYS,
    )
    units = queries * items * TOPK / KEYS
    return Work("", traffic, units, footprint=Footprint(read=s_kv * row_bytes))


def backward(s_kv: int, union: float) -> Work:
    """Take the backward of 128 heads, a unit being 64 keys of a group of two queries.

    Args:
        union: of the group's keys, over a query's.
    """
    pairs = 2 * 128 * KEYS / union
    traffic = Traffic(
        useful_flop=2.0 * pairs * BACKWARD_DIMS,
        matmuls=(Matmul("all five", pairs * BACKWARD_DIMS / (64 * 256 * MMA_K), 64, 256),),
        read_bytes=KEYS * ROW_BYTES,
        reduce_bytes=KEYS * GRADIENT_ROW_BYTES,
    )
    footprint = Footprint(reduced=s_kv * GRADIENT_ROW_BYTES, read=s_kv * ROW_BYTES)
    return Work("", traffic, QUERIES / 2 * TOPK * union / KEYS, footprint=footprint)


def indexer(rows: int, tokens: int) -> Work:
    """Take the indexer of 64 heads, a unit being a page; device memory is cold."""
    heads = 64
    products = Matmul("Q K", INDEX_HEAD_DIM / 32, heads, PAGE_SIZE, k=32, element_bytes=1)
    traffic = Traffic(products.flop, (products,), PAGE_BYTES, read_bytes=PAGE_BYTES)
    cold = Footprint(read=1e15)
    return Work("", traffic, rows * tokens / PAGE_SIZE, footprint=cold)


@dataclass(frozen=True)
class Roofline:
    """A kernel on a shape: seconds at best beside those of one H200."""

    kernel: str
    shape: str
    work: Work
    measured: float
    source: str

    @property
    def prediction(self) -> Prediction:
        """The roofline."""
        return predict(self.work, H200)


_FORWARD = "workbench/results/sparse_mla_fwd, back to back, 2026-11-21"
_DECODE = "workbench/results/sparse_mla_decode, replays of a graph, 2026-11-21"
_BACKWARD = "workbench/results/sparse_mla_bwd, back to back, 2026-11-21"
_INDEXER = "workbench/results/indexer, L2 flushed, 2026-11-22"
ROOFLINES = (
    Roofline("forward", "H=128, 8K keys", attend(128, QUERIES), 3.805e-3, _FORWARD),
    Roofline("forward", "H=64, 8K keys", attend(64, QUERIES), 1.970e-3, _FORWARD),
    Roofline(
        "decode, packed", "H=128, 256 queries", attend(128, 256, 2**22, KV_ROW_BYTES), 361.0e-6,
        _DECODE,
    ),
    Roofline("decode, bf16", "H=128, 256 queries", attend(128, 256, 2**22), 275.9e-6, _DECODE),
    Roofline("backward", "H=128, neighbours alike", backward(32_768, 1.05), 12.966e-3, _BACKWARD),
    Roofline("indexer", "128 rows of 64K", indexer(128, 65_536), 261.1e-6, _INDEXER),
    Roofline("indexer", "32 rows of 16K", indexer(32, 16_384), 29.0e-6, _INDEXER),
)  # fmt: skip
