"""One launch of the Blackwell indexer, its scores alone or the fused one, for ptxemu's tools.

ptxemu trace  --arch sm_100a --kernel logits --exec workbench/launches/launch_sm100_indexer.py
ptxemu mutate --arch sm_100a --kernel logits --exec workbench/launches/launch_sm100_indexer.py
ptxemu mutate --arch sm_100a --kernel indexer --exec workbench/launches/launch_sm100_indexer.py --fused
"""

from __future__ import annotations

import argparse

import torch

from flashdsa.kernels.indexer.sm100.build import compile_indexer, compile_logits
from flashdsa.kernels.indexer.sm100.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.problem import INDEX_HEAD_DIM, INDEX_TOKEN_BYTES, PAGE_KEY_BYTES, PAGE_SIZE


def main() -> None:
    """Compile, and launch once on what calls itself a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1300, 65, 300])
    parser.add_argument("--rows-of-one", type=int, default=0, help="as many more rows of a token")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--stages", type=int, default=6, help="few, so that all are used again")
    parser.add_argument("--pages-per-stage", type=int, default=2)
    parser.add_argument("--ctas", type=int, default=1, help="or clusters of the fused indexer")
    parser.add_argument("--fused", action="store_true", help="ids, not scores")
    parser.add_argument("--topk", type=int, default=512, help="ids of a row")
    parser.add_argument("--cluster-size", type=int, default=1, help="CTAs of a row, if fused")
    parser.add_argument(
        "--list-capacity", type=int, help="if fused; little, so that short rows compact the list"
    )
    parser.add_argument(
        "--distinct", type=int, help="scores that there are: as many pages, each of equal tokens"
    )
    options = parser.parse_args()
    stages = {"stages": options.stages, "pages_per_stage": options.pages_per_stage}
    if options.fused:
        lists = {}
        if options.list_capacity is not None:
            first_fill = options.topk // PAGE_SIZE
            lists = {"list_capacity": options.list_capacity, "first_fill_pages": first_fill}
            lists["fill_step_pages"] = 1
        indexer = IndexerPlan(options.heads, options.topk, scheduled=True, **stages, **lists)
        function = compile_indexer(indexer)
    else:
        function = compile_logits(LogitsPlan(num_heads=options.heads, **stages))
    draw = torch.Generator().manual_seed(0)
    lengths = options.lengths + [1] * options.rows_of_one
    rows, longest = len(lengths), max(lengths)
    width = -(-longest // PAGE_SIZE)
    num_pages = width + 2 if options.distinct is None else options.distinct

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(torch.float8_e4m3fn)

    cache = torch.zeros(num_pages, PAGE_SIZE * INDEX_TOKEN_BYTES, dtype=torch.uint8)
    cache[:, :PAGE_KEY_BYTES] = fp8(num_pages, PAGE_KEY_BYTES).view(torch.uint8)
    scales = torch.rand(num_pages, PAGE_SIZE, generator=draw)
    if options.distinct is not None:
        keys = cache[:, :PAGE_KEY_BYTES].view(num_pages, PAGE_SIZE, INDEX_HEAD_DIM)
        keys[:] = keys[:, :1].clone()
        scales[:] = scales[:, :1].clone()
    cache[:, PAGE_KEY_BYTES:] = scales.view(torch.uint8)
    arguments = [
        fp8(rows, options.heads, INDEX_HEAD_DIM),
        cache.view(num_pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES),
        torch.randn(rows, options.heads, generator=draw),
        torch.tensor(lengths, dtype=torch.int32),
        torch.randint(-1, num_pages, (rows, width), generator=draw, dtype=torch.int32),
        torch.zeros(rows, options.topk, dtype=torch.int32)
        if options.fused
        else torch.zeros(rows, longest),
    ]
    sizes = (options.ctas, options.cluster_size) if options.fused else (options.ctas,)
    function(*[argument.to("cuda") for argument in arguments], *sizes)


if __name__ == "__main__":
    main()
