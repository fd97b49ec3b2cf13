"""Every backend's indexer over shared keys: scores within the contract, exact by its own scores."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.backends.cpu import prefill, topk
from flashdsa.backends.cpu.tiling import WORKSPACE_BYTES
from flashdsa.backends.emulated.devices import H200, SMALL
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.prefill import shared
from flashdsa.backends.sm90.prefill_pieces import Piece, pieces_of
from flashdsa.backends.sm90.prefill_scores import parts_of
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_indexer import check_prefill_scores, check_prefill_selection
from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs
from tests.support.cases import PREFILL_CASES


def test_scores_and_selection_are_within_the_contract(subtests, backend, device, seed):
    for case in PREFILL_CASES:
        with subtests.test(case.name):
            inputs = make_prefill_inputs(case, seed, device)
            scores, verdicts = check_prefill_scores(inputs, backend)
            assert failures(verdicts + check_prefill_selection(inputs, scores, backend)) == []


def test_it_chooses_what_the_paged_indexer_chooses_of_the_same_keys(seed):
    """Keys in pages that follow each other: slots are rows, and the scores have the same bits."""
    case = PrefillCase("pages", causal(9, 256), 100, num_heads=64)
    x = make_prefill_inputs(case, seed)
    keys, scales = x.k_index[:256].view(torch.uint8), x.k_scale[:256].clone()
    cache = torch.cat([keys.reshape(4, 8192), scales.view(torch.uint8).view(4, 256)], dim=1).view(
        4, 64, 1, 132
    )
    table = torch.arange(4, dtype=torch.int32).repeat(9, 1)
    paged, shared = x.output_buffer(), x.output_buffer()
    flashdsa.dsa_topk_indexer(x.q_index, cache, x.weights, x.ends, table, paged)
    flashdsa.dsa_topk_prefill(*x.operands, shared, **x.options)
    assert torch.equal(paged, shared)
    scores = flashdsa.prefill_logits(*x.operands, **x.options)
    of_pages = flashdsa.indexer_logits(x.q_index, cache, x.weights, x.ends, table, 256)
    assert torch.equal(scores[:, :256].view(torch.int32), of_pages.view(torch.int32))


def test_blocks_of_queries_do_not_change_the_choice(monkeypatch, seed):
    case = PrefillCase("blocks", (*causal(12, 200), *causal(9, 90, 200)), 40, num_heads=8)
    x = make_prefill_inputs(case, seed)
    whole, cut = x.output_buffer(), x.output_buffer()
    flashdsa.dsa_topk_prefill(*x.operands, whole, **x.options)
    monkeypatch.setattr(prefill, "TOKEN_BLOCK", 64)
    monkeypatch.setattr(topk, "BYTES_OF_SCORE", WORKSPACE_BYTES // (200 * 3))
    flashdsa.dsa_topk_prefill(*x.operands, cut, **x.options)
    assert torch.equal(whole, cut)


def test_what_it_chooses_feeds_sparse_mla(seed):
    x = make_prefill_inputs(PrefillCase("feeds", causal(6, 50), 20, num_heads=4), seed)
    ids = x.output_buffer()
    flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options)
    kv = torch.randn(x.k_index.shape[0], 24)
    out = flashdsa.sparse_mla(torch.randn(6, 2, 24), kv, ids, d_v=16)
    assert out.shape == (6, 2, 16) and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_causal_ranges_of_packed_sequences(dtype):
    """Three sequences: as many keys as queries, none at all, and a chunk of 2 behind 3 keys."""
    cu_q = torch.tensor([0, 3, 3, 5], dtype=dtype)
    cu_k = torch.tensor([0, 3, 3, 8], dtype=dtype)
    starts, ends = flashdsa.causal_ranges(cu_q, cu_k)
    assert starts.tolist() == [0, 0, 0, 3, 3] and ends.tolist() == [1, 2, 3, 7, 8]
    assert starts.dtype == ends.dtype == torch.int32
    starts, ends = flashdsa.causal_ranges(cu_q, num_queries=5)
    assert starts.tolist() == [0, 0, 0, 3, 3] and ends.tolist() == [1, 2, 3, 4, 5]


def test_causal_ranges_where_there_are_fewer_keys_than_queries():
    starts, ends = flashdsa.causal_ranges(torch.tensor([0, 4]), torch.tensor([0, 2]))
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 2),
    ]
    starts, _ = flashdsa.causal_ranges(torch.tensor([0, 0]))
    assert starts.shape == (0,)


@pytest.mark.parametrize("ratio", [1, 2])
def test_queries_of_a_padded_batch_that_are_no_sequences_see_nothing(ratio):
    offsets = torch.tensor([0, 2, 5])
    starts, ends = flashdsa.causal_ranges(offsets, num_queries=9, ratio=ratio)
    own = flashdsa.causal_ranges(offsets, ratio=ratio)
    assert torch.equal(starts[:5], own[0]) and torch.equal(ends[:5], own[1])
    assert torch.equal(starts[5:], ends[5:])
    none = flashdsa.causal_ranges(offsets[:1], num_queries=2)
    assert [x.tolist() for x in none] == [[0, 0], [0, 0]]


def test_ranges_that_context_parallelism_makes_choose_as_the_whole_does(seed):
    """Zig-zag: a rank has queries from both ends; only their rows of the ranges say so."""
    x = make_prefill_inputs(PrefillCase("whole", causal(24, 24), 8, num_heads=16), seed)
    whole = x.output_buffer()
    flashdsa.dsa_topk_prefill(*x.operands, whole, **x.options)
    mine = torch.tensor([0, 1, 2, 21, 22, 23])
    part = torch.empty(6, 8, dtype=torch.int32)
    q = x.q_index.view(torch.uint8)[mine].view(torch.float8_e4m3fn)
    flashdsa.dsa_topk_prefill(
        q, x.k_index, x.weights[mine], x.starts[mine], x.ends[mine], part, **x.options
    )
    assert torch.equal(part, whole[mine])


def test_reference_ranks_by_score_then_row_with_nan_last():
    scores = torch.tensor([[3.0, float("nan"), 5.0, 5.0, 3.0, -float("inf")]])
    ends = torch.tensor([6])
    by_score = reference.dsa_topk_prefill(scores, None, ends, 7, sorted=True)
    assert by_score.tolist() == [[2, 3, 0, 4, 5, 1, -1]]
    assert reference.dsa_topk_prefill(scores, None, ends, 3).tolist() == [[0, 2, 3]]


FP8, BF16 = "float8_e4m3fn", "bfloat16"
K = 1024


def pieces(
    queries: int, keys: int, heads: int = 64, *, topk: int = 2048, ragged: bool = False,
    dtype: str = FP8, device: object = H200,
) -> tuple[Piece, ...]:  # fmt: skip
    """Launches of a call."""
    plan = shared(PrefillPlan(heads, dtype))
    return pieces_of(Emulator(device), plan, queries, keys, topk, ragged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "sizes"),
    [
        (16, 64 * K, 64, [13]),
        (64, 20 * K, 64, [6]),
        (128, 20 * K, 64, [3]),
        (128, 128 * K, 64, [6, 8]),
        (200, 20 * K, 64, [2]),
        (256, 32 * K, 32, [3]),
        (256, 64 * K, 64, [2]),
        (128, 32 * K, 16, [6]),
        (300, 9000, 64, [3]),
        (512, 64 * K, 64, [1]),
        (529, 64 * K, 64, [1, 13]),
        (700, 32 * K, 64, [1, 5]),
        (1100, 32 * K, 64, [1, 8]),
        (8192, 8192, 64, [1]),
        (4096, 128 * K, 64, [1]),
        (1000, 2050, 64, [1]),
        (16, 2048, 64, [1]),
    ],
)
def test_clusters_fill_the_last_wave(queries: int, keys: int, heads: int, sizes: list[int]) -> None:
    assert [piece.cluster_size for piece in pieces(queries, keys, heads)] == sizes


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_every_query_has_one_launch_and_every_launch_fits(
    heads: int, dtype: str, ragged: bool
) -> None:
    plan = shared(PrefillPlan(heads, dtype))
    for queries in (1, 3, 16, 67, 265, 300, 400, 529, 533, 1057, 1100, 1601):
        for keys in (500, 5000, 70_000, 131_072):
            end = queries
            for piece in pieces(queries, keys, heads, dtype=dtype, ragged=ragged):
                assert piece.end == end and piece.first % plan.tile_queries == 0
                assert piece.num_ctas % piece.cluster_size == 0
                assert piece.num_ctas <= H200.num_sms and piece.cluster_size <= plan.most_parts
                assert piece.num_ctas // piece.cluster_size <= H200.clusters[piece.cluster_size]
                end = piece.first
            assert end == 0


def test_ranges_of_the_device_take_clusters_if_all_tiles_of_a_launch_have_one() -> None:
    assert pieces(16, 64 * K, ragged=True) == (Piece(0, 16, 52, 13),)
    assert pieces(300, 64 * K, ragged=True) == (Piece(0, 300, 132, 1),)
    assert pieces(529, 64 * K, ragged=True) == (Piece(4, 529, 132, 1), Piece(0, 4, 13, 13))
    assert pieces(700, 32 * K, ragged=True) == (Piece(172, 700, 132, 1), Piece(0, 172, 86, 2))
    assert pieces(16, 2048, ragged=True) == (Piece(0, 16, 132, 1),)


@pytest.mark.parametrize(
    ("tiles", "key_tiles", "parts"),
    [(1, 1000, 132), (1, 3, 3), (33, 1000, 4), (66, 1000, 2), (132, 1000, 1), (5000, 1000, 1)],
)
def test_scores_alone_are_divided_evenly(tiles: int, key_tiles: int, parts: int) -> None:
    assert parts_of(tiles, key_tiles, H200.num_sms) == parts


def test_parts_of_a_tile_fit_its_numbers() -> None:
    parts = parts_of(1, 2**25, H200.num_sms)
    assert parts > 1 and 2**25 * (parts + 1) <= 2**31


def test_devices_and_settings_limit_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces(4, 64 * K, device=SMALL) == (Piece(0, 4, 2, 2),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "4")
    assert pieces(16, 64 * K) == (Piece(0, 16, 16, 4),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "1")
    assert pieces(16, 64 * K) == (Piece(0, 16, 132, 1),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "16")
    assert pieces(16, 64 * K) == (Piece(0, 16, 64, 16),)
    (one,) = pieces(16, 64 * K, 32, dtype=BF16)
    assert one.cluster_size == 8
