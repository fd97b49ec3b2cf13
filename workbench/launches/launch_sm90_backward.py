"""P and dS of the Hopper backward on random inputs, once, for ptxemu's tools.

ptxemu trace  --arch sm_90a --kernel scores --exec workbench/launches/launch_sm90_backward.py
ptxemu mutate --arch sm_90a --kernel scores --exec workbench/launches/launch_sm90_backward.py --topk 100
"""

from __future__ import annotations

import argparse

import torch

from flashdsa.kernels.sparse_mla.sm90.bwd.scores.build import compile_scores
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import D_QK, D_V, ScoresPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import (
    BLOCK_ROWS,
    TILE_KEYS,
    block_bytes,
)

ROW_BLOCKS = 2
"""Of a group."""


def main() -> None:
    """Compile, and launch once on what calls itself a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topk", type=int, default=40, help="slots of a query")
    parser.add_argument("--heads", type=int, default=128, choices=(16, 32, 64, 128))
    parser.add_argument("--groups", type=int, default=2, help="of queries with 128 rows")
    parser.add_argument("--keys", type=int, default=90)
    parser.add_argument("--ctas", type=int, default=1, help="few, so that each has several items")
    options = parser.parse_args()
    group = ROW_BLOCKS * BLOCK_ROWS // options.heads
    queries, heads = group * options.groups, options.heads
    function = compile_scores(ScoresPlan(group))
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    capacity = -(-group * options.topk // TILE_KEYS) * TILE_KEYS
    shape = queries, options.topk
    arguments = [
        random(queries * heads, D_QK),
        random(options.keys, D_QK),
        random(queries * heads, D_V),
        torch.full((queries * heads,), 4.0),
        random(queries * heads, D_V),
        torch.randint(-3, options.keys + 3, shape, generator=draw, dtype=torch.int32),
        numbers(0),
        torch.zeros(queries * heads),
        numbers(options.groups, capacity),
        torch.zeros(options.groups, capacity, dtype=torch.uint8),
        *(numbers(options.groups) for _ in range(3)),
        torch.zeros(options.groups * ROW_BLOCKS, block_bytes(capacity), dtype=torch.uint8),
    ]
    tensors = [argument.to("cuda") for argument in arguments]
    function(*tensors, heads, D_QK**-0.5, options.ctas)


if __name__ == "__main__":
    main()
