"""One launch of the Blackwell forward on random inputs, for ptxemu's tools.

ptxemu trace  --arch sm_100a --kernel forward --exec workbench/launches/launch_sm100_forward.py
ptxemu mutate --arch sm_100a --kernel forward --exec workbench/launches/launch_sm100_forward.py --topk 448
"""

from __future__ import annotations

import argparse

import torch

from flashdsa.kernels.sparse_mla.operands import Operands
from flashdsa.kernels.sparse_mla.sm100.fwd.build import compile_forward
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import D_QK, D_V, TILE_KEYS, FwdPlan


def main() -> None:
    """Compile, and launch once on what calls itself a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topk", type=int, default=2 * TILE_KEYS, help="slots of a query")
    parser.add_argument("--queries", type=int, default=1)
    options = parser.parse_args()
    plan = FwdPlan()
    function = compile_forward(plan)
    queries, topk = options.queries, options.topk
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    # Logits grow from tile to tile, so that maxima move and O is scaled.
    kv = random(topk, D_QK) * 2.0 ** (torch.arange(topk)[:, None] // TILE_KEYS)
    indices = torch.arange(topk, dtype=torch.int32).repeat(queries, 1)
    indices[:, ::7] = -1
    arguments = [
        random(queries, plan.group_heads, D_QK).bfloat16(),
        kv.bfloat16(),
        indices,
        torch.full((queries,), topk, dtype=torch.int32),
        torch.zeros(plan.group_heads),
        torch.zeros(queries, plan.group_heads, D_V, dtype=torch.bfloat16),
        torch.zeros(queries, plan.group_heads),
    ]
    operands = Operands(*[argument.to("cuda") for argument in arguments], sm_scale=D_QK**-0.5)
    function(*operands, torch.zeros(queries * plan.group_heads).to("cuda"))


if __name__ == "__main__":
    main()
