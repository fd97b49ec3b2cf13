"""Sparse MLA attention, forward and backward, in float64: one query at a time, by the formulas.

Shapes: S queries, S_kv keys, H heads, topk slots per query.  V is the first d_v columns of kv.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.reference.packed_kv import is_packed, unpack_kv
from flashdsa.reference.quant import f64, full

__all__ = [
    "MlaBackward",
    "join_sources",
    "merge_attention",
    "mla_bwd",
    "num_rows",
    "sparse_mla_fwd",
    "sparse_mla_max_logits",
    "sparse_mla_spread",
    "valid_slots",
]


Rows = Tensor | tuple[Tensor, Tensor]
"""Ids `[S, topk]` or `[S, 1, topk]`, or the starts and ends `[S]` of ranges."""


def valid_slots(
    indices: Rows, num_keys: int, topk_length: Tensor | None = None, index_block: int = 1
) -> list[Tensor]:
    """The kv rows that each query's valid slots name, in slot order, with repetitions: int64 `[n]`.

    An id names `index_block` rows; `topk_length` `[S]` or None counts ids.
    """
    if isinstance(indices, tuple):
        bounds = zip(*(x.clamp(0, num_keys).tolist() for x in indices), strict=True)
        device = indices[0].device
        return [torch.arange(start, max(start, end), device=device) for start, end in bounds]
    ids = indices.detach().reshape(indices.shape[0], indices.shape[-1]).long()
    valid = (ids >= 0) & (ids < -(-num_keys // index_block))
    if topk_length is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device) < topk_length.long()[:, None]
    inside = torch.arange(index_block, device=ids.device)
    rows = (torch.where(valid, ids, 0)[..., None] * index_block + inside).flatten(1)
    valid = valid.repeat_interleave(index_block, dim=1) & (rows < num_keys)
    return list(rows[valid].split(valid.sum(dim=1).tolist()))


def join_sources(
    kv: Tensor,
    indices: Rows,
    *,
    topk_length: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Rows | None = None,
    extra_topk_length: Tensor | None = None,
    index_block: int = 1,
) -> tuple[Tensor, Tensor]:
    """One source and one list of ids that mean the same, for the functions below.

    -> the rows of kv and, after them, those of extra_kv; int32 `[S, most]`, the rows that the valid
    slots of both lists name, then -1.
    """
    rows = kv.reshape(num_rows(kv), kv.shape[-1])
    named = valid_slots(indices, len(rows), topk_length, index_block)
    if extra_kv is not None:
        assert extra_indices is not None
        extra = extra_kv.reshape(num_rows(extra_kv), extra_kv.shape[-1])
        of_extra = valid_slots(extra_indices, len(extra), extra_topk_length)
        both = zip(named, of_extra, strict=True)
        named = [torch.cat([mine, len(rows) + others]) for mine, others in both]
        rows = torch.cat([rows, extra])
    most = max([1, *map(len, named)])
    ids = torch.full((len(named), most), -1, dtype=torch.int32, device=kv.device)
    for of_query, found in zip(ids, named, strict=True):
        of_query[: len(found)] = found
    return rows, ids


def num_rows(kv: Tensor) -> int:
    """S_kv of a kv `[S_kv, d]` or `[S_kv, 1, d]`, or the rows of all pages."""
    return kv[..., 0].numel()


def _named_rows(kv: Tensor, rows: Tensor) -> Tensor:
    """The named rows of kv, of any leading dimensions, as float64 `[len(rows), d]`.

    Packed rows of 656 bytes are `e4m3 * scale` and the RoPE columns.
    """
    # Selects before converting, so that a kv of many gigabytes costs only the rows named.
    flat = kv.detach().reshape(num_rows(kv), kv.shape[-1])
    named = flat[rows]
    return unpack_kv(named) if is_packed(kv) else f64(named)


def _scale(q: Tensor, sm_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if sm_scale is None else float(sm_scale)


def sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = 512,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    absolute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the kv rows that its slots name.

    q `[S, H, d]`, kv `[S_kv, d]` or `[S_kv, 1, d]`, pages `[num_pages, page_size, d]`, or packed
    rows with 656 bytes in place of d; indices `[S, topk]` or `[S, 1, topk]`
    -> O `[S, H, d_v]`, lse `[S, H]` (natural logarithm, without the sink), both float64.
    `absolute`: P @ |V| in place of O, the size of what is summed into it, whatever cancels.
    """
    scale = _scale(q, sm_scale)
    q64 = f64(q)
    out, lse = full(q, (*q.shape[:2], d_v)), full(q, q.shape[:2], torch.inf)
    for s, rows in enumerate(valid_slots(indices, num_rows(kv), topk_length)):
        if not len(rows):
            continue  # no valid slot: O = 0, lse = +inf
        keys = _named_rows(kv, rows)
        values = keys[:, :d_v].abs() if absolute else keys[:, :d_v]
        logits = scale * (q64[s] @ keys.T)
        lse[s] = torch.logsumexp(logits, dim=-1)
        out[s] = torch.softmax(logits, dim=-1) @ values
        if attn_sink is not None:
            # exp(lse) / (exp(lse) + exp(sink)), with neither exponential overflowing
            out[s] *= torch.sigmoid(lse[s] - f64(attn_sink))[:, None]
    return out, lse


def sparse_mla_max_logits(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
) -> Tensor:
    """`[S, H]` float64: the largest logit over each query's valid slots, -inf where it has none."""
    scale = _scale(q, sm_scale)
    q64 = f64(q)
    largest = full(q, q.shape[:2], -torch.inf)
    for s, rows in enumerate(valid_slots(indices, num_rows(kv), topk_length)):
        if len(rows):
            largest[s] = (scale * (q64[s] @ _named_rows(kv, rows).T)).amax(dim=-1)
    return largest


def sparse_mla_spread(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = 512,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`[S, H]` float64 each, of each row of O and of lse: the root of the sum of squares of what
    elements of kv move, as values and by their keys' logits. A logit moves by the root of the sum
    of squares of its products and, if a scale is rounded, of itself.

    Relative errors of rms r in the elements move the row and lse by no more than r times this.
    """
    scale, q64 = _scale(q, sm_scale), f64(q)
    of_o, of_lse = full(q, q.shape[:2]), full(q, q.shape[:2])
    for s, rows in enumerate(valid_slots(indices, num_rows(kv), topk_length)):
        if not len(rows):
            continue
        named, times = rows.unique(return_counts=True)
        keys = _named_rows(kv, named)
        values, logits = keys[:, :d_v], scale * (q64[s] @ keys.T)
        counted = logits + f64(times).log()
        p = torch.softmax(counted, dim=-1)
        off = logits.square() + scale**2 * (q64[s].square() @ keys.square().T)
        of_lse[s] = (p.square() * off).sum(dim=-1).sqrt()
        if attn_sink is not None:
            p *= torch.sigmoid(counted.logsumexp(dim=-1) - f64(attn_sink))[:, None]
        O, sizes = p @ values, values.square().sum(dim=-1)
        away = sizes - 2 * O @ values.T + O.square().sum(dim=-1, keepdim=True)  # ||v - O||^2
        of_o[s] = (p.square() * (off * away.clamp(min=0) + sizes)).sum(dim=-1).sqrt()
    return of_o, of_lse


class _Query(NamedTuple):
    """Values for the backward of one query; `n` is its number of valid slots."""

    s: int
    rows: Tensor  # [n] int64, the kv rows named
    keys: Tensor  # [n, d]
    q: Tensor  # [H, d]
    do: Tensor  # [H, d_v]
    p: Tensor  # [H, n], with the sink in the denominator
    dp: Tensor  # [H, n] = dO @ V^T
    delta: Tensor  # [H] = sum_d O * dO
    ds: Tensor  # [H, n] = P * (dP - delta) * sm_scale
    sink_share: Tensor  # [H] = exp(sink - logaddexp(lse, sink)), 0 without a finite sink


class MlaBackward(NamedTuple):
    """Operands of `mla_bwd`, and the sizes of what it sums."""

    q: Tensor
    kv: Tensor
    dO: Tensor
    lse: Tensor
    O: Tensor
    indices: Tensor
    sm_scale: float | None = None
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None

    def queries(self) -> Iterator[_Query]:
        """The queries that have a valid slot; the others contribute nothing to any gradient."""
        kv, dO, scale = self.kv, self.dO, _scale(self.q, self.sm_scale)
        q64, dO64, lse64, O64 = (f64(x) for x in (self.q, dO, self.lse, self.O))
        for s, rows in enumerate(valid_slots(self.indices, num_rows(kv), self.topk_length)):
            if not len(rows):
                continue
            keys = _named_rows(kv, rows)
            log_total, sink_share = lse64[s], torch.zeros_like(lse64[s])
            if self.attn_sink is not None:
                sink = f64(self.attn_sink)
                log_total = torch.logaddexp(lse64[s], sink)
                # An infinite sink has no gradient: it takes nothing (-inf) or everything (+inf,
                # O = 0).
                share = torch.exp(sink - log_total)
                sink_share = torch.where(torch.isfinite(sink), share, sink_share)
            p = torch.exp(scale * (q64[s] @ keys.T) - log_total[:, None])
            dp, delta = dO64[s] @ keys[:, : dO.shape[-1]].T, (O64[s] * dO64[s]).sum(dim=-1)
            yield _Query(
                s=s,
                rows=rows,
                keys=keys,
                q=q64[s],
                do=dO64[s],
                p=p,
                dp=dp,
                delta=delta,
                ds=p * (dp - delta[:, None]) * scale,
                sink_share=sink_share,
            )

    def magnitude(self) -> tuple[Tensor, Tensor]:
        """The size of what is summed into dQ and dKV: dS is `P * (|dP| + |delta|) * |sm_scale|`.

        All operands are absolute.  -> dQ_mag `[S, H, d]`, dKV_mag in kv's shape, float64.
        """
        scale, kv, d_v = abs(_scale(self.q, self.sm_scale)), self.kv, self.dO.shape[-1]
        dQ, dKV = full(self.q, self.q.shape), full(kv, (kv.shape[0], kv.shape[-1]))
        for one in self.queries():
            ds = one.p * (one.dp.abs() + one.delta.abs()[:, None]) * scale
            dQ[one.s] = ds @ one.keys.abs()
            dKV.index_add_(0, one.rows, ds.T @ one.q.abs())
            dKV[:, :d_v].index_add_(0, one.rows, one.p.T @ one.do.abs())
        return dQ, dKV.reshape(kv.shape)

    def sink_magnitude(self) -> Tensor:
        """`[H]` float64: `sum_s share * sum_d |O * dO|`, the size of what is summed into d_sink."""
        size = full(self.q, self.q.shape[1:2])
        O64 = f64(self.O)
        for one in self.queries():
            size += one.sink_share * (O64[one.s] * one.do).abs().sum(dim=-1)
        return size

    def dkv_spread(self) -> Tensor:
        """`[S_kv]` float64: of each dKV row the root of the sum of squares of what is summed into
        it.

        Independent relative errors of rms r in every P and dS move the row by r times this.
        """
        squares = full(self.kv, self.kv.shape[:1])
        for one in self.queries():
            squares.index_add_(0, one.rows, (one.ds**2).T @ (one.q**2).sum(dim=-1))
            squares.index_add_(0, one.rows, (one.p**2).T @ (one.do**2).sum(dim=-1))
        return squares.sqrt()

    def dkv_along(self, dKV: Tensor) -> tuple[Tensor, Tensor]:
        """`[S_kv]` float64 each, of the parts along a dKV row of the terms `dS q` and `P dO` summed
        into it: the sum of their sizes, and the root of the sum of their squares.

        Slots of a query that name the same key have the same P and dS: one term each.
        """
        rows, d_v = dKV.reshape(num_rows(self.kv), self.kv.shape[-1]), self.dO.shape[-1]
        norms = rows.norm(dim=-1)
        unit = rows / norms.masked_fill(norms == 0, 1)[:, None]
        total, squares = torch.zeros_like(norms), torch.zeros_like(norms)
        for one in self.queries():
            named, first, times = one.rows.unique(return_inverse=True, return_counts=True)
            slot = torch.zeros_like(named)
            slot[first] = torch.arange(len(first), device=first.device)
            for weight, operand, width in ((one.ds, one.q, unit.shape[1]), (one.p, one.do, d_v)):
                parts = weight[:, slot] * times * (operand @ unit[named, :width].T)
                total[named] += parts.abs().sum(dim=0)
                squares[named] += parts.square().sum(dim=0)
        return total, squares.sqrt()

    def dq_rounding(self) -> tuple[float, float]:
        """The effect of independent relative errors of rms 1 in every dS on `||dQ error||^2`.

        Slots of a query that name the same key have the same dS, hence the same error.

        -> its mean `sum |dS k|^2`, and no less than its standard deviation,
        `sqrt(2 sum_ij (dS_i k_i . dS_j k_j)^2)` over the keys of each query and head.
        """
        mean = variance = 0.0
        for one in self.queries():
            _, first, times = one.rows.unique(return_inverse=True, return_counts=True)
            keys = one.keys.new_zeros(len(times), one.keys.shape[1]).index_copy_(0, first, one.keys)
            ds = one.ds
            squares = ds.new_zeros(len(ds), len(times)).index_add_(1, first, ds).square()
            gram = keys @ keys.T
            mean += float((squares @ gram.diagonal()).sum())
            variance += 2 * float((squares @ gram.square() * squares).sum())
        return mean, variance**0.5


def mla_bwd(
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients, from the O `[S, H, d_v]` and lse `[S, H]` that are GIVEN, not recomputed.

    -> dQ `[S, H, d]`, dKV in kv's shape, d_sink `[H]` (None without a sink), all float64.
    """
    d_v = dO.shape[-1]
    dQ, dKV = full(q, q.shape), full(kv, (kv.shape[0], kv.shape[-1]))
    d_sink = full(q, q.shape[1:2])
    call = MlaBackward(q, kv, dO, lse, O, indices, sm_scale, topk_length, attn_sink)
    for one in call.queries():
        dQ[one.s] = one.ds @ one.keys
        # index_add_ adds a row once for every slot that names it
        dKV.index_add_(0, one.rows, one.ds.T @ one.q)
        dKV[:, :d_v].index_add_(0, one.rows, one.p.T @ one.do)
        d_sink -= one.sink_share * one.delta
    return dQ, dKV.reshape(kv.shape), None if attn_sink is None else d_sink


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """O `[S, H, d_v]` and lse `[S, H]` of P parts of such shapes, both float64.

    `lse = log sum_p exp(lse_p)`, `O = sum_p exp(lse_p - lse) O_p` over the parts that have a key:
    an lse of +inf says that a part has none. If there is no part, O = 0 and lse = +inf.
    """
    parts = [(f64(out), f64(lse)) for out, lse in zip(outs, lses, strict=True)]
    O, total = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], torch.inf)
    for s in range(O.shape[0]):
        for h in range(O.shape[1]):
            own = [(out[s, h], lse[s, h]) for out, lse in parts if lse[s, h] != torch.inf]
            if own:
                total[s, h] = torch.logsumexp(torch.stack([lse for _, lse in own]), dim=0)
                O[s, h] = sum(((lse - total[s, h]).exp() * out for out, lse in own), start=O[s, h])
    return O, total
