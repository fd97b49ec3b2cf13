"""One launch of the Hopper forward on random inputs, for ptxemu's tools.

ptxemu trace  --arch sm_90a --kernel forward --exec workbench/launches/launch_sm90_forward.py
ptxemu mutate --arch sm_90a --kernel forward --exec workbench/launches/launch_sm90_forward.py --topk 300
"""

from __future__ import annotations

import argparse

import torch

from flashdsa.kernels.sparse_mla.operands import Operands
from flashdsa.kernels.sparse_mla.sm90.fwd.build import compile_forward
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK, D_V, ROWS, FwdPlan


def main() -> None:
    """Compile, and launch once on what calls itself a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topk", type=int, default=300, help="slots of a query")
    parser.add_argument("--queries", type=int, default=2)
    parser.add_argument("--keys", type=int, default=90)
    parser.add_argument("--ctas", type=int, default=1, help="few, so that each has several items")
    options = parser.parse_args()
    function = compile_forward(FwdPlan(max_logits=True))
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    shape = (options.queries, options.topk)
    arguments = [
        3 * random(options.queries, ROWS, D_QK),  # so large that maxima move
        random(options.keys, D_QK),
        torch.randint(-3, options.keys + 3, shape, generator=draw, dtype=torch.int32),
        torch.full((options.queries,), options.topk, dtype=torch.int32),
        torch.zeros(ROWS),
        torch.zeros(options.queries, ROWS, D_V, dtype=torch.bfloat16),
        torch.zeros(options.queries, ROWS),
    ]
    operands = Operands(*[argument.to("cuda") for argument in arguments], sm_scale=D_QK**-0.5)
    max_logits = torch.zeros(options.queries * ROWS).to("cuda")
    function(*operands, max_logits, options.ctas)


if __name__ == "__main__":
    main()
