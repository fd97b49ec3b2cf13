"""Run sparse MLA's public operations on a backend and judge every output against the reference."""

import math
from functools import partial

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.verify import calls, tolerances
from flashdsa.verify.compare import Comparison, compare, compare_exact, compare_lse, judge_bias
from flashdsa.verify.sparse_mla_cases import SparseMlaInputs

PER_QUERY_AND_PER_HEAD = (1, 2)
"""Rows of O. Those of dQ are per query only: of a single head with a single key, dS is nothing but
the rounding of dP - delta, which |dP| + |delta| does not bound when dP itself cancels."""


def accumulator_dtype(inputs: SparseMlaInputs) -> torch.dtype:
    """The dtype of lse and dKV: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if inputs.case.dtype == torch.float64 else torch.float32


def empty_queries(inputs: SparseMlaInputs) -> Tensor:
    """Bool `[S]`: the queries without a valid slot."""
    x = inputs.joined
    named = reference.valid_slots(x.indices, x.num_keys, x.topk_length)
    return torch.tensor([not len(rows) for rows in named], dtype=torch.bool, device=x.q.device)


def unnamed_rows(inputs: SparseMlaInputs) -> Tensor:
    """Bool `[S_kv]`: the kv rows that no valid slot names."""
    named = reference.valid_slots(inputs.indices, inputs.num_keys, inputs.topk_length)
    unnamed = torch.ones(inputs.num_keys, dtype=torch.bool, device=inputs.q.device)
    for rows in named:
        unnamed[rows] = False
    return unnamed


def judge_forward(
    inputs: SparseMlaInputs,
    O: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
    *,
    operation: str = "sparse_mla_fwd",
    backend: str = "",
) -> list[Comparison]:
    """The verdicts on O `[S, H, d_v]`, lse `[S, H]` and max_logits, if given and the case's.

    Args:
        backend: whose results they are; "": one that adds up in fp32 as IEEE 754 says.
    """
    inputs = inputs.joined
    case = inputs.case
    operands = (inputs.q, inputs.kv, inputs.indices)
    options = {"d_v": case.d_v, **inputs.options}
    ref_O, ref_lse = reference.sparse_mla_fwd(*operands, **options)
    limits = tolerances.tolerance(operation, "O", case.dtype)
    lse_limits = tolerances.tolerance("sparse_mla_fwd", "lse", case.dtype)
    assert lse_limits.absolute is not None and lse_limits.relative is not None
    cut = _cut(case.d_qk) if backend in tolerances.WGMMA_SUMS else 0.0
    of_lse = partial(
        compare_lse,
        absolute=lse_limits.absolute,
        relative=lse_limits.relative + cut,
        dtype=accumulator_dtype(inputs),
    )
    rounding, besides = None, None
    if backend in tolerances.F16_ROWS and case.packed == "fp32":
        spreads = reference.sparse_mla_spread(*operands, **options)
        rounding, besides = (tolerances.F16_ROUNDING * spread for spread in spreads)
    magnitude, _ = reference.sparse_mla_fwd(*operands, absolute=True, **options)
    verdict = compare(
        "O",
        O,
        ref_O,
        norm_tolerance=limits.norm if case.judges_norms else None,
        magnitude=magnitude,
        rounding=rounding,
        row_ndims=PER_QUERY_AND_PER_HEAD,
        zero_rows=empty_queries(inputs),
        dtype=case.dtype,
    )
    verdicts = [
        judge_bias(
            verdict,
            O,
            ref_O,
            magnitude,
            limit=bias_limit(ref_lse, lse_limits.relative + cut),
            row_ndims=PER_QUERY_AND_PER_HEAD,
            rounding=rounding,
        ),
        of_lse("lse", lse, ref_lse, besides=besides),
    ]
    if case.max_logits and max_logits is not None:
        largest = reference.sparse_mla_max_logits(
            *operands, sm_scale=case.sm_scale, topk_length=inputs.topk_length
        )
        verdicts.append(of_lse("max_logits", max_logits, largest))
    return verdicts


def _cut(d_qk: int) -> float:
    """Share of a logit that tensor cores may cut off."""
    return tolerances.WGMMA_CUT * math.ceil(d_qk / tolerances.WGMMA_K)


def bias_limit(lse: Tensor, relative: float) -> float:
    """Return the bias limit of a row of O, dQ or dKV if logits may be off by `relative` of their
    size."""
    finite = lse[lse.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return tolerances.BIAS_TOLERANCE + relative * largest


def forward_results(inputs: SparseMlaInputs) -> tuple[Tensor, Tensor]:
    """O and lse as a right forward would hand them to the backward: the reference's, rounded.

    If the case poisons or has empty queries, O of its empty queries is NaN, which no gradient may
    show.
    """
    x = inputs.joined
    O, lse = reference.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.case.d_v, **x.options)
    O, lse = O.to(inputs.case.dtype), lse.to(accumulator_dtype(inputs))
    if inputs.case.empty_rows or inputs.case.poison:
        O[empty_queries(inputs)] = torch.nan
    return inputs.lay_out(O), inputs.lay_out(lse)


def _dkv_roundings(
    call: reference.MlaBackward, dKV: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return how far P and dS in bf16 may move each row, and change its length, by dKV's name."""
    spread = tolerances.BF16_ROUNDING * call.dkv_spread()
    along = tolerances.along_limit(*call.dkv_along(dKV))
    rows = dKV.flatten(1)
    norms = rows.norm(dim=1)
    own_along = tolerances.along_limit(
        norms, (rows**2).norm(dim=1) / norms.masked_fill(norms == 0, 1)
    )
    own = tolerances.BF16_HALF_ULP * norms
    in_bf16 = ("dKV:bf16", "kv.grad")
    return (
        {"dKV": spread, **dict.fromkeys(in_bf16, spread + own)},
        {"dKV": along, **dict.fromkeys(in_bf16, along + own_along)},
    )


def _joined_gradients(inputs: SparseMlaInputs, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients with those of extra_kv's rows below those of kv's."""
    if inputs.joined is inputs:
        return gradients
    of_extra = ("dextra_kv", "extra_kv.grad")
    sources = [name for name in gradients if name in ("dKV", "dKV:bf16", "kv.grad", *of_extra)]
    rows = [gradients[name].flatten(0, -2) for name in sources]
    others = {name: x for name, x in gradients.items() if name not in of_extra}
    return {**others, sources[0]: torch.cat(rows)}


def judge_backward(
    inputs: SparseMlaInputs,
    O: Tensor,
    lse: Tensor,
    gradients: dict[str, Tensor],
    operation: str = "mla_bwd",
    *,
    bf16_operands: bool = False,
) -> list[Comparison]:
    """The verdicts on gradients named as in the tolerance table, given O and lse.

    The names are dQ, dKV (or "dKV:bf16"), dextra_kv, d_sink; or q.grad, kv.grad, extra_kv.grad,
    attn_sink.grad. Rows of both sources are judged as one gradient.
    bf16_operands: P and dS went to a tensor core in bf16; see `tolerances`.
    """
    gradients = _joined_gradients(inputs, gradients)
    inputs = inputs.joined
    case = inputs.case
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    ref_dQ, ref_dKV, ref_d_sink = reference.mla_bwd(*operands, **inputs.options)
    call = reference.MlaBackward(*operands, **inputs.options)
    dQ_size, dKV_size = call.magnitude()
    d_kv_dtype = accumulator_dtype(inputs)
    rounds = bf16_operands and case.dtype == torch.bfloat16
    rounded, along = _dkv_roundings(call, ref_dKV) if rounds else ({}, {})
    lse_relative = tolerances.tolerance("sparse_mla_fwd", "lse", case.dtype).relative
    assert lse_relative is not None
    longest = bias_limit(lse, lse_relative + (_cut(case.d_qk) if bf16_operands else 0.0))
    verdicts = []
    for name, gradient in gradients.items():
        limits = tolerances.tolerance(operation, name, case.dtype)
        norm = limits.norm if case.judges_norms else None
        judge = partial(compare, name, gradient)
        if name in ("dQ", "q.grad"):
            if rounds and norm is not None:
                norm = tolerances.dq_limit(norm, float(ref_dQ.norm()), call.dq_rounding())
            rules = partial(judge, magnitude=dQ_size, zero_rows=empty_queries(inputs))
            verdict = rules(ref_dQ, norm_tolerance=norm, dtype=case.dtype)
            # Norms are judged: a single head's row does not cancel unless its query has one key.
            ndims = PER_QUERY_AND_PER_HEAD if case.judges_norms else (1,)
            verdict = judge_bias(verdict, gradient, ref_dQ, dQ_size, limit=longest, row_ndims=ndims)
        elif name in ("dKV", "dKV:bf16", "kv.grad"):
            dtypes = {"dKV": d_kv_dtype, "dKV:bf16": torch.bfloat16, "kv.grad": case.dtype}
            rules = partial(judge, magnitude=dKV_size, zero_rows=unnamed_rows(inputs))
            rules = partial(rules, norm_tolerance=norm, dtype=dtypes[name])
            verdict = rules(ref_dKV, rounding=rounded.get(name))
            verdict = judge_bias(
                verdict, gradient, ref_dKV, dKV_size, limit=longest, rounding=along.get(name)
            )
        else:
            assert ref_d_sink is not None
            size = call.sink_magnitude()
            verdict = judge(ref_d_sink, norm_tolerance=norm, magnitude=size, dtype=torch.float32)
        verdicts.append(verdict)
    return verdicts


def check_forward(inputs: SparseMlaInputs, backend: str) -> list[Comparison]:
    """Run and judge `sparse_mla_fwd`."""
    results = calls.sparse_mla_fwd(inputs, backend)
    assert len(results) == 2 + inputs.case.max_logits
    return judge_forward(inputs, *results, backend=backend)


def check_forward_out(inputs: SparseMlaInputs, backend: str) -> list[Comparison]:
    """Run and judge the forward into the caller's buffers: the bits of `sparse_mla_fwd`."""
    results = calls.sparse_mla_fwd(inputs, backend)
    names = ("O", "lse", "max_logits")
    return [
        compare_exact(f"{name}, {form}", one, result)
        for form, written in calls.sparse_mla_fwd_out(inputs, backend).items()
        for name, one, result in zip(names, written, results, strict=False)
    ]


def check_backward(
    inputs: SparseMlaInputs,
    backend: str,
    *,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
) -> list[Comparison]:
    """Run and judge `mla_bwd` on the reference's O and lse."""
    O, lse = forward_results(inputs)
    results = calls.mla_bwd(
        inputs, O, lse, backend, deterministic=deterministic, dkv_dtype=dkv_dtype
    )
    of_extra = ["dextra_kv"] if inputs.of_extra else []
    names = ["dQ", "dKV:bf16" if dkv_dtype == torch.bfloat16 else "dKV", *of_extra, "d_sink"]
    gradients = dict(zip(names, results, strict=False))
    return judge_backward(
        inputs, O, lse, gradients, bf16_operands=backend in tolerances.BF16_OPERANDS
    )


def check_autograd(inputs: SparseMlaInputs, backend: str) -> list[Comparison]:
    """Run and judge `sparse_mla`: O, and the gradients of `sum(O * dO)` in the inputs' dtypes."""
    O, gradients = calls.sparse_mla(inputs, backend)
    # The backward got the forward's own lse, which sparse_mla does not return; the forward is
    # bit-identical from run to run.
    _, lse = calls.sparse_mla_fwd(inputs, backend, with_max_logits=False)
    verdicts = judge_forward(inputs, O, lse, operation="sparse_mla")[:1]
    rounds = backend in tolerances.BF16_OPERANDS
    verdicts += judge_backward(inputs, O, lse, gradients, "sparse_mla", bf16_operands=rounds)
    if not inputs.case.from_exact_o:
        return verdicts
    return verdicts + judge_chain(inputs, gradients["q.grad"], gradients["kv.grad"])


def judge_chain(inputs: SparseMlaInputs, q_grad: Tensor, kv_grad: Tensor) -> list[Comparison]:
    """The verdicts on gradients against float64 from the unrounded O, by their norms alone.

    The backward gets O in the inputs' dtype, and `delta = sum_d O dO` has that rounding. P (dP -
    delta) cancels for large logits, and the rest has much of it.
    """
    x, options = inputs, inputs.options
    O, lse = reference.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.case.d_v, **options)
    of_q, of_kv, *_ = reference.mla_bwd(x.q, x.kv, x.do, lse, O, x.indices, **options)
    judge = partial(compare, norm_tolerance=tolerances.CHAIN_TOLERANCE, row_tolerance=None)
    return [judge("q.grad, exact O", q_grad, of_q), judge("kv.grad, exact O", kv_grad, of_kv)]
