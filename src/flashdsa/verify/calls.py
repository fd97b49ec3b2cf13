"""The public operations on a case's inputs: what the judges run, and `flashdsa check --list`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashdsa
from flashdsa.ops.attention import SparseMlaOutOperands
from flashdsa.verify.indexer_cases import IndexerInputs
from flashdsa.verify.indexer_training_cases import IndexerTrainingInputs
from flashdsa.verify.layouts import poison_value
from flashdsa.verify.prefill_cases import PrefillInputs
from flashdsa.verify.sparse_mla_cases import SparseMlaInputs


def sparse_mla_fwd(
    inputs: SparseMlaInputs, backend: str, *, with_max_logits: bool = True
) -> tuple[Tensor, ...]:
    """O, lse, and max_logits if the case asks for them and they are wanted."""
    return flashdsa.sparse_mla_fwd(
        inputs.q,
        inputs.kv,
        inputs.rows,
        d_v=inputs.case.d_v,
        return_max_logits=with_max_logits and inputs.case.max_logits,
        batch_invariant=inputs.case.batch_invariant,
        backend=backend,
        **inputs.options,
    )


def sparse_mla_fwd_out(inputs: SparseMlaInputs, backend: str) -> dict[str, tuple[Tensor, ...]]:
    """The same in the caller's buffers, which held poison: by `out` and `lse`, and bound.

    The bound function runs twice, into other buffers than it was bound to.
    """
    case, options = inputs.case, inputs.options
    rows = (case.num_queries, case.num_heads)
    sums = torch.float64 if case.dtype == torch.float64 else torch.float32

    def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, poison_value(dtype), dtype=dtype, device=inputs.q.device)

    def buffers() -> tuple[Tensor, Tensor]:
        return poisoned(*rows, case.d_v, dtype=case.dtype), poisoned(*rows, dtype=sums)

    out, lse = buffers()
    given = flashdsa.sparse_mla_fwd(
        inputs.q,
        inputs.kv,
        inputs.rows,
        d_v=case.d_v,
        out=out,
        lse=lse,
        return_max_logits=case.max_logits,
        batch_invariant=case.batch_invariant,
        backend=backend,
        **options,
    )

    def operands() -> SparseMlaOutOperands:
        largest = poisoned(*rows, dtype=sums) if case.max_logits else None
        kv = inputs.kv if case.kv_format else inputs.kv.view(-1, inputs.kv.shape[-1])
        indices = inputs.indices.view(case.num_queries, -1)
        written = SparseMlaOutOperands(inputs.q, kv, indices, *buffers(), largest)
        written = written._replace(topk_length=inputs.topk_length, attn_sink=inputs.attn_sink)
        if inputs.extra_kv is not None and inputs.extra_indices is not None:
            written = written._replace(
                extra_kv=inputs.extra_kv.view(-1, inputs.extra_kv.shape[-1]),
                extra_indices=inputs.extra_indices.view(case.num_queries, -1),
                extra_topk_length=inputs.extra_topk_length,
                extra_ends=inputs.extra_ends,
            )
        return written._replace(ends=inputs.ends)

    given_to_bind: dict[str, Any] = {
        "sm_scale": case.sm_scale,
        "index_block": case.index_block,
        "batch_invariant": case.batch_invariant,
        **inputs.of_format,
    }
    bound = operands()
    serve = flashdsa.bind("sparse_mla_fwd_out", bound, backend=backend, **given_to_bind)
    serve(bound)
    bound = operands()
    serve(bound)
    return {"out=": (out, lse, *given[2:]), "bound": bound.outputs}


def sparse_mla(inputs: SparseMlaInputs, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """O, and by name the gradients of `sum(O * dO)` in the inputs' dtypes."""
    q, kv = inputs.q.detach().requires_grad_(), inputs.kv.detach().requires_grad_()
    sink = None if inputs.attn_sink is None else inputs.attn_sink.detach().requires_grad_()
    extra = None if inputs.extra_kv is None else inputs.extra_kv.detach().requires_grad_()
    options = {**inputs.options, "attn_sink": sink}
    if extra is not None:
        options["extra_kv"] = extra
    O = flashdsa.sparse_mla(q, kv, inputs.rows, d_v=inputs.case.d_v, backend=backend, **options)
    O.backward(inputs.do)
    gradients = {"q.grad": q.grad, "kv.grad": kv.grad}
    if extra is not None:
        gradients["extra_kv.grad"] = extra.grad
    if sink is not None:
        gradients["attn_sink.grad"] = sink.grad
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    assert present.keys() == gradients.keys(), f"no gradient for {gradients.keys() - present}"
    return O.detach(), present


def mla_bwd(
    inputs: SparseMlaInputs,
    O: Tensor,
    lse: Tensor,
    backend: str,
    *,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """dQ, dKV, and dextra_kv and d_sink if there is one, of that O and lse."""
    return flashdsa.mla_bwd(
        inputs.q,
        inputs.kv,
        inputs.do,
        lse,
        O,
        inputs.rows,
        deterministic=deterministic,
        dkv_dtype=dkv_dtype,
        backend=backend,
        **inputs.options,
    )


def indexer_logits(inputs: IndexerInputs, backend: str) -> Tensor:
    """Scores of each row."""
    return flashdsa.indexer_logits(
        *inputs.operands_of_rows,
        inputs.max_len,
        table_page_size=inputs.case.table_page_size,
        backend=backend,
    )


def dsa_topk_indexer(inputs: IndexerInputs, backend: str) -> Tensor:
    """Ids in a buffer that held poison."""
    case, ids = inputs.case, inputs.output_buffer()
    q, cache, weights, seq_lens, block_table = inputs.operands
    flashdsa.dsa_topk_indexer(
        inputs.of_requests(q),
        cache,
        inputs.of_requests(weights),
        inputs.of_requests(seq_lens),
        block_table,
        inputs.of_requests(ids),
        ids="position" if case.positions else "slot",
        candidates=None if inputs.candidates is None else inputs.of_requests(inputs.candidates),
        backend=backend,
        **case.choices,
    )
    return ids


def prefill_logits(inputs: PrefillInputs, backend: str) -> Tensor:
    """Scores of each query."""
    return flashdsa.prefill_logits(*inputs.operands, backend=backend, **inputs.options)


def dsa_topk_prefill(inputs: PrefillInputs, backend: str) -> Tensor:
    """Ids in a buffer that held poison."""
    ids = inputs.output_buffer()
    options = {**inputs.options, **inputs.choices}
    flashdsa.dsa_topk_prefill(*inputs.operands, ids, backend=backend, **options)
    return ids


def attention_target(inputs: IndexerTrainingInputs, lse: Tensor, backend: str) -> Tensor:
    """The target of that lse."""
    attention = inputs.attention
    operands = (attention.q, attention.kv, lse, attention.indices)
    return flashdsa.attention_target(*operands, backend=backend, **attention.options)


def indexer_scores(inputs: IndexerTrainingInputs, backend: str) -> Tensor:
    """Scores of each slot."""
    lengths = inputs.attention.topk_length
    return flashdsa.indexer_scores(*inputs.operands, topk_length=lengths, backend=backend)


def indexer_bwd(
    inputs: IndexerTrainingInputs, backend: str, *, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a random gradient of the scores."""
    return flashdsa.indexer_bwd(
        *inputs.operands,
        inputs.grad_scores,
        deterministic=deterministic,
        backend=backend,
        topk_length=inputs.attention.topk_length,
    )


def indexer_kl_bwd(
    scores: Tensor, target: Tensor, row_weight: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """d_scores by autograd of `indexer_kl`, and by `indexer_kl_bwd`."""
    found = scores.detach().requires_grad_()
    flashdsa.indexer_kl(found, target, backend=backend).backward(row_weight)
    assert found.grad is not None
    return found.grad, flashdsa.indexer_kl_bwd(scores, target, row_weight, backend=backend)


def mean_weight(inputs: IndexerTrainingInputs) -> float:
    """Return the weight of each query's KL in the mean."""
    return 1 / max(1, inputs.case.attention.num_queries)


def indexer_kl_loss(
    inputs: IndexerTrainingInputs, lse: Tensor, backend: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL of each query from q, kv and that lse, and by name the gradients of the mean."""
    attention = inputs.attention
    of_q, of_k, of_weights = leaves = [x.detach().requires_grad_() for x in inputs.operands[:3]]
    loss = flashdsa.indexer_kl_loss(
        of_q,
        of_k,
        of_weights,
        inputs.operands[3],
        q=attention.q,
        kv=attention.kv,
        lse=lse,
        backend=backend,
        **attention.options,
    )
    loss.backward(torch.full_like(loss, mean_weight(inputs)))
    gradients = {}
    for name, leaf in zip(("q.grad", "k.grad", "weights.grad"), leaves, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
        gradients[name] = leaf.grad
    return loss.detach(), gradients
