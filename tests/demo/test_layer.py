"""The DSA layer of the demo: causal, really selecting, and equal to dense where it must be."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashdsa.demo.attention import SparseOutput, dense_attended, dense_probabilities, run_sparse
from flashdsa.demo.evaluate import captured_mass
from flashdsa.demo.indexer import LightningIndexer
from flashdsa.demo.model import ByteModel
from flashdsa.demo.paging import PAGE_SIZE, PagePool

BATCH, WINDOW, NUM_QUERIES, TOPK = 2, 200, 48, 32


class Layer(NamedTuple):
    model: ByteModel
    indexer: LightningIndexer
    tokens: Tensor  # [BATCH, WINDOW]
    pool: PagePool

    def run(self, tokens: Tensor, topk: int = TOPK, *, shared: bool = False) -> SparseOutput:
        return run_sparse(
            self.model,
            self.indexer,
            tokens,
            None if shared else self.pool,
            num_queries=NUM_QUERIES,
            topk=topk,
            backend="auto",
        )


@pytest.fixture(scope="module")
def layer() -> Layer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, indexer = ByteModel(num_heads=2), LightningIndexer()
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(256, (BATCH, WINDOW), generator=generator)
    return Layer(model, indexer, tokens, PagePool.shuffled(BATCH, WINDOW, generator))


def query_positions() -> Tensor:
    return torch.arange(WINDOW - NUM_QUERIES, WINDOW).repeat(BATCH)[:, None]  # [BATCH * S, 1]


def test_pages_are_shuffled_and_map_back(layer: Layer) -> None:
    pool = layer.pool
    in_order = torch.arange(BATCH * WINDOW).view(BATCH, WINDOW)
    assert not torch.equal(pool.slots, in_order)
    ids = pool.slots[:, :TOPK].repeat_interleave(NUM_QUERIES, dim=0).int()  # [BATCH * S, TOPK]
    expected = torch.arange(TOPK).expand(BATCH * NUM_QUERIES, TOPK)
    assert torch.equal(pool.positions_of(ids, NUM_QUERIES), expected)
    rows = pool.place(torch.arange(BATCH * WINDOW, dtype=torch.float32).view(BATCH, WINDOW, 1))
    assert torch.equal(rows[pool.slots.flatten(), 0], in_order.flatten().float())
    assert int(rows.isnan().sum()) == pool.num_pages * PAGE_SIZE - BATCH * WINDOW


def test_an_id_of_another_window_is_refused(layer: Layer) -> None:
    ids = layer.pool.slots[1, :1].int().expand(BATCH * NUM_QUERIES, 1)
    with pytest.raises(RuntimeError, match="outside the query's own window"):
        layer.pool.positions_of(ids, NUM_QUERIES)


def test_choices_are_causal_distinct_and_a_real_selection(layer: Layer) -> None:
    output = layer.run(layer.tokens)
    positions = layer.pool.positions_of(output.indices, NUM_QUERIES)
    assert positions.shape == (BATCH * NUM_QUERIES, TOPK)
    assert bool((positions >= 0).all())
    assert bool((positions <= query_positions()).all())
    ordered = positions.sort(dim=-1).values
    assert bool((ordered.diff(dim=-1) > 0).all())
    newest = query_positions() - torch.arange(TOPK - 1, -1, -1)
    assert not bool((ordered == newest).all(dim=-1).any())
    assert len(torch.unique(ordered, dim=0)) > BATCH  # queries choose differently


def test_shared_keys_are_chosen_as_those_in_pages(layer: Layer) -> None:
    paged, shared = layer.run(layer.tokens), layer.run(layer.tokens, shared=True)
    window_of_query = torch.arange(BATCH).repeat_interleave(NUM_QUERIES)[:, None]
    positions = layer.pool.positions_of(paged.indices, NUM_QUERIES)
    expected = (window_of_query * WINDOW + positions).sort().values
    assert torch.equal(shared.indices.sort().values.long(), expected)
    assert torch.allclose(shared.logits, paged.logits, rtol=0, atol=1e-2)


def test_the_last_byte_changes_only_the_last_query(layer: Layer) -> None:
    changed = layer.tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = layer.run(layer.tokens).logits, layer.run(changed).logits
    assert torch.allclose(before[:, :-1], after[:, :-1], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], rtol=0, atol=1e-2)


def test_fp8_choices_follow_the_float_scores(layer: Layer) -> None:
    output = layer.run(layer.tokens)
    index = output.index_inputs
    similarity = torch.einsum("bshk,btk->bsht", index.q_index, index.k_index).relu()
    scores = torch.einsum("bsht,bsh->bst", similarity, index.weights).flatten(0, 1)
    scores = scores.masked_fill(torch.arange(WINDOW) > query_positions(), -torch.inf)
    wanted = torch.zeros(scores.shape, dtype=torch.bool)
    wanted.scatter_(1, scores.topk(TOPK).indices, True)
    chosen = layer.pool.positions_of(output.indices, NUM_QUERIES).long()
    assert wanted.gather(1, chosen).float().mean() > 0.9


def test_choosing_everything_is_dense_attention_forward_and_backward(layer: Layer) -> None:
    parameters = list(layer.model.parameters())
    output = layer.run(layer.tokens, topk=WINDOW)
    dense = dense_attended(output.projections)
    assert (output.attended.float() - dense).norm() < 2e-2 * dense.norm()
    logits = layer.model.read_out(output.projections.hidden, dense)
    sparse_grads = torch.autograd.grad(output.logits.square().mean(), parameters, retain_graph=True)
    dense_grads = torch.autograd.grad(logits.square().mean(), parameters)
    for sparse_grad, dense_grad in zip(sparse_grads, dense_grads, strict=True):
        assert (sparse_grad - dense_grad).norm() < 5e-2 * dense_grad.norm()


def test_captured_mass_of_uniform_attention() -> None:
    query = torch.arange(WINDOW - NUM_QUERIES, WINDOW)
    visible = torch.arange(WINDOW) <= query[:, None]  # [S, T]
    attention = (visible / visible.sum(dim=-1, keepdim=True))[None]
    mass = captured_mass(visible[None] & (torch.arange(WINDOW) < TOPK), attention, TOPK)
    assert mass.random == pytest.approx((TOPK / (query + 1)).mean().item())
    assert [mass.indexer, mass.recent, mass.best] == pytest.approx([mass.random] * 3)


def test_dense_attention_sees_no_future(layer: Layer) -> None:
    projections = layer.model.project(layer.tokens, NUM_QUERIES)
    rows = torch.tensor([0, NUM_QUERIES - 1])
    probabilities = dense_probabilities(projections, rows)
    assert bool((probabilities[:, :, 0, WINDOW - NUM_QUERIES + 1 :] == 0).all())
    assert torch.allclose(probabilities.sum(dim=-1), torch.ones(()))
