"""Few queries over many shared keys on a Hopper GPU, where clusters share tiles."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.gpu.runner import gpu
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.prefill_pieces import pieces_of
from flashdsa.ops.prefill import PrefillOperands
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, causal, make_prefill_inputs
from tests.support.hopper_gpu import HOPPER_GPU, by_turns_on_streams

pytestmark = HOPPER_GPU
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = [(1, 70_000), (16, 65_536), (67, 20_000), (300, 9000), (540, 12_000), (9, 140_000)]


def inputs(
    shape: tuple[int, int], heads: int, dtype: torch.dtype, **features: bool
) -> PrefillInputs:
    """A chunk that clusters take, in one launch or two."""
    case = PrefillCase(
        "chunk", causal(*shape), 2048, heads, dtype=dtype, no_starts=True, **features
    )
    x = make_prefill_inputs(case, 0, "cuda")
    operands = PrefillOperands(x.q_index, x.k_index, x.weights, x.ends, x.starts, x.k_scale)
    plan = prefill.shared(prefill.plan_of(operands))
    pieces = pieces_of(gpu(x.ends.device), plan, *shape, case.topk, False)
    assert any(piece.cluster_size > 1 for piece in pieces)
    return x


def choose(x: PrefillInputs, by_score: bool = False) -> Tensor:
    """The kernel's choice, into a buffer of rubbish."""
    ids = x.output_buffer()
    options = {**x.options, "backend": "sm90"}
    flashdsa.dsa_topk_prefill(*x.operands, ids, sorted=by_score, **options)
    return ids


def best_rows(x: PrefillInputs, by_score: bool = False) -> Tensor:
    """Of the kernel's own scores, by a stable sort; all queries see topk keys at least."""
    scores = flashdsa.prefill_logits(*x.operands, **x.options, backend="sm90")
    # NaN ranks last among what a query sees, which is before -inf of what it does not see.
    seen = torch.arange(scores.shape[1], device="cuda") < x.ends[:, None]
    scores = scores.nan_to_num(-3e38).masked_fill(~seen, -torch.inf) + 0.0
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : x.case.topk].int()
    return best if by_score else best.sort(dim=1).values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("heads", "dtype"), product((16, 32, 64), (FP8, BF16)), ids=str)
def test_the_best_of_its_own_scores(shape: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    x = inputs(shape, heads, dtype)
    right = best_rows(x)
    for _ in range(5):
        assert torch.equal(choose(x), right)


@pytest.mark.parametrize("feature", ["plateaus", "zero_scores", "nan_keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads", [16, 64])
def test_ties_and_nan(shape: tuple[int, int], heads: int, feature: str) -> None:
    x = inputs(shape, heads, FP8, **{feature: True})
    assert torch.equal(choose(x), best_rows(x))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_rows_in_the_order_of_scores(shape: tuple[int, int]) -> None:
    x = inputs(shape, 64, FP8)
    assert torch.equal(choose(x, True), best_rows(x, True))


def test_two_streams_and_a_graph() -> None:
    """Each stream has a workspace of its own; clusters of both wait for SMs."""
    both = [inputs(shape, 64, FP8) for shape in SHAPES[1:3]]
    right = [best_rows(x) for x in both]
    turns = by_turns_on_streams([partial(choose, x) for x in both], 20)
    for found, ids in zip(turns, right, strict=True):
        assert all(torch.equal(one, ids) for one in found)
    ids = both[1].output_buffer()
    call = partial(flashdsa.dsa_topk_prefill, *both[1].operands, ids, **both[1].options)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        ids.fill_(-99)
        graph.replay()
        assert torch.equal(ids, right[1])
