"""Every backend's operations that train the indexer are right on every case."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import flashdsa
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import make_indexer_training_inputs
from flashdsa.verify.judge_sparse_mla import forward_results
from tests.support.cases import INDEXER_TRAINING_CASES
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
