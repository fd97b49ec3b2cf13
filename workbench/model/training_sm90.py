"""What trains the indexer on Hopper: bounds of a tile of 64 keys, no waiting between roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashdsa.kernels.indexer_training.sm90.bwd.plan import (
    BLOCK_ROWS,
    CHUNK,
    IMAGE_BYTES,
    MULTIPLIERS,
    TILE_KEYS,
    BwdPlan,
)
from flashdsa.problem import INDEX_HEAD_DIM
from workbench.model.machine import H200, GpuModel
from workbench.model.predict import Prediction, Work, predict
from workbench.model.shapes import D_QK, QUERIES, ROW_BYTES, TOPK
from workbench.model.traffic import Footprint, Matmul, Source, Traffic

MMA_K = 16
INDEX_HEADS = 64
INDEX_ROW_BYTES = 2 * INDEX_HEAD_DIM
GRADIENT_ROW_BYTES = 4 * INDEX_HEAD_DIM
S_KV = 8192
RANDOM, CORRELATED = "random", "correlated"
CHANGED = 0.05
"""Of a query's keys, from one query to the next, where they are correlated."""


def predict_target(
    heads: int, machine: GpuModel = H200, queries: int = QUERIES, topk: int = TOPK
) -> Prediction:
    """P of a call."""
    products = Matmul("K Q", D_QK // MMA_K, TILE_KEYS, heads)
    traffic = Traffic(
        useful_flop=products.flop,
        matmuls=(products,),
        shared_bytes=TILE_KEYS * ROW_BYTES,
        read_bytes=TILE_KEYS * ROW_BYTES,
        exps=TILE_KEYS * heads,
    )
    units = queries * math.ceil(topk / TILE_KEYS)
    footprint = Footprint(read=S_KV * ROW_BYTES)
    name = f"attention_target, H={heads}"
    return predict(Work(name, traffic, units, footprint=footprint), machine)


def predict_scores(
    machine: GpuModel = H200, queries: int = QUERIES, topk: int = TOPK
) -> Prediction:
    """The scores of a call: keys come from registers."""
    count = INDEX_HEAD_DIM // MMA_K
    products = Matmul("K Q", count, TILE_KEYS, INDEX_HEADS, a=Source.REGISTERS)
    traffic = Traffic(
        useful_flop=products.flop,
        matmuls=(products,),
        read_bytes=TILE_KEYS * INDEX_ROW_BYTES,
    )
    units = queries * math.ceil(topk / TILE_KEYS)
    footprint = Footprint(read=S_KV * INDEX_ROW_BYTES)
    return predict(Work("indexer_scores", traffic, units, footprint=footprint), machine)


def union_share(ids: str, group: int, topk: int, s_kv: int = S_KV) -> float:
    """Keys of a group's list over a query's."""
    if ids == CORRELATED:
        return 1 + (group - 1) * CHANGED
    return (1 - (1 - topk / s_kv) ** group) * s_kv / topk


def predict_backward(
    ids: str, machine: GpuModel = H200, queries: int = QUERIES, topk: int = TOPK
) -> Prediction:
    """The backward of a call, without its lists: groups of 4 queries of correlated keys, else 2."""
    plan = BwdPlan() if ids == CORRELATED else BwdPlan().smaller
    blocks, count = plan.blocks, INDEX_HEAD_DIM // MMA_K
    matmuls = (
        Matmul("Q K", blocks * count, BLOCK_ROWS, TILE_KEYS),
        Matmul("dQ", blocks * TILE_KEYS // MMA_K, BLOCK_ROWS, INDEX_HEAD_DIM),
        Matmul("dK", MULTIPLIERS * blocks * BLOCK_ROWS // MMA_K, TILE_KEYS, CHUNK),
    )
    added = TILE_KEYS * GRADIENT_ROW_BYTES
    keys = TILE_KEYS * INDEX_ROW_BYTES
    traffic = Traffic(
        useful_flop=sum(matmul.flop for matmul in matmuls),
        matmuls=matmuls,
        shared_bytes=keys + blocks * IMAGE_BYTES + 2 * plan.gradient_bytes,
        read_bytes=keys + plan.gradient_bytes,
        reduce_bytes=added,
        red_bytes=added,
    )
    groups = math.ceil(queries / plan.queries)
    length = topk * union_share(ids, plan.queries, topk)
    footprint = Footprint(reduced=S_KV * GRADIENT_ROW_BYTES, read=S_KV * INDEX_ROW_BYTES)
    units = groups * length / TILE_KEYS
    return predict(Work(f"indexer_bwd, {ids}", traffic, units, footprint=footprint), machine)


def predictions(queries: int = QUERIES, topk: int = TOPK) -> list[Prediction]:
    """Of all steps, on H200."""
    return [
        *(predict_target(heads, queries=queries, topk=topk) for heads in (128, 64, 16)),
        predict_scores(queries=queries, topk=topk),
        *(predict_backward(ids, queries=queries, topk=topk) for ids in (CORRELATED, RANDOM)),
    ]


def tables(queries: int, topk: int) -> Sequence[Any]:
    """For the command: a row a step."""
    rows = [
        (one.name, f"{one.seconds * 1e3:.2f}", f"{one.tflops:.0f}", one.bound)
        for one in predictions(queries, topk)
    ]
    title = (
        f"Training the indexer, sm_90a, on H200: {queries} queries, topk {topk}, {S_KV:,} keys; "
        "at best"
    )
    columns = [("step", "left"), ("ms", "right"), ("TFLOPS", "right"), ("bound by", "wrap")]
    return [(title, columns, rows)]
