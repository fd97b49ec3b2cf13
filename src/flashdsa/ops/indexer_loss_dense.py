"""Dense warm-up of the indexer: the KL over every visible key, chunk by chunk of queries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch import checks
from flashdsa.dispatch.dtypes import ATTENTION_DTYPES, INT32, sum_dtype, sums_or_same
from flashdsa.dispatch.registration import opaque
from flashdsa.errors import ArgumentValueError, DoubleBackwardError
from flashdsa.problem import INDEX_HEAD_DIM

__all__ = ["indexer_kl_loss_dense"]


def indexer_kl_loss_dense(  # noqa: PLR0913 - two sets of operands and a range of keys
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    key_end: Tensor,
    *,
    key_start: Tensor | None = None,
    row_weight: Tensor | None = None,
    sm_scale: float | None = None,
    chunk_bytes: int = 2**28,
) -> Tensor:
    """The warm-up's loss: KL of dense attention to the softmax of the indexer's scores, over every
    key in [key_start, key_end) of each query; ``sum_s row_weight[s] KL[s]``.

    Chunks of queries, so that nothing of S x S_kv is ever kept. Gradients are formed in the forward
    and kept in the loss's dtype; the backward multiplies them with the loss's gradient and rounds
    them once. They go to `q_index`, `k_index` and `weights` alone, and take 4 bytes an element of
    these (8 for fp64 inputs) until the backward. Runs on the tensors' device as products of torch.

    Args:
        q_index: (S, H_I, 128) bf16, fp16, fp32 or fp64.
        k_index: (S_kv, 128), q_index's dtype.
        weights: (S, H_I) fp32 or q_index's dtype (fp64 for fp64 inputs).
        q: (S, H, d) of the attention, q_index's dtype.
        k: (S_kv, d), shared by the heads (MLA in MQA form), or (S_kv, H, d), one a head.
        lse: (S, H) fp32 (fp64 for fp64 inputs), natural logarithm of the attention's denominator,
            windows and sinks included. A head with +inf adds 0.
        key_end: (S,) int32: query s sees the keys [key_start[s], key_end[s]); both are clamped to
            [0, S_kv].
        key_start: (S,) int32; 0 by default.
        row_weight: (S,) fp32, what each row's KL counts; 1 / S by default, the mean.
        sm_scale: factor of the logits; ``d ** -0.5`` by default.
        chunk_bytes: workspace for the two matrices of a chunk, about half of all that is used.

    Whatever a key outside every range holds, or a query without keys or of weight 0, adds nothing.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    scale = checks.scale_or_default(sm_scale, q)
    problem = _Problem(
        q_index, k_index, weights, q, k, lse, key_end, key_start, row_weight, scale, chunk_bytes
    )
    problem.check()
    loss: Tensor = _dense_kl(*problem, False)[0]
    return loss


class _Problem(NamedTuple):
    """The arguments of a call; `sm_scale` is a number."""

    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    q: Tensor
    k: Tensor
    lse: Tensor
    key_end: Tensor
    key_start: Tensor | None
    row_weight: Tensor | None
    sm_scale: float
    chunk_bytes: int

    def check(self) -> None:
        """Raise for a wrong argument."""
        for name in ("q_index", "k_index", "weights", "q", "k", "lse", "key_end"):
            checks.require_tensor(name, getattr(self, name))
        dtype = self.q_index.dtype
        checks.require_dtype("q_index", self.q_index, *ATTENTION_DTYPES)
        for name in ("k_index", "q", "k"):
            checks.require_dtype(name, getattr(self, name), dtype)
        checks.require_dtype("weights", self.weights, *sums_or_same(dtype))
        checks.require_dtype("lse", self.lse, sum_dtype(dtype))
        checks.require_rank("q_index", self.q_index, (3,), "[S, H_I, 128]")
        checks.require_rank("k_index", self.k_index, (2,), "[S_kv, 128]")
        checks.require_rank("q", self.q, (3,), "[S, H, d]")
        checks.require_rank("k", self.k, (2, 3), "[S_kv, d] or [S_kv, H, d]")
        rows, keys = self.q_index.shape[0], self.k_index.shape[0]
        heads, index_heads = self.q.shape[1], self.q_index.shape[1]
        checks.require_shape(
            "q_index", self.q_index, (rows, index_heads, INDEX_HEAD_DIM), "[S, H_I, 128]"
        )
        checks.require_shape("k_index", self.k_index, (keys, INDEX_HEAD_DIM), "[S_kv, 128]")
        checks.require_shape("weights", self.weights, (rows, index_heads), "[S, H_I]")
        checks.require_shape("q", self.q, (rows, heads, self.k.shape[-1]), "[S, H, d]")
        shape = (keys, self.q.shape[2]) if self.k.dim() == 2 else (keys, *self.q.shape[1:])
        checks.require_shape("k", self.k, shape, "[S_kv, d] or [S_kv, H, d]")
        checks.require_shape("lse", self.lse, (rows, heads), "[S, H]")
        for name in ("key_end", "key_start", "row_weight"):
            value = getattr(self, name)
            if value is not None:
                checks.require_tensor(name, value)
                checks.require_dtype(
                    name, value, *((sum_dtype(dtype),) if "row" in name else INT32)
                )
                checks.require_shape(name, value, (rows,), "[S]")
        for name, value in zip(self._fields, self, strict=True):
            if isinstance(value, Tensor):
                checks.require_device(name, value, self.q_index.device, "q_index")
        checks.require_positive("chunk_bytes", self.chunk_bytes, 2**63 - 1)
        if not index_heads or not heads:
            raise ArgumentValueError("q and q_index: expected at least one head; got 0")

    def chunks(self) -> Iterator[slice]:
        """Queries whose two matrices of all keys fit `chunk_bytes`; at least one."""
        bytes_per_query = 2 * max(1, len(self.k_index)) * self.logits_dtype.itemsize
        step = max(1, self.chunk_bytes // bytes_per_query)
        for first in range(0, len(self.q), step):
            yield slice(first, min(first + step, len(self.q)))

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of the attention's logits: fp32 holds the products of 16-bit numbers. Products of
        fp32 numbers would be off by some 1e-7 of a logit in fp32; P shows that if logits are
        large."""
        return torch.float32 if self.q.dtype.itemsize == 2 else torch.float64

    def visible(self, rows: slice) -> Tensor:
        """Bool (queries, S_kv)."""
        key = torch.arange(len(self.k_index), device=self.q.device)
        seen = key < self.key_end[rows, None]
        return seen if self.key_start is None else seen & (key >= self.key_start[rows, None])

    def target(self, rows: slice, visible: Tensor) -> Tensor:
        """P (queries, S_kv): the heads' attention added up, 0 where a key is not visible."""
        dtype, wide = sum_dtype(self.q.dtype), self.logits_dtype
        total = torch.zeros(visible.shape, dtype=dtype, device=self.q.device)
        shared = self.k.to(wide) if self.k.dim() == 2 else None
        for head in range(self.q.shape[1]):
            keys = self.k[:, head].to(wide) if shared is None else shared
            s = self.q[rows, head].to(wide) @ keys.T
            p = s.mul_(self.sm_scale).sub_(self.lse[rows, head, None]).exp_()
            total += p.masked_fill_(~visible | (self.lse[rows, head, None] == math.inf), 0)
        return total

    def scores(self, rows: slice, visible: Tensor) -> Tensor:
        """I (queries, S_kv), -inf where a key is not visible."""
        dtype = sum_dtype(self.q.dtype)
        total = torch.zeros(visible.shape, dtype=dtype, device=self.q.device)
        keys = self.k_index.to(dtype).T
        for head in range(self.q_index.shape[1]):
            z = self.q_index[rows, head].to(dtype) @ keys
            total += z.relu_().mul_(self.weights[rows, head, None].to(dtype))
        return total.masked_fill_(~visible, -math.inf)


def _gradients(
    problem: _Problem, rows: slice, g: Tensor, hidden: Tensor, sums: list[Tensor]
) -> None:
    """Add a chunk's share of dq_index, dk_index and d_weights to `sums`.

    INVARIANT: a pair of a query and a key that is hidden adds 0, whatever the two hold: its z is
    selected out, and its A, which is 0, meets finite numbers only. A NaN of a pair that
    is seen is in z and, by the softmax, in all of the query's g, so in A.

    Args:
        g: (queries, S_kv), gradient of the scores. hidden: bool, likewise; g is 0 there.
    """
    dtype = g.dtype
    dq, dk, d_weights = sums
    keys = problem.k_index.to(dtype)
    finite_keys = _finite(keys)
    for head in range(problem.q_index.shape[1]):
        q = problem.q_index[rows, head].to(dtype)
        z = (q @ keys.T).masked_fill_(hidden, 0)
        d_weights[rows, head] = (g * z.relu()).sum(1)
        a = (g * problem.weights[rows, head, None].to(dtype)).masked_fill_(z <= 0, 0)
        dq[rows, head] = a @ finite_keys
        dk.addmm_(a.T, _finite(q))


def _finite(tensor: Tensor) -> Tensor:
    """0 in place of NaN and infinity."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _results(q_index: Tensor, k_index: Tensor, weights: Tensor, *others: Any) -> list[Tensor]:
    """The loss and the gradients, without values; the latter are empty if none is wanted."""
    shapes = [(), *(x.shape if others[-1] else (0,) for x in (q_index, k_index, weights))]
    return [q_index.new_empty(shape, dtype=sum_dtype(q_index.dtype)) for shape in shapes]


class _Gradients(torch.autograd.Function):
    """The gradients that the forward left behind, as functions of the inputs without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(d_loss: Tensor, *inputs_and_gradients: Tensor) -> tuple[Tensor, ...]:
        half = len(inputs_and_gradients) // 2
        pairs = zip(inputs_and_gradients[:half], inputs_and_gradients[half:], strict=True)
        return tuple((d_loss * gradient).to(x.dtype) for x, gradient in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Any:
        raise DoubleBackwardError(
            "indexer_kl_loss_dense: no gradient of a gradient is available; its backward cannot "
            "be differentiated (create_graph=True)"
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    apply: Any = _Gradients.apply
    return *apply(d_loss, *ctx.saved_tensors), *[None] * 9


def _wanting(arguments: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a call that is recorded; outer transforms may want gradients, too."""
    *given, wants = arguments
    return *given, wants or any(x.requires_grad for x in given[:3])


def loss_and_gradients(*arguments: Any) -> list[Tensor]:
    """The loss, and the gradients of the first three arguments, in the sums' dtype: 16 bits would
    not hold them before a loss scale does its work. The arguments are those of `_dense_kl`."""
    *given, wants = arguments
    problem, inputs = _Problem(*given), given[:3]
    dtype = sum_dtype(problem.q.dtype)
    sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs] if wants else []
    loss = torch.zeros((), dtype=torch.float64, device=problem.q.device)
    for rows in problem.chunks():
        visible = problem.visible(rows)
        p, scores = problem.target(rows, visible), problem.scores(rows, visible)
        total = p.sum(1, dtype=torch.float64)
        counts = (total != 0) & visible.any(1)
        weight = torch.full_like(total, 1 / len(problem.q))
        if problem.row_weight is not None:
            weight = problem.row_weight[rows].double()
        weight = weight.masked_fill(~counts, 0)
        hidden = ~visible | (weight == 0)[:, None]
        p /= total[:, None].masked_fill(~counts[:, None], 1).to(dtype)
        log_prediction = scores.log_softmax(1).masked_fill_(~visible, 0)
        terms = torch.special.xlogy(p, p).sub_(p * log_prediction).masked_fill_(hidden, 0)
        loss += (terms.sum(1, dtype=torch.float64) * weight).sum()
        if wants:
            g = log_prediction.exp_().sub_(p).mul_(weight[:, None].to(dtype))
            _gradients(problem, rows, g.masked_fill_(hidden, 0), hidden, sums)
    return [loss.to(dtype), *(sums if wants else _results(*arguments)[1:])]


_dense_kl = opaque(
    "indexer_kl_loss_dense(Tensor q_index, Tensor k_index, Tensor weights, Tensor q, Tensor k, "
    "Tensor lse, Tensor key_end, Tensor? key_start, Tensor? row_weight, float sm_scale, "
    "SymInt chunk_bytes, bool wants) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_results,
    gradient=(_keep, _backward, _wanting),
)(loss_and_gradients)
