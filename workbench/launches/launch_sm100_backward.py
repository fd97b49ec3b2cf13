"""One launch of the Blackwell backward on random inputs, for ptxemu's tools.

ptxemu trace  --arch sm_100a --kernel backward --exec workbench/launches/launch_sm100_backward.py
ptxemu mutate --arch sm_100a --kernel backward --exec workbench/launches/launch_sm100_backward.py --topk 96
"""

from __future__ import annotations

import argparse

import torch

from flashdsa.kernels.sparse_mla.sm100.bwd.build import compile_backward
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, B_TOPK, D_QK, D_V, BwdPlan


def main() -> None:
    """Compile, and launch once on what calls itself a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topk", type=int, default=2 * B_TOPK, help="slots of a query")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=1, help="of CTAs; they share the queries out")
    parser.add_argument(
        "--index-stages", type=int, default=2, help="few, so that short queries use all again"
    )
    options = parser.parse_args()
    function = compile_backward(BwdPlan(index_stages=options.index_stages))
    rows = options.queries * B_H
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    shape = (options.queries, options.topk)
    arguments = [
        random(rows, D_QK),
        random(options.keys, D_QK),
        random(rows, D_V),
        torch.full((options.queries, B_H), 5.0),
        random(rows, D_V),
        torch.randint(-3, options.keys + 3, shape, generator=draw, dtype=torch.int32),
        torch.full((options.queries,), options.topk, dtype=torch.int32),
        torch.zeros(options.queries, B_H),
        torch.zeros(rows, D_QK, dtype=torch.bfloat16),
        torch.zeros(options.keys, D_QK),
    ]
    function(*[argument.to("cuda") for argument in arguments], D_QK**-0.5, options.pairs)


if __name__ == "__main__":
    main()
