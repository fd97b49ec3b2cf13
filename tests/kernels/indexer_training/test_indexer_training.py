"""Every backend's operations that train the indexer are right on every case."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.packed_rows import next_power_of_two
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import make_indexer_training_inputs
from flashdsa.verify.judge_sparse_mla import forward_results
from tests.support.cases import INDEXER_TRAINING_CASES
from tests.support.hopper_gpu import HOPPER_GPU
from tests.support.subtests import CaseLoop

JUDGES = (
    judge.check_target,
    judge.check_index_scores,
    judge.check_index_backward,
    judge.check_kl,
    judge.check_kl_backward,
)
BY_NAME = {case.name: case for case in INDEXER_TRAINING_CASES}
FEATURES = BY_NAME["every feature"]


def test_results_are_within_the_contract(
    subtests: CaseLoop, backend: str, device: str, seed: int
) -> None:
    for check, case in product(JUDGES, INDEXER_TRAINING_CASES):
        with subtests.test(f"{check.__name__}: {case.name}"):
            assert failures(check(make_indexer_training_inputs(case, seed, device), backend)) == []


def loss_of(inputs, backend: str, **target):
    attention = inputs.attention
    return flashdsa.indexer_kl_loss(
        *inputs.operands, topk_length=attention.topk_length, backend=backend, **target
    )


def test_the_loss_is_what_it_is_made_of_and_teaches_the_indexer_alone(
    backend: str, device: str, seed: int
) -> None:
    inputs = make_indexer_training_inputs(FEATURES, seed, device)
    attention = inputs.attention
    _, lse = forward_results(attention)
    learned = [x.detach().requires_grad_() for x in inputs.operands[:3]]
    taught = [x.detach().requires_grad_() for x in (attention.q, attention.kv, lse)]
    options = {"topk_length": attention.topk_length, "backend": backend}
    indices = inputs.indices
    loss = flashdsa.indexer_kl_loss(
        *learned, indices, q=taught[0], kv=taught[1], lse=taught[2], attn_sink=attention.attn_sink,
        **options,
    )  # fmt: skip
    target = flashdsa.attention_target(
        attention.q, attention.kv, lse, indices, attn_sink=attention.attn_sink, **options
    )
    scores = flashdsa.indexer_scores(*learned, indices, **options)
    assert torch.equal(loss, flashdsa.indexer_kl(scores, target, backend=backend))
    assert torch.equal(loss, loss_of(inputs, backend, target=target))
    loss.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in learned)
    assert all(x.grad is None for x in taught)


def test_identities_of_the_gradients(backend: str, device: str, seed: int) -> None:
    """dq . q = w dw a head, sum dk . k = sum w dw, and a KL's gradients of a row add up to 0."""
    inputs = make_indexer_training_inputs(BY_NAME["fp64, every feature"], seed, device)
    assert inputs.attention.topk_length is not None
    q, k, weights, _ = inputs.operands
    options = {"topk_length": inputs.attention.topk_length, "backend": backend}
    dq, dk, dw = flashdsa.indexer_bwd(*inputs.operands, inputs.grad_scores, **options)
    of_weights = (weights * dw).nan_to_num(0)  # empty rows hold Inf, and have gradient 0
    torch.testing.assert_close((dq * q).nan_to_num(0).sum(-1), of_weights)
    torch.testing.assert_close((dk * k).nan_to_num(0).sum(), of_weights.sum())
    scores = flashdsa.indexer_scores(*inputs.operands, **options).requires_grad_()
    target = torch.rand(scores.shape, dtype=scores.dtype)
    flashdsa.indexer_kl(scores, target, backend=backend).sum().backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad.sum(1), torch.zeros_like(scores.grad[:, 0]))


def test_gradients_away_from_gates_are_derivatives(backend: str, device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, w = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((2, 3, 128), (5, 128), (2, 3))
    )
    indices = torch.tensor([[0, 3, 3, -1], [1, 2, 9, 4]], dtype=torch.int32, device=device)
    target = torch.rand(2, 4, generator=generator, dtype=torch.float64).to(device)

    def loss(*operands: torch.Tensor) -> torch.Tensor:
        return flashdsa.indexer_kl_loss(*operands, indices, target=target, backend=backend)

    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in (q, k, w)])


def test_results_are_bit_identical_from_run_to_run(backend: str, device: str, seed: int) -> None:
    inputs = make_indexer_training_inputs(FEATURES, seed, device)
    options = {"topk_length": inputs.attention.topk_length, "backend": backend}

    def run() -> list[torch.Tensor]:
        gradients = flashdsa.indexer_bwd(
            *inputs.operands, inputs.grad_scores, deterministic=True, **options
        )
        return [flashdsa.indexer_scores(*inputs.operands, **options), *gradients]

    first = run()
    for again in (run(), run()):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_targets_of_ranks_and_of_layers_add_up(backend: str, device: str, seed: int) -> None:
    """Tensor parallelism: the target of all heads is the sum of those of the ranks' heads."""
    inputs = make_indexer_training_inputs(BY_NAME["fp64, every feature"], seed, device)
    attention = inputs.attention
    _, lse = forward_results(attention)
    options = {"topk_length": attention.topk_length, "backend": backend}
    whole = flashdsa.attention_target(attention.q, attention.kv, lse, inputs.indices, **options)
    parts = torch.zeros_like(whole)
    for heads in (slice(0, 2), slice(2, None)):
        added = flashdsa.attention_target(
            attention.q[:, heads].contiguous(),
            attention.kv,
            lse[:, heads].contiguous(),
            inputs.indices,
            accumulate_into=parts,
            **options,
        )
        assert added is parts
    torch.testing.assert_close(parts, whole)


def test_layers_that_read_one_list_teach_its_indexer_together(
    backend: str, device: str, seed: int
) -> None:
    """The indexer of a list that three layers read learns the mean of their attentions."""
    inputs = make_indexer_training_inputs(BY_NAME["fp64, every feature"], seed, device)
    attention = inputs.attention
    generator = torch.Generator().manual_seed(seed)
    options = {"topk_length": attention.topk_length, "backend": backend}
    learned = [x.detach().requires_grad_() for x in inputs.operands[:3]]
    target, taught = torch.zeros(inputs.indices.shape, dtype=torch.float64, device=device), []
    for _ in range(3):
        q, kv = (
            torch.randn(x.shape, generator=generator, dtype=x.dtype).to(device)
            for x in (attention.q, attention.kv)
        )
        _, lse = flashdsa.sparse_mla_fwd(q, kv, inputs.indices, **options)
        taught.append(flashdsa.attention_target(q, kv, lse, inputs.indices, **options))
        flashdsa.attention_target(q, kv, lse, inputs.indices, accumulate_into=target, **options)
    loss = flashdsa.indexer_kl_loss(*learned, inputs.indices, target=target, **options)
    scores = flashdsa.indexer_scores(*learned, inputs.indices, **options)
    mean = torch.stack(taught).mean(0)
    of_slots = mean / mean.sum(1, keepdim=True)
    logs = scores.log_softmax(1).where(mean > 0, 0.0)
    right = (torch.special.xlogy(of_slots, of_slots) - of_slots * logs).sum(1)
    seen = mean.sum(1) > 0
    assert bool(seen.any())
    torch.testing.assert_close(loss[seen], right[seen])
    found = torch.autograd.grad(loss[seen].sum(), learned)
    by_hand = torch.autograd.grad(right[seen].sum(), learned)
    torch.testing.assert_close(found, by_hand)


def test_a_row_with_one_slot_or_without_a_target_has_nothing_to_learn(
    backend: str, device: str
) -> None:
    scores = torch.tensor([[3.0, -torch.inf], [1.0, 2.0], [-torch.inf] * 2], device=device)
    scores.requires_grad_()
    target = torch.tensor([[0.5, torch.nan], [0.0, 0.0], [1.0, 1.0]], device=device)
    kl = flashdsa.indexer_kl(scores, target, backend=backend)
    kl.backward(torch.ones_like(kl))
    assert kl.tolist() == [0, 0, 0]
    assert scores.grad is not None and not scores.grad.any()


def test_it_stays_whole_in_a_compiled_graph(seed: int) -> None:
    inputs = make_indexer_training_inputs(BY_NAME["plain"], seed)
    attention = inputs.attention
    _, lse = forward_results(attention)
    given = {"q": attention.q, "kv": attention.kv, "lse": lse}

    def loss(*index: torch.Tensor) -> torch.Tensor:
        return flashdsa.indexer_kl_loss(*index, inputs.indices, **given).mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        index = [x.detach().requires_grad_() for x in inputs.operands[:3]]
        function(*index).backward()
        gradients.append([x.grad for x in index])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_neither_or_both_targets_are_refused(seed: int) -> None:
    inputs = make_indexer_training_inputs(BY_NAME["plain"], seed)
    attention = inputs.attention
    target = torch.zeros(inputs.indices.shape)
    for given, message in (
        ({}, "target: expected it, or q, kv and lse; got none of them"),
        ({"q": attention.q}, "target: expected it, or q, kv and lse; got q"),
        ({"q": attention.q, "target": target}, "target: expected either it or q, kv and lse"),
    ):
        with pytest.raises(ValueError, match=message):
            flashdsa.indexer_kl_loss(*inputs.operands, **given)


NAMED, BY = 7, 1
"""The key, and the query that names it."""


def operands(heads: int, queries: int, value: float) -> tuple[Tensor, ...]:
    """q, k, weights, indices and the scores' gradient; a query names six of 12 keys."""
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(queries, heads, 128, generator=generator).bfloat16()
    k = torch.randn(12, 128, generator=generator).bfloat16()
    k[NAMED, 5] = value
    weights = torch.randn(queries, heads, generator=generator)
    rows = torch.tensor([row for row in range(12) if row != NAMED])
    indices = rows[torch.rand(queries, 11, generator=generator).argsort(1)[:, :6]].int()
    indices[BY, 0] = NAMED
    indices[2] = -1
    return q, k, weights, indices, torch.randn(queries, 6, generator=generator)


def judge_call(backend: str, heads: int, queries: int, value: float, deterministic: bool) -> None:
    """dQ and dW of all but one query, and dK of all other keys, are those of the CPU."""
    given = operands(heads, queries, value)
    wanted = flashdsa.indexer_bwd(*given, backend="cpu")
    if backend == "sm90":
        given = tuple(x.cuda() for x in given)
    got = flashdsa.indexer_bwd(*given, deterministic=deterministic, backend=backend)
    others = torch.arange(queries) != BY
    assert not got[2][BY].isfinite().any()
    keys = torch.arange(12) != NAMED
    for mine, expected, rows in zip(got, wanted, (others, keys, others), strict=True):
        mine, expected = mine.cpu()[rows].double(), expected[rows].double()
        assert expected.isfinite().all()
        error = (mine - expected).flatten(1).norm(dim=1)
        assert bool((error <= 0.01 * expected.flatten(1).norm(dim=1) + 1e-6).all())


def on(backend: str) -> AbstractContextManager[Any]:
    """Two emulated SMs, or none."""
    if not backend.startswith("emulate"):
        return nullcontext()
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    from flashdsa.backends.emulated.devices import Device
    from flashdsa.backends.emulated.runner import emulation

    return emulation(Device(2, {1: 2}))


CASES = [
    ("cpu", 64, 5, float("nan"), False),
    ("emulate-sm90", 64, 5, float("nan"), False),
    ("emulate-sm90", 64, 3, float("inf"), True),
    pytest.param("emulate-sm90", 16, 9, float("inf"), True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "heads", "queries", "value", "deterministic"), CASES)
def test_neighbours_are_as_without(
    backend: str, heads: int, queries: int, value: float, deterministic: bool
) -> None:
    with on(backend):
        judge_call(backend, heads, queries, value, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("heads", "queries"), [(16, 40), (32, 40), (64, 9), (64, 600)])
class TestOnHopper:
    """The same on the GPU."""

    pytestmark = HOPPER_GPU

    def test_neighbours_are_as_without(
        self, heads: int, queries: int, value: float, deterministic: bool
    ) -> None:
        judge_call("sm90", heads, queries, value, deterministic)


def test_fp32_scales_give_what_the_cache_holds(seed: int) -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(seed))
    fp8, scale = flashdsa.quantize_index_k(x)
    assert torch.equal(flashdsa.fake_quantize_index(x, scale="fp32"), fp8.float() * scale[:, None])


def test_power_of_two_scales_are_exact_in_bf16_and_use_the_range(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 128, generator=generator) * torch.logspace(-6, 3, 200)[:, None]
    x[0], x[1, 0] = 0, 448 * 4  # nothing, and a scale that is a power of two already
    wide = flashdsa.fake_quantize_index(x)
    assert torch.equal(
        flashdsa.fake_quantize_index(x.bfloat16().float()).bfloat16().float(),
        flashdsa.fake_quantize_index(x.bfloat16().float()),
    )
    assert float(wide[1, 0]) == 448 * 4
    error = ((wide - x).norm(dim=1) / x.norm(dim=1))[40:]
    assert float(error.max()) < 0.04  # e4m3 has 3 bits of mantissa: at most 1/16 a number


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_as_the_cache_shows_it(value: float, scale: str) -> None:
    x = torch.ones(3, 128)
    x[1, 5] = value
    x.requires_grad_()
    out = flashdsa.fake_quantize_index(x, scale=scale)
    fp8, scales = flashdsa.quantize_index_k(x.detach())
    cached = fp8.float() * scales[:, None]
    assert torch.equal(out.isnan(), cached.isnan()) and out[1].isnan().all()
    assert torch.equal(out[::2].isfinite(), torch.ones(2, 128, dtype=torch.bool))
    out.sum().backward()
    assert x.grad is not None and (x.grad == 1).all()


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    exponent = torch.arange(-22, 121)
    power = torch.full((143,), 2.0, dtype=torch.float64).pow(exponent).float()
    above, below = power.nextafter(2 * power), power.nextafter(power / 2)
    assert torch.equal(next_power_of_two(power), power)
    assert torch.equal(next_power_of_two(above), 2 * power)
    assert torch.equal(next_power_of_two(below), power)
    kept = torch.tensor([torch.inf, torch.nan])
    torch.testing.assert_close(next_power_of_two(kept), kept, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.zeros(3, 64), "fp32", r"x: expected a last dimension of 128; got shape \[3, 64\]"),
        (torch.zeros(128), "bf16", 'scale: expected "ue8m0", "fp32" or "mxfp4"; got'),
        (torch.zeros(128, dtype=torch.int32), "fp32", "x: expected dtype"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, scale: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flashdsa.fake_quantize_index(x, scale=scale)
