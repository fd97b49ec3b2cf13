"""The indexer over shared keys on a Hopper GPU: CTAs with many tiles, clusters that share one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.gpu.runner import gpu
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.prefill_pieces import pieces_of
from flashdsa.ops.prefill import PrefillOperands
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, causal, make_prefill_inputs
from tests.support.hopper_gpu import HOPPER_GPU, by_turns_on_streams, capture

pytestmark = HOPPER_GPU
TOPK = 20
QUERIES = 4400
"""At least four tiles for each of 132 CTAs, with any number of heads."""


@pytest.mark.parametrize("by_score", [False, True])
@pytest.mark.parametrize("length", [24, 60, 150])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_many_short_documents(num_heads: int, length: int, by_score: bool) -> None:
    """Most tiles have a key tile or two, so that either warpgroup may have none."""
    ranges = tuple((t // length * length, t + 1) for t in range(QUERIES))
    x = make_prefill_inputs(PrefillCase("documents", ranges, TOPK, num_heads), 0, "cuda")
    ids = x.output_buffer()
    options = {**x.options, "backend": "sm90"}
    flashdsa.dsa_topk_prefill(*x.operands, ids, sorted=by_score, **options)
    scores = flashdsa.prefill_logits(*x.operands, **options)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOPK].int()
    seen = torch.arange(QUERIES, device="cuda") % length + 1
    missing = torch.arange(TOPK, device="cuda") >= seen[:, None]
    if not by_score:
        best = best.masked_fill(missing, QUERIES).sort(dim=1).values
    assert torch.equal(ids, best.masked_fill(missing, -1).int())


def best_rows(x: PrefillInputs, by_score: bool) -> torch.Tensor:
    """Of the kernel's own scores, by a stable sort."""
    scores = flashdsa.prefill_logits(*x.operands, **x.options, backend="sm90").cpu()
    starts = None if x.starts is None else x.starts.cpu()
    best = reference.dsa_topk_prefill(scores, starts, x.ends.cpu(), TOPK, sorted=by_score)
    return best.to(x.ends.device)


ALIKE = PrefillCase("alike", causal(300, 700), TOPK, 64)


@pytest.mark.parametrize("by_score", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_calls_that_are_known_again_take_the_tensors_they_are_given(
    dtype: torch.dtype, by_score: bool
) -> None:
    """Other values, other addresses: the second call is made without a check."""
    for seed in range(4):
        x = make_prefill_inputs(replace(ALIKE, dtype=dtype), seed, "cuda")
        if seed == 2:
            room = torch.empty(x.weights.numel() + 1, device="cuda")
            x = replace(x, weights=room[1:].view_as(x.weights).copy_(x.weights))
        ids = x.output_buffer()
        before = ids._version
        flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options, sorted=by_score, backend="sm90")
        assert ids._version > before
        assert torch.equal(ids, best_rows(x, by_score))


@pytest.mark.parametrize("by_score", [False, True])
def test_a_graph_of_a_known_call_replays_with_other_contents(by_score: bool) -> None:
    held = make_prefill_inputs(ALIKE, 0, "cuda")
    ids = held.output_buffer()
    call = partial(flashdsa.dsa_topk_prefill, *held.operands, ids, **held.options, sorted=by_score)
    graph, _ = capture(call)
    for seed in range(1, 4):
        x = make_prefill_inputs(ALIKE, seed, "cuda")
        for buffer, content in zip(
            (*held.operands, held.k_scale), (*x.operands, x.k_scale), strict=True
        ):
            if buffer is not None:
                buffer.copy_(content)
        held.ends.clamp_(max=200 * seed)
        ids.fill_(-99)
        graph.replay()
        assert torch.equal(ids, best_rows(held, by_score))


def test_known_calls_on_two_streams_do_not_disturb_each_other() -> None:
    """Each stream has a workspace of its own."""
    inputs = [make_prefill_inputs(ALIKE, seed, "cuda") for seed in range(2)]
    expected = [best_rows(x, False) for x in inputs]

    def choose(x: PrefillInputs) -> torch.Tensor:
        ids = x.output_buffer()
        flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options, backend="sm90")
        return ids

    for found, right in zip(
        by_turns_on_streams([partial(choose, x) for x in inputs], 20), expected, strict=True
    ):
        assert all(torch.equal(ids, right) for ids in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_that_is_known_on_one_gpu_runs_on_another() -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        x = make_prefill_inputs(ALIKE, 0, device)
        ids = x.output_buffer()
        flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options, backend="sm90")
        assert ids.device == torch.device(device)
        assert torch.equal(ids, best_rows(x, False))


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


def best_of_2048(x: PrefillInputs, by_score: bool = False) -> Tensor:
    """Of the kernel's own scores, by a stable sort; all queries see topk keys at least."""
    scores = flashdsa.prefill_logits(*x.operands, **x.options, backend="sm90")
    # NaN ranks last among what a query sees, which is before -inf of what it does not see.
    seen = torch.arange(scores.shape[1], device="cuda") < x.ends[:, None]
    scores = scores.nan_to_num(-3e38).masked_fill(~seen, -torch.inf) + 0.0
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : x.case.topk].int()
    return best if by_score else best.sort(dim=1).values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("heads", "dtype"), [*product((16, 32, 64), (FP8, BF16))], ids=str)
def test_the_best_of_its_own_scores(shape: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    x = inputs(shape, heads, dtype)
    right = best_of_2048(x)
    for _ in range(5):
        assert torch.equal(choose(x), right)


@pytest.mark.parametrize("feature", ["plateaus", "zero_scores", "nan_keys"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads", [16, 64])
def test_ties_and_nan(shape: tuple[int, int], heads: int, feature: str) -> None:
    x = inputs(shape, heads, FP8, **{feature: True})
    assert torch.equal(choose(x), best_of_2048(x))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_rows_in_the_order_of_scores(shape: tuple[int, int]) -> None:
    x = inputs(shape, 64, FP8)
    assert torch.equal(choose(x, True), best_of_2048(x, True))


def test_two_streams_and_a_graph() -> None:
    """Each stream has a workspace of its own; clusters of both wait for SMs."""
    both = [inputs(shape, 64, FP8) for shape in SHAPES[1:3]]
    right = [best_of_2048(x) for x in both]
    turns = by_turns_on_streams([partial(choose, x) for x in both], 20)
    for found, ids in zip(turns, right, strict=True):
        assert all(torch.equal(one, ids) for one in found)
    ids = both[1].output_buffer()
    call = partial(flashdsa.dsa_topk_prefill, *both[1].operands, ids, **both[1].options)
    graph, _ = capture(call)
    for _ in range(3):
        ids.fill_(-99)
        graph.replay()
        assert torch.equal(ids, right[1])
