"""Checks of sparse MLA: forward, backward, and both by autograd."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from flashdsa.verify import calls, judge_sparse_mla
from flashdsa.verify import check_cases as cases
from flashdsa.verify.check_list import Check
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """Those of the forward's lists of cases, then of the backward's own."""
    return [*_forward_and_autograd(seed, backend, device), *_backward_alone(seed, backend, device)]


def _work(case: SparseMlaCase) -> int:
    return case.num_queries * case.num_heads * case.topk * case.d_qk


def _forward_and_autograd(seed: int, backend: str, device: str) -> list[Check]:
    runs: tuple[tuple[str, Any, Any, list[SparseMlaCase]], ...] = (
        ("sparse_mla_fwd", calls.sparse_mla_fwd, judge_sparse_mla.check_forward, cases.FORWARD),
        ("sparse_mla", calls.sparse_mla, judge_sparse_mla.check_autograd, []),
        ("mla_bwd", _call_backward, judge_sparse_mla.check_backward, []),
    )
    into_buffers = calls.sparse_mla_fwd_out, judge_sparse_mla.check_forward_out
    rows: list[tuple[str, Any, Any, SparseMlaCase]] = [
        (name, call, check, case)
        for name, call, check, more in runs
        for case in [*cases.ATTENTION, *more]
    ]
    rows += [("sparse_mla_fwd_out", *into_buffers, case) for case in cases.INTO_BUFFERS]

    make = cache(partial(make_sparse_mla_inputs, seed=seed, device=device))

    def build(operation: str, call: Any, check: Any, case: SparseMlaCase) -> Check:
        return Check(
            operation,
            case.name,
            lambda: call(make(case), backend),
            lambda: check(make(case), backend),
            _work(case),
        )

    return [build(*row) for row in rows]


def _call_backward(inputs: SparseMlaInputs, backend: str, **options: Any) -> object:
    """Call the backward with O and lse of zeros."""
    O = torch.zeros_like(inputs.do)
    lse = O.new_zeros(O.shape[:2], dtype=judge_sparse_mla.accumulator_dtype(inputs))
    return calls.mla_bwd(inputs, O, lse, backend, **options)


def _backward_alone(seed: int, backend: str, device: str) -> list[Check]:
    def build(case: cases.Backward) -> Check:
        make = partial(make_sparse_mla_inputs, case.attention, seed, device)
        options: dict[str, Any] = {
            "deterministic": case.deterministic,
            "dkv_dtype": case.dkv_dtype,
        }
        return Check(
            "mla_bwd",
            case.attention.name,
            lambda: _call_backward(make(), backend, **options),
            lambda: judge_sparse_mla.check_backward(make(), backend, **options),
            _work(case.attention),
        )

    return [build(case) for case in cases.BACKWARD]
