"""Cases of the indexer's training: sparse MLA's, with index queries and keys beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.problem import INDEX_HEAD_DIM
from flashdsa.verify import sparse_mla_cases

SCALE = INDEX_HEAD_DIM**-0.5
SHARED_FACTOR = 1 + 2**-8 - 2**-20
"""Factor of many terms, of which bf16 is off by 3.9e-3: a sum is, too, if each is rounded."""


@dataclass(frozen=True)
class IndexerTrainingCase:
    """An attention, and an indexer for it; data are standard normal unless a field says else."""

    attention: sparse_mla_cases.SparseMlaCase
    index_heads: int = 16
    weight_scale: float = 1.0
    """Weights are normal numbers of this size: with 1e3, scores go to about 1e4."""
    bf16_weights: bool = False
    equal_scores: bool = False
    """Every weight is 0: every score is, too."""
    shared_weights: bool = False
    """Every weight is SHARED_FACTOR, as those of a projection that has learned nothing may be."""

    @property
    def name(self) -> str:
        return self.attention.name


@dataclass(frozen=True)
class IndexerTrainingInputs:
    """q_index (S, H_I, 128), k_index (S_kv, 128), weights (S, H_I), grad_scores (S, topk)."""

    case: IndexerTrainingCase
    attention: sparse_mla_cases.SparseMlaInputs
    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    grad_scores: Tensor

    @property
    def indices(self) -> Tensor:
        """(S, topk)."""
        return self.attention.indices.reshape(self.grad_scores.shape)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Operands in the order of `indexer_scores`."""
        return self.q_index, self.k_index, self.weights, self.indices


def make_indexer_training_inputs(
    case: IndexerTrainingCase, seed: int, device: str | torch.device = "cpu"
) -> IndexerTrainingInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device.

    If the attention's case poisons, poison is also in keys that no valid slot names, in gradients
    of invalid slots, and in the queries and weights of rows without a valid slot.
    """
    attention = sparse_mla_cases.make_sparse_mla_inputs(case.attention, seed, device)
    generator = torch.Generator().manual_seed(seed + 1)
    rows, keys = case.attention.num_queries, case.attention.num_keys
    dtype = case.attention.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(rows, case.index_heads, INDEX_HEAD_DIM)
    k = normal(keys, INDEX_HEAD_DIM)
    weights = normal(rows, case.index_heads) * case.weight_scale * SCALE
    if case.equal_scores:
        weights.zero_()
    if case.shared_weights:
        weights.fill_(SHARED_FACTOR)
    grad = normal(rows, case.attention.topk)
    if case.attention.poison:
        named = reference.valid_slots(attention.indices, keys, attention.topk_length)
        unnamed = torch.ones(keys, dtype=torch.bool)
        for row, slots in enumerate(named):
            unnamed[slots.cpu()] = False
            if not len(slots):
                q[row], weights[row] = torch.nan, torch.inf
        k[unnamed] = torch.nan
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    made = IndexerTrainingInputs(
        case,
        attention,
        attention.lay_out(q.to(dtype)),
        attention.lay_out(k.to(dtype)),
        attention.lay_out(weights.to(dtype if case.bf16_weights else sums)),
        attention.lay_out(grad.to(sums)),
    )
    if case.attention.poison:
        scores = reference.indexer_scores(*made.operands, topk_length=attention.topk_length)
        made.grad_scores[(scores == -torch.inf).to(device)] = torch.nan
    return made
