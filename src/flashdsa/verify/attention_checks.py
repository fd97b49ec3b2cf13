"""Checks of sparse MLA: forward, backward, and both by autograd."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from flashdsa.verify import calls, judge_sparse_mla
from flashdsa.verify import check_cases as cases
from flashdsa.verify.check_list import Check, each
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """Those of the forward's lists of cases, then of the backward's own."""
    fresh = partial(make_sparse_mla_inputs, seed=seed, device=device)
    make = cache(fresh)
    forward = ("sparse_mla_fwd", calls.sparse_mla_fwd, judge_sparse_mla.check_forward)
    by_autograd = (
        ("sparse_mla", calls.sparse_mla, judge_sparse_mla.check_autograd),
        ("mla_bwd", _call_backward, judge_sparse_mla.check_backward),
    )
    into_buffers = (
        "sparse_mla_fwd_out",
        calls.sparse_mla_fwd_out,
        judge_sparse_mla.check_forward_out,
    )
    checks = [
        *each([forward], [*cases.ATTENTION, *cases.FORWARD], make, backend, _work),
        *each(by_autograd, cases.ATTENTION, make, backend, _work),
        *each([into_buffers], cases.INTO_BUFFERS, make, backend, _work),
    ]
    for case in cases.BACKWARD:
        options: dict[str, Any] = {"deterministic": case.deterministic, "dkv_dtype": case.dkv_dtype}
        call = partial(_call_backward, **options)
        judge = partial(judge_sparse_mla.check_backward, **options)
        checks += each([("mla_bwd", call, judge)], [case.attention], fresh, backend, _work)
    return checks


def _work(case: SparseMlaCase) -> int:
    return case.num_queries * case.num_heads * case.topk * case.d_qk


def _call_backward(inputs: SparseMlaInputs, backend: str, **options: Any) -> object:
    """Call the backward with O and lse of zeros."""
    O = torch.zeros_like(inputs.do)
    lse = O.new_zeros(O.shape[:2], dtype=judge_sparse_mla.accumulator_dtype(inputs))
    return calls.mla_bwd(inputs, O, lse, backend, **options)
