"""Blocks and tokens among them by Hopper's kernels, emulated: what the CPU chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm90 import ranking, two_levels
from flashdsa.backends.sm90.ranking import bind_ranking
from flashdsa.kernels.indexer.sm90.rank.plan import Of
from flashdsa.ops.indexer import TopkIndexerOperands
from flashdsa.verify import calls
from flashdsa.verify.check_cases import PREFILL
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.judge_indexer import check_prefill_selection, check_selection
from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs
from workbench.small_calls.call import SmallCall, emulator_of
from workbench.small_calls.prefill import FURTHER_LEVELS, LEVELS

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

BACKEND = "emulate-sm90"
CASES = [
    IndexerCase("blocks", (300, 0, 65), 30, num_heads=16, block=8, plateaus=True, nan_keys=True),
    IndexerCase("sorted blocks, 2 queries", (200, 199, 64, 63), 7, num_heads=16, block=16, next_n=2,
                sorted=True),
    IndexerCase("candidates", (300, 5, 65), 70, num_heads=16, block=8, num_candidates=20,
                plateaus=True),
    IndexerCase("keys of 68 bytes", (300, 0, 70), 90, num_heads=16, mxfp4=True, sorted=True,
                nan_keys=True, int8_cache=True),
    IndexerCase("more candidates than both lists hold", (6_000,), 512, num_heads=16, block=2,
                num_candidates=4000),
]  # fmt: skip
FURTHER_CASES = [
    IndexerCase("blocks of keys of 68 bytes", (300, 65), 20, num_heads=16, block=8, mxfp4=True),
    IndexerCase("blocks of 4, the second row's page is full", (130, 64), 20, num_heads=16, block=4,
                nan_keys=True),
    IndexerCase("sorted positions of candidates", (300, 9), 40, num_heads=16, block=4,
                num_candidates=40, positions=True, sorted=True, nan_keys=True),
    IndexerCase("candidates of one position", (150,), 512, num_heads=16, num_candidates=90),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER_CASES)],
    ids=lambda case: case.name,
)
def test_pages(case: IndexerCase) -> None:
    inputs = make_indexer_inputs(case, seed=3)
    with emulation(SMALL):
        scores = calls.indexer_logits(inputs, BACKEND)
        assert failures(check_selection(inputs, scores, BACKEND)) == []


@pytest.mark.parametrize("name", ["blocks of 8, all from row 0", "candidates of 8, bf16"])
def test_shared_keys_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `flashdsa check`, with fewer keys and heads."""
    case = next(one for one in PREFILL if one.name == name)
    case = replace(case, ranges=(*causal(3, 300), *causal(4, 43, 300)), topk=30 + case.topk // 4)
    case = replace(case, num_heads=16)
    if case.no_starts:
        case = replace(case, ranges=causal(7, 343))
    monkeypatch.setattr(ranking, "SCORES_AT_ONCE", 1500)
    inputs = make_prefill_inputs(case, seed=4)
    with emulation(SMALL):
        scores = calls.prefill_logits(inputs, BACKEND)
        assert failures(check_prefill_selection(inputs, scores, BACKEND)) == []


@pytest.mark.parametrize(
    "call",
    [*LEVELS, *(pytest.param(call, marks=pytest.mark.slow) for call in FURTHER_LEVELS)],
    ids=lambda call: call.name,
)
def test_shared_keys(call: SmallCall) -> None:
    runner = emulator_of(call)
    assert failures(call.judge(runner)) == []
    assert runner.findings == []


def test_queries_whose_lists_name_few_keys_or_none() -> None:
    """No list of a tile reaches topk, one is empty, and one names blocks behind its range only."""
    ranges = (0, 0), (3, 90), (20, 200), (64, 230)
    case = PrefillCase("", ranges, 100, num_heads=16, dtype=torch.bfloat16, block=8)
    x = make_prefill_inputs(case, seed=8)
    lists = [[0, 1, 2], [2, 2, -1], [0, 22, 1], [21, 22, 2**31 - 1]]
    ids = x.output_buffer()
    given = {"block": 8, "candidates": torch.tensor(lists, dtype=torch.int32)}
    with emulation(SMALL) as runner:
        flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options, **given, backend=BACKEND)
    rows = [[], [*range(19, 27)], [*range(20, 36), *range(196, 200)], []]
    assert ids.tolist() == [row + [-1] * (100 - len(row)) for row in rows]
    assert runner.findings == []


def test_ctas_share_a_row_of_few_blocks() -> None:
    """Parts are made by the scores that are read: a row of 160 blocks is two CTAs'."""
    runner, block, score_bits = Emulator(SMALL), 64, 5
    scores = torch.randn(1, 160 << score_bits, generator=torch.manual_seed(9))
    ends = torch.tensor([160 * block - 3], dtype=torch.int32)
    no_ids, ids = torch.empty(1, 0, dtype=torch.int32), torch.full((1, 40), -99, dtype=torch.int32)
    empty, table = ends[:0], torch.empty(0, 0, dtype=torch.int32)
    rank = bind_ranking(runner, Of.BLOCKS, 1, 40)
    with runner.launching():
        rank(scores, empty, ends, table, 0, 0, no_ids, block.bit_length() - 1, score_bits, ids)
    best = scores.view(160, -1).amax(dim=1)
    best[-1] = torch.inf
    assert ids[0].tolist() == best.topk(40).indices.sort().values.tolist()
    assert runner.findings == []


def test_one_bound_function_serves_tables_of_any_width() -> None:
    runner = Emulator(SMALL)
    narrow, wide = (
        make_indexer_inputs(IndexerCase("", (length,), 20, num_heads=16, block=8), seed=7)
        for length in (100, 700)
    )
    options = {"sorted": False, "positions": False, "block": 8}
    operands = TopkIndexerOperands(*narrow.operands, narrow.output_buffer())
    serve = two_levels.bind(runner, operands, check=False, **options)
    ids, expected = wide.output_buffer(), wide.output_buffer()
    serve((*wide.operands, ids, None))
    flashdsa.dsa_topk_indexer(*wide.operands, expected, block=8, backend="cpu")
    assert torch.equal(ids, expected)


def test_tokens_of_bad_pages_are_never_chosen() -> None:
    inputs = make_indexer_inputs(IndexerCase("", (256, 256), 24, num_heads=16, block=16), seed=5)
    inputs.block_table[0, 1], inputs.block_table[1, 3] = -1, len(inputs.cache)
    ids = inputs.output_buffer()
    with emulation(SMALL):
        flashdsa.dsa_topk_indexer(*inputs.operands, ids, block=16, backend=BACKEND)
        bad = {0: range(4, 8), 1: range(12, 16)}
        for row in range(2):
            good = [j for j in range(16) if j not in bad[row]]
            assert ids[row].tolist() == good + [-1] * 12
        some = torch.tensor([[1, 5, 3], [1, 15, 3]], dtype=torch.int32)
        options = {"block": 16, "candidates": some, "ids": "position"}
        wide = torch.empty(2, 40, dtype=torch.int32)
        flashdsa.dsa_topk_indexer(*inputs.operands, wide, backend=BACKEND, **options)
    expected = [*range(16, 32), *range(48, 64), *[-1] * 8]
    assert wide.tolist() == [expected, expected]


def test_without_candidates_or_pages_nothing_is_chosen() -> None:
    inputs = make_indexer_inputs(IndexerCase("", (100,), 9, num_heads=16), seed=6)
    q, cache, weights, lengths, table = inputs.operands
    none = torch.empty(1, 0, dtype=torch.int32)
    with emulation(SMALL):
        for options in ({"candidates": none}, {"block": 8}):
            pages = cache if "candidates" in options else cache[:0]
            ids = inputs.output_buffer()
            flashdsa.dsa_topk_indexer(
                q, pages, weights, lengths, table, ids, backend=BACKEND, **options
            )
            assert (ids == -1).all()
