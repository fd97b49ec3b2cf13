"""Checks of compressed entries, and of the rotation of last columns."""

from __future__ import annotations

from functools import partial

import torch

import flashdsa
from flashdsa.verify import judge_entries
from flashdsa.verify.check_list import Check, each
from flashdsa.verify.entries_cases import ENTRIES_CASES, EntriesInputs, make_entries_inputs


def checks(seed: int, backend: str, device: str) -> list[Check]:
    """Forward and backward of every case; the rotation in two dtypes."""
    runs = (
        ("compress_kv", _call, judge_entries.check_forward),
        ("compress_kv_bwd", _call_bwd, judge_entries.check_backward),
    )
    make = partial(make_entries_inputs, seed=seed, device=device)
    found = each(runs, ENTRIES_CASES, make, backend, lambda case: max(1, case.tokens) * case.d)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rotate = partial(judge_entries.check_rotation, dtype, seed, device)
        found.append(Check("rotate_tail", f"7 rows of 3 heads, {name}", rotate, rotate))
    return found


def _call(x: EntriesInputs, backend: str) -> object:
    """Call it without and with a state."""
    options = {"cu_seqlens": x.cu_seqlens, "backend": backend, **x.options}
    whole = flashdsa.compress_kv(*x.operands, **options)
    rows = x.case.ratio * (1 + x.case.overlap)
    options["state"] = x.kv.new_zeros(len(x.case.lengths), rows, 2, x.kv.shape[1])
    options["seen"] = torch.zeros_like(x.cu_seqlens[1:])
    return whole, flashdsa.compress_kv(*x.operands, **options)


def _call_bwd(x: EntriesInputs, backend: str) -> object:
    return flashdsa.compress_kv_bwd(
        x.kv, x.gate, x.grad_entries, x.ape, cu_seqlens=x.cu_seqlens, backend=backend, **x.options
    )
