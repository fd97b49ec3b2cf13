"""The Hopper kernels of compressed entries on ptxemu: every element, without a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import entries as sm90
from flashdsa.kernels.entries.sm90.plan import CompressPlan
from flashdsa.ops.entries import CompressKvOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.entries_cases import EntriesCase, make_entries_inputs
from flashdsa.verify.judge_entries import check_forward, judge_backward

CASES = [
    # 21 entries: more than CTAs of the backward on the small device.
    EntriesCase("CSA, 5 sequences", (9, 3, 0, 17, 60), 4, overlap=True),
    EntriesCase(
        "CSA index keys, rows apart", (30, 7), 4, 128, overlap=True, strided=True, own_dtype=True
    ),
    EntriesCase("HCA", (128, 200), 128),
    EntriesCase("V4.1", (7, 1, 16), 2, ape=False),
    EntriesCase("pools of 4", (6, 33), 4, 128, norm=False, rotated=0, strided=True),
]
PADDED = [
    EntriesCase("CSA, 2 documents", (9, 17), 4, overlap=True, padding=70),
    EntriesCase("CSA index keys, one document", (22,), 4, 128, overlap=True, padding=30),
    EntriesCase("HCA, one document", (140,), 128, padding=130),
    EntriesCase("V4.1, one document", (7,), 2, ape=False, padding=9),
    EntriesCase("pools of 4, one document", (33,), 4, 128, norm=False, rotated=0, padding=31),
    EntriesCase("pools of 4, no token", (0, 0), 4, 128, norm=False, rotated=0, padding=9),
]
"""Packed batches that are padded: one sequence, whose entries no launch counts, and several."""
PLANS = ["4_overlap_512_ape_finished", "4_overlap_128_ape_finished", "128_512_ape_finished",
         "2_512_finished", "4_128_ape"]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if "index keys" in case.name else (), id=case.name
        )
        for case in (*CASES, *PADDED)
    ],
)
def test_entries_and_gradients_are_the_references(case: EntriesCase) -> None:
    """Whole, and in chunks with a state, bit for bit."""
    x = make_entries_inputs(case, 0)
    options = {"cu_seqlens": x.cu_seqlens, "backend": "emulate-sm90", **x.options}
    with emulation(SMALL, on_finding="collect") as emulator:
        verdicts = check_forward(x, "emulate-sm90")
        gradients = flashdsa.compress_kv_bwd(x.kv, x.gate, x.grad_entries, x.ape, **options)
    assert failures([*verdicts, *judge_backward(x, gradients)]) == []
    assert [str(finding) for finding in emulator.findings] == []


def operands(case: EntriesCase) -> CompressKvOperands:
    x = make_entries_inputs(case, 0)
    rotation = x.rotation or (None, None)
    return CompressKvOperands(x.kv, x.gate, x.cu_seqlens, x.ape, x.norm_weight, *rotation)


def test_calls_of_the_models_sizes_take_a_kernel_and_others_torch() -> None:
    found = [sm90._plan(operands(case), case.ratio, case.overlap) for case in CASES]
    assert [plan and plan.name for plan in found] == [f"compress_kv_{name}" for name in PLANS]
    others = [
        replace(CASES[0], dtype=torch.float32),
        replace(CASES[0], ape=False),
        replace(CASES[0], norm=False),
        replace(CASES[0], rotated=32),
        replace(CASES[0], d=128, ratio=8),
        replace(CASES[4], rotated=64),
    ]
    assert [sm90._plan(operands(case), case.ratio, case.overlap) for case in others] == [None] * 6


def test_tokens_that_were_seen_do_not_wrap_around() -> None:
    """Two sequences of 9 tokens, of which the second one follows as many as int32 counts."""
    x = operands(replace(CASES[0], lengths=(9, 9)))
    seen = torch.tensor([3, 2**31 - 1], dtype=torch.int32)
    ends = sm90._arguments(x._replace(seen=seen), CompressPlan(state=True))[3]
    assert ends is not None and ends.tolist() == [3, 3 + 3]
