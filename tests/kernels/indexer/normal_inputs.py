"""Indexer inputs as in the model, and what their scores must be within."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import flashdsa
from flashdsa.verify.tolerances import PRODUCT_TOLERANCE
from tests.kernels.indexer.exact_inputs import Inputs

PAGE = 64


def normal_inputs(lengths: list[int], num_heads: int, seed: int = 0) -> Inputs:
    """Rows of standard-normal queries and keys, quantised as in the model."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages) + 2
    keys = torch.randn(num_pages * PAGE, 128, generator=generator).bfloat16()
    cache = torch.zeros(num_pages, PAGE, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, torch.arange(len(keys)), cache, backend="cpu")
    q = torch.randn(len(lengths), num_heads, 128, generator=generator).bfloat16()
    weights = torch.randn(len(lengths), num_heads, generator=generator)
    fp8, weights = flashdsa.quantize_index_q(q, weights, backend="cpu")
    table = torch.full((len(lengths), max([1, *pages])), -7, dtype=torch.int32)
    order = iter(torch.randperm(num_pages, generator=generator).tolist())
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)])
    return Inputs(fp8, cache, weights, torch.tensor(lengths, dtype=torch.int32), table)


def float64_scores(inputs: Inputs, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the row's tokens, their sum of magnitudes over heads, and that of all products."""
    length = int(inputs.seq_lens[row])
    positions = torch.arange(length)
    slots = inputs.block_table[row, positions // PAGE].long() * PAGE + positions % PAGE
    fp8, scale = flashdsa.read_index_k_cache(inputs.k_index_cache_fp8, slots, backend="cpu")
    q, keys = inputs.q_index_fp8[row].double(), fp8.double()
    relu = (keys @ q.T).relu()
    weights, scale = inputs.weights[row].double(), scale.double()
    products = keys.abs() @ q.abs().T
    signed, absolute = weights, weights.abs()
    return (relu @ signed) * scale, (relu @ absolute) * scale, (products @ absolute) * scale


def assert_scores_are_right(scores: Tensor, inputs: Inputs) -> None:
    """Within the contract, and -inf beyond the rows' lengths."""
    num_heads = inputs.q_index_fp8.shape[1]
    for row, length in enumerate(inputs.seq_lens.tolist()):
        assert (scores[row, length:] == -math.inf).all()
        expected, magnitude, products = float64_scores(inputs, row)
        # Few heads can all be near zero, where the tensor cores' error is not.
        besides = 0 if num_heads == 64 else PRODUCT_TOLERANCE
        allowed = 3e-4 * magnitude + besides * products
        assert ((scores[row, :length].double() - expected).abs() <= allowed).all()
