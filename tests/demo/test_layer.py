"""The DSA layer of the demo: causal, really selecting, and equal to dense where it must be."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashdsa.demo.evaluate import captured
from flashdsa.demo.model import D_LATENT, Attention, ByteModel, dense_logits
from flashdsa.demo.train import sparse_stage_loss, warm_up_loss

WINDOW, NUM_QUERIES, TOPK = 200, 48, 32
QUERY = torch.arange(WINDOW - NUM_QUERIES, WINDOW)[:, None]
ROWS = torch.arange(NUM_QUERIES)


class Run(NamedTuple):
    model: ByteModel
    logits: Tensor
    hidden: Tensor
    attention: Attention


def run(topk: int = TOPK, changed: int = 0) -> Run:
    """The same model and window each time, but for the last byte."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = ByteModel(2, NUM_QUERIES, topk, "auto")
    tokens = torch.randint(256, (WINDOW,), generator=torch.Generator().manual_seed(4))
    tokens[-1] = (tokens[-1] + changed) % 256
    return Run(model, *model(tokens))


@pytest.fixture(scope="module")
def sparse() -> Run:
    return run()


def test_choices_are_causal_distinct_and_a_real_selection(sparse: Run) -> None:
    ordered = sparse.attention.indices.sort(dim=-1).values
    assert ordered.shape == (NUM_QUERIES, TOPK)
    assert bool((ordered >= 0).all()) and bool((ordered <= QUERY).all())
    assert bool((ordered.diff(dim=-1) > 0).all())
    newest = QUERY - torch.arange(TOPK - 1, -1, -1)
    assert not bool((ordered == newest).all(dim=-1).any())
    assert len(torch.unique(ordered, dim=0)) > 1  # queries choose differently


def test_the_last_byte_changes_only_the_last_query(sparse: Run) -> None:
    before, after = sparse.logits, run(changed=1).logits
    assert torch.allclose(before[:-1], after[:-1], rtol=0, atol=1e-5)
    assert not torch.allclose(before[-1], after[-1], rtol=0, atol=1e-2)


def test_fp8_choices_follow_the_float_scores(sparse: Run) -> None:
    one = sparse.attention
    scores = torch.einsum("shk,tk->sht", one.q_index, one.k_index).relu()
    scores = torch.einsum("sht,sh->st", scores, one.weights)
    scores = scores.masked_fill(torch.arange(WINDOW) > QUERY, -torch.inf)
    wanted = torch.zeros(scores.shape, dtype=torch.bool)
    wanted.scatter_(1, scores.topk(TOPK).indices, True)
    assert wanted.gather(1, one.indices.long()).float().mean() > 0.9


def test_choosing_everything_is_dense_attention_forward_and_backward() -> None:
    model, logits, hidden, attention = run(topk=WINDOW)
    weights = dense_logits(attention, ROWS).softmax(-1)
    dense = torch.einsum("sht,tc->shc", weights, attention.kv[:, :D_LATENT])
    assert (attention.out.float() - dense).norm() < 2e-2 * dense.norm()
    learned = [p for name, p in model.named_parameters() if "indexer" not in name]
    found = torch.autograd.grad(logits.square().mean(), learned, retain_graph=True)
    expected = torch.autograd.grad(model.read_out(hidden, dense).square().mean(), learned)
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine - wanted).norm() < 5e-2 * wanted.norm()


def test_both_losses_of_the_indexer_agree_on_everything_and_teach_it_alone() -> None:
    model, *_, attention = run(topk=WINDOW)
    dense, sparse = warm_up_loss(attention, ROWS), sparse_stage_loss(attention, ROWS, "auto")
    assert sparse.item() == pytest.approx(dense.item(), rel=2e-2)
    for loss in (dense, sparse):
        model.zero_grad()
        loss.backward(retain_graph=True)
        taught = {name for name, p in model.named_parameters() if p.grad is not None}
        assert taught == {f"attention.indexer.{name}" for name in ("w_q", "w_k", "w_weights")}


def test_captured_mass_of_uniform_attention() -> None:
    visible = torch.arange(WINDOW) <= QUERY
    probability = visible / visible.sum(dim=-1, keepdim=True)
    shares = captured(visible & (torch.arange(WINDOW) < TOPK), probability, TOPK)
    assert [float(share) for share in shares] == pytest.approx(
        [(TOPK / (QUERY + 1)).mean().item()] * 4
    )


def test_dense_attention_sees_no_future(sparse: Run) -> None:
    weights = dense_logits(sparse.attention, torch.tensor([0, NUM_QUERIES - 1])).softmax(-1)
    assert bool((weights[0, :, WINDOW - NUM_QUERIES + 1 :] == 0).all())
    assert bool((weights[1] > 0).all())
