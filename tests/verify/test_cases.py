"""The cases' inputs are what the cases say: names, poison, features, determinism."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.problem import INT32_MAX
from flashdsa.verify.check_list import OPERATIONS, checks_of
from flashdsa.verify.compare import Comparison, failures
from flashdsa.verify.draw_rows import INT32_MIN
from flashdsa.verify.indexer_cases import make_indexer_inputs
from flashdsa.verify.layouts import strided_copy
from flashdsa.verify.sparse_mla_cases import make_sparse_mla_inputs
from tests.support.cases import (
    INDEXER_CASES,
    INDEXER_TRAINING_CASES,
    PACKED_CASES,
    PREFILL_CASES,
    SPARSE_MLA_CASES,
)
from tests.support.elsewhere import DEVICE, Elsewhere, is_there


@pytest.mark.parametrize(
    "cases",
    [[*SPARSE_MLA_CASES, *PACKED_CASES], INDEXER_CASES, PREFILL_CASES, INDEXER_TRAINING_CASES],
    ids=["mla", "indexer", "prefill", "training"],
)
def test_names_are_unique(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)


def test_sparse_mla_inputs_keep_the_case_s_promise(subtests, seed):
    for case in SPARSE_MLA_CASES:
        with subtests.test(case.name):
            judge_sparse_mla_inputs(case, seed)


def judge_sparse_mla_inputs(case, seed):
    inputs = make_sparse_mla_inputs(case, seed)
    again = make_sparse_mla_inputs(case, seed)
    torch.testing.assert_close(inputs.kv, again.kv, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(inputs.q, again.q) and torch.equal(inputs.indices, again.indices)
    assert inputs.q.shape == (case.num_queries, case.num_heads, case.d_qk)
    assert inputs.do.shape == (case.num_queries, case.num_heads, case.d_v)
    assert inputs.q.dtype == inputs.kv.dtype == inputs.do.dtype == case.dtype
    assert inputs.kv.ndim == 2 + case.kv_3d
    if case.attn_sink == "infinite":
        assert {math.inf, -math.inf} <= set(inputs.attn_sink.tolist())
    blocks = case.index_block
    lists = [judge_list(case, inputs.kv, inputs.rows, inputs.topk_length, case.topk, blocks)]
    if case.extra_topk:
        extra = inputs.of_extra
        rows = extra["extra_kv"], extra["extra_indices"], extra["extra_topk_length"]
        lists.append(judge_list(case, *rows, case.extra_topk))
    if case.empty_rows:
        assert not any(named[0] for named in lists)
    if case.poison and case.ranges:
        assert any(not some and others for some, others in zip(*lists, strict=True))
    if case.strided:
        assert not inputs.q.is_contiguous() and inputs.q.stride(-1) == 1
    if case.logit_scale != 1.0 or case.logit_shift != 0.0:
        _, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, d_v=case.d_v)
        wanted = max(case.logit_scale, abs(case.logit_shift))
        assert 0.5 * wanted < lse.abs().max() < 2 * wanted


def judge_list(case, kv, ids, topk_length, topk, index_block=1):
    """The features of a source and its list; returns the rows that the list names."""
    num_keys = kv.shape[0] * (kv.shape[1] if case.page_size else 1)
    slots = reference.valid_slots(ids, num_keys, topk_length, index_block)
    named = [rows.tolist() for rows in slots]
    used = {row for rows in named for row in rows}
    if isinstance(ids, tuple):
        starts, ends = ids
        assert starts.dtype == ends.dtype == torch.int32
        lengths = {len(rows) for rows in named}
        assert {0, 1, 3} <= lengths and topk in lengths
        if case.invalid or case.empty_rows:
            assert (starts > ends).any() and starts.min() < 0
        elif not case.poison:
            assert ((starts < 0) & (ends > 0)).any() and (ends > num_keys).any()
        values = set()
    else:
        assert ids.dtype == torch.int32 and ids.shape[-1] == topk
        assert ids.ndim == 2 + case.indices_3d
        values, blocks = set(ids.flatten().tolist()), -(-num_keys // index_block)
        if case.invalid:
            assert {-1, blocks, INT32_MIN} <= values and {INT32_MAX, blocks + 7} & values
        if case.duplicates and topk > 1:
            assert any(len(set(rows)) < len(rows) for rows in named)
    if case.poison:
        finite = torch.isfinite(kv.reshape(num_keys, case.d_qk)).all(dim=1)
        assert set(finite.nonzero().flatten().tolist()) == used
        assert kv.isnan().any() and kv.isposinf().any() and kv.isneginf().any()
        if case.topk_length and values and index_block == 1:
            assert values & set((~finite).nonzero().flatten().tolist())
    return named


def test_indexer_inputs_keep_the_case_s_promise(subtests, seed):
    for case in INDEXER_CASES:
        with subtests.test(case.name):
            judge_indexer_inputs(case, seed)


def judge_indexer_inputs(case, seed):
    inputs = make_indexer_inputs(case, seed)
    assert inputs.q.shape == (len(case.seq_lens), case.num_heads, 128)
    assert inputs.q.dtype == torch.float8_e4m3fn
    assert inputs.seq_lens.tolist() == list(case.seq_lens)
    assert (inputs.output_buffer() == 0x7B7B7B7B).all()
    if not case.seq_lens:
        return
    size = case.table_page_size
    scores = reference.indexer_logits(*inputs.operands_of_rows, inputs.max_len, size)
    for b, length in enumerate(case.seq_lens):
        row = scores[b, :length]
        assert case.nan_keys or not row.isnan().any()
        assert row.isnan().any() or not case.nan_keys or length < 30
        if case.plateaus and length > 30:
            assert len(set(row[~row.isnan()].tolist())) <= 5 + case.repeated_pages
        if case.zero_scores:
            assert (row == 0).all()
            assert torch.signbit(row).any() and not torch.signbit(row).all()
        if case.repeated_pages and length > size:
            pages = inputs.block_table[b, : -(-length // size)].tolist()
            assert len(set(pages)) < len(pages)
        if case.one_sequence:
            used, widest = -(-length // size), case.seq_lens.index(max(case.seq_lens))
            assert torch.equal(inputs.block_table[b, :used], inputs.block_table[widest, :used])
        if case.seq_lens[b] % size:
            # The first token past the end would win, or lose, by a landslide if it were read.
            longer = torch.zeros_like(inputs.seq_lens)
            longer[b] = length + 1
            beyond = reference.indexer_logits(
                *inputs.operands[:3], longer, inputs.operands_of_rows[-1], length + 1, size
            )[b, length]
            shared = case.repeated_pages or case.one_sequence or case.next_n > 1
            assert shared or beyond.abs() > 1e3 * row[~row.isnan()].abs().max()
    if case.negative_weights and not case.zero_scores:
        assert (scores[torch.isfinite(scores)] < 0).any()


def test_a_strided_copy_has_the_values_amid_poison(seed):
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(seed))
    view = strided_copy(x)
    assert torch.equal(view, x) and not view.is_contiguous() and view.stride(-1) == 1
    around = view._base
    assert around is not None and int(around.isnan().sum()) == around.numel() - x.numel()


PACKAGE = Path(flashdsa.__file__).parent
FOLDERS = (PACKAGE / "verify", PACKAGE / "reference")
ON_THE_HOST = ("quant.py", "_cases.py")
"""Files that may take tensors to it: for exact bytes, and for what is drawn there."""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_judged_on_the_host(operation: str) -> None:
    verdicts: list[Comparison] = []
    with Elsewhere(*FOLDERS) as there:
        checks = [one for one in checks_of(0, "cpu", str(DEVICE)) if one.operation == operation]
        for check in checks[: -(-len(checks) // 3)]:  # the smaller ones
            verdicts += check.judge()
    assert verdicts and not failures(verdicts)
    assert [place for place in there.found if not any(one in place for one in ON_THE_HOST)] == []


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        (lambda x: x.cpu(), "moves to the host"),
        (lambda x: x.to("cpu", torch.float64), "moves to the host"),
        (lambda x: x.to(device="cpu"), "moves to the host"),
        (lambda x: x + torch.ones(3), "mixes devices"),
        (lambda x: torch.where(x > 0, x.double().sum(), torch.ones(3, device=x.device)), ""),
    ],
)
def test_the_host_is_noticed(wrong: Callable[[Tensor], Tensor], finding: str) -> None:
    with Elsewhere(Path(__file__)) as there:
        x = torch.ones(3).to(DEVICE)
        assert is_there(x) and x.device == DEVICE and not there.found
        wrong(x)
    assert len(there.found) == bool(finding) and all(one.endswith(finding) for one in there.found)
