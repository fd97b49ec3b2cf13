"""The Hopper indexer on a GPU: exact ids of every variant, cluster and split.

Scores are exact in any order of additions (see inputs.py), so that torch's stable sort of
them is the answer, id for id.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.gpu.runner import Gpu
from flashdsa.backends.indexer.choice import clusters_for, gpu_of
from flashdsa.heuristics.h200 import Indexer
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import INDEXER, INDEXER_ORDER
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sizes import MAX_CLUSTER
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.verify.tolerances import PRODUCT_TOLERANCE_ANY_DATA
from tests.kernels.indexer.inputs import EDGES, Inputs, expected_ids, make_inputs, select
from tests.support.hopper_gpu import HOPPER_GPU

pytestmark = HOPPER_GPU
VALUES = ["random", "equal", "two", "ascending", "descending", "nan", "pages"]


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("topk", [1, 100, 511, 512, 513, 1024, 1500, 2047, 2048])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_every_variant_and_any_topk_are_exact(num_heads: int, topk: int, by_score: bool) -> None:
    for values in ("random", "nan"):
        inputs = make_inputs([*EDGES, topk - 1, topk + 1], num_heads=num_heads, values=values)
        inputs = inputs.to("cuda")
        assert torch.equal(select(inputs, topk, by_score), expected_ids(inputs, topk, by_score))


@pytest.mark.parametrize("topk", [1, 100, 2047])
def test_ids_of_another_shape_are_refused_and_positions_are_those_of_slots(topk: int) -> None:
    inputs = make_inputs([3000, 500]).to("cuda")
    slots, ids = select(inputs, topk, by_score=True), inputs.output(topk)
    with pytest.raises(ValueError, match="topk_indices"):
        flashdsa.dsa_topk_indexer(*inputs, ids.view(1, 2 * topk), sorted=True, backend="sm90")
    flashdsa.dsa_topk_indexer(*inputs, ids, sorted=True, ids="position", backend="sm90")
    page = inputs.block_table.gather(1, ids.clamp_min(0).long() // 64)
    assert torch.equal(torch.where(ids < 0, -1, page * 64 + ids % 64), slots)


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("values", VALUES)
def test_ties_and_ordered_scores_are_exact(values: str, by_score: bool) -> None:
    for lengths in ([100_000], [20_000] * 8, [5000, 3000, 70, 2048, 9000] * 30):
        inputs = make_inputs(lengths, values=values).to("cuda")
        assert torch.equal(select(inputs, 2048, by_score), expected_ids(inputs, 2048, by_score))


@pytest.mark.parametrize(
    "lengths",
    [[1_048_576], [1_048_576, 0, 1_048_575, 5, 300_000], [524_289]],
    ids=["1M", "1M among others", "512K"],
)
def test_long_rows_are_exact(lengths: list[int]) -> None:
    inputs = make_inputs(lengths).to("cuda")
    assert torch.equal(select(inputs, 2048), expected_ids(inputs, 2048))


def test_ragged_batches_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    for batch, longest in ((100, 16_384), (16, 4096), (700, 3000), (3000, 100)):
        lengths = torch.randint(1, longest + 1, (batch,), generator=generator).tolist()
        inputs = make_inputs(lengths).to("cuda")
        assert torch.equal(select(inputs, 2048), expected_ids(inputs, 2048))


@pytest.mark.parametrize("next_n", [2, 3, 4])
@pytest.mark.parametrize("longest", [3000, 90_000])
def test_queries_of_a_request_share_its_row_of_the_table(longest: int, next_n: int) -> None:
    generator = torch.Generator().manual_seed(next_n)
    lengths = torch.randint(1, longest + 1, (5 * next_n,), generator=generator).tolist()
    lengths[-1] = longest
    rows = make_inputs(lengths)
    rows.block_table[:] = rows.block_table[-1].clone()  # of the longest row
    rows = rows.to("cuda")
    of_queries = (rows.q_index_fp8, rows.weights, rows.seq_lens, rows.output(2048))
    q, weights, seq_lens, ids = (x.unflatten(0, (5, next_n)) for x in of_queries)
    table = rows.block_table[::next_n].contiguous()
    flashdsa.dsa_topk_indexer(
        q, rows.k_index_cache_fp8, weights, seq_lens, table, ids, backend="sm90"
    )
    assert torch.equal(ids.flatten(0, 1), expected_ids(rows, 2048))


@pytest.mark.parametrize("next_n", [2, 4])
@pytest.mark.parametrize("count", [60, 61, 66, 67, 128, 133, 300])
@pytest.mark.parametrize("longest", [4000, 40_000])
def test_pairs_of_queries_of_many_requests_are_exact(count: int, longest: int, next_n: int) -> None:
    """From 61 pairs on both are scored together; their lengths differ, and some are long."""
    assert_pairs_are_exact(count, longest, next_n)


@pytest.mark.parametrize("next_n", [2, 4])
@pytest.mark.parametrize(
    ("count", "longest", "values"),
    [
        (1, 200_000, "random"),
        (3, 100_000, "ascending"),
        (8, 60_000, "two"),
        (17, 30_000, "nan"),
        (18, 150_000, "equal"),
        (29, 25_000, "random"),
    ],
)
def test_few_pairs_of_long_requests_are_exact(
    count: int, longest: int, values: str, next_n: int
) -> None:
    """They are scored and ranked by two launches."""
    assert_pairs_are_exact(count, longest, next_n, values)


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_ties_of_ragged_requests_are_exact(next_n: int) -> None:
    """More of them are published than a list holds."""
    assert_pairs_are_exact(67, 90_000, next_n, values="equal")


@pytest.mark.parametrize("next_n", [2, 4])
def test_the_best_tokens_of_pairs_have_the_same_places_in_all_pages(next_n: int) -> None:
    """So many that a warp's segment of the list has no room for its own."""
    assert_pairs_are_exact(67, 100_000, next_n, values="pages")


def assert_pairs_are_exact(count: int, longest: int, next_n: int, values: str = "random") -> None:
    """Requests of `next_n` queries, every 17th of them of `longest` tokens."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 3000, (count, next_n), generator=generator)
    lengths[::17] = longest
    last = lengths[:, -1:]
    lengths = (last - torch.randint(0, 3, (count, next_n), generator=generator)).clamp(0)
    lengths[:, -1:] = last
    inputs = make_inputs(lengths.flatten().tolist(), seed=count, values=values)
    table = inputs.block_table[next_n - 1 :: next_n].contiguous()
    inputs = inputs._replace(block_table=table).to("cuda")
    ids = inputs.output(2048)
    q, weights, seq_lens, of_requests = (
        x.unflatten(0, (count, next_n))
        for x in (inputs.q_index_fp8, inputs.weights, inputs.seq_lens, ids)
    )
    flashdsa.dsa_topk_indexer(
        q,
        inputs.k_index_cache_fp8,
        weights,
        seq_lens,
        inputs.block_table,
        of_requests,
        backend="sm90",
    )
    of_rows = inputs._replace(block_table=inputs.block_table.repeat_interleave(next_n, 0))
    assert torch.equal(ids, expected_ids(of_rows, 2048))


@pytest.mark.parametrize(
    "rows", [2, 7, 8, 9, 15, 17, 22, 30, 39, 40, 60, 61, 66, 67, 119, 132, 133, 400]
)
def test_batches_around_every_choice_of_clusters_are_exact(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, 9000, (rows,), generator=generator).tolist()
    inputs = make_inputs(lengths, seed=rows).to("cuda")
    assert torch.equal(select(inputs, 2048), expected_ids(inputs, 2048))


NO_WORDS = torch.empty(0, 0, dtype=torch.int32)


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("size", range(1, MAX_CLUSTER + 1))
def test_clusters_of_every_size_are_exact(size: int, by_score: bool) -> None:
    """Fewer clusters than rows, whole and halved, parts that are compacted, of one page or none."""
    plan = IndexerPlan(rows=By.CLUSTERS)
    function, order = load(INDEXER, plan), load(INDEXER_ORDER, OrderPlan(512))
    for values in ("random", "two", "ascending"):
        inputs = make_inputs([600, 150_000, 5, 3000, 9000, 513], values=values).to("cuda")
        ids = inputs.output(512)
        for number in (2, 132 // size // 2):
            words = inputs.output(512) if by_score else NO_WORDS.cuda()
            workspace = split_workspace(plan, number * size)
            function(*inputs, ids, words, *workspace, 1, number, size)
            if by_score:
                order(ids, words)
            assert torch.equal(ids, expected_ids(inputs, 512, by_score))


def split_workspace(plan: IndexerPlan, num_ctas: int) -> tuple[Tensor, Tensor]:
    """Counters at 0, and slots with anything."""
    sizes = plan.split_workspace(num_ctas)
    counters = torch.zeros(sizes.counters, dtype=torch.int32, device="cuda")
    return counters, torch.empty(sizes.slots, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("number", "size"), [(66, 2), (15, 8), (39, 3), (132, 1), (7, 16)])
def test_ragged_batches_are_exact_and_leave_their_counters_at_0(
    values: str, number: int, size: int
) -> None:
    """Long rows get several clusters, whatever the size of the batch."""
    plan = IndexerPlan(rows=By.CLUSTERS)
    workspace = split_workspace(plan, number * size)
    for lengths in (
        [131_072, *[2049] * 40],
        [70_000, 3000, 90_000, 100, 2500, 8000, 40_000],
        [150_000, 70_000],
        [150_000],
    ):
        inputs = make_inputs(lengths, values=values).to("cuda")
        expected = expected_ids(inputs, 2048)
        for _ in range(3):
            ids = inputs.output(2048)
            load(INDEXER, plan)(*inputs, ids, NO_WORDS.cuda(), *workspace, 1, number, size)
            assert torch.equal(ids, expected)
        assert not workspace[0].any()


def test_the_driver_says_how_many_clusters_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flashdsa.gpu"):
        gpu, plan = Gpu(0), INDEXER.plans[0]
        capacity = gpu.cluster_capacity(plan.threads, plan.smem_bytes)
    assert not caplog.records
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert set(capacity) > set(Indexer.SIZES)
    assert capacity[1] == sms
    assert all(size * count <= sms for size, count in capacity.items())
    assert capacity[8] > 1
    assert clusters_for(gpu_of(gpu, plan), 1)[1] > 8, "clusters of more than 8 CTAs are refused"


def test_normal_data_selects_by_scores_within_the_tolerance() -> None:
    """Of scores that are not exact: nothing that was left out is better by more than an error."""
    torch.manual_seed(0)
    inputs = make_inputs([30_000, 9000, 2049]).to("cuda")
    keys = torch.randn(len(inputs.k_index_cache_fp8) * 64, 128, device="cuda", dtype=torch.bfloat16)
    cache = inputs.k_index_cache_fp8.cpu()
    flashdsa.write_index_k_cache(keys.cpu(), torch.arange(len(keys)), cache)
    q, weights = flashdsa.quantize_index_q(torch.randn(3, 64, 128), torch.randn(3, 64))
    inputs = inputs._replace(
        q_index_fp8=q.cuda(), weights=weights.cuda(), k_index_cache_fp8=cache.cuda()
    )
    ids = select(inputs, 2048)
    fp8, scale = flashdsa.read_index_k_cache(cache, torch.arange(len(keys)))
    for row, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[row, : -(-length // 64)].long()
        tokens = (pages[:, None] * 64 + torch.arange(64, device="cuda")).flatten()[:length]
        dots = (inputs.q_index_fp8[row].double() @ fp8.cuda().double().t()).clamp_min(0)
        terms = dots * inputs.weights[row].double()[:, None] * scale.cuda().double()
        scores, sizes = terms.sum(0)[tokens], terms.abs().sum(0)[tokens]
        chosen = torch.isin(tokens, ids[row].long())
        assert int(chosen.sum()) == 2048
        error = 3e-4 * sizes.max()
        assert scores[~chosen].max() - scores[chosen].min() <= 2 * error


def test_one_row_of_wider_tensors_is_taken() -> None:
    """Strides of dimensions of size 1 say nothing."""
    inputs = make_inputs([3000, 2500]).to("cuda")
    expected = expected_ids(inputs, 2048)[:1]
    wide = torch.zeros(2, 2 * inputs.block_table.shape[1], dtype=torch.int32, device="cuda")
    wide[:, : inputs.block_table.shape[1]] = inputs.block_table
    one = Inputs(
        inputs.q_index_fp8[:1],
        inputs.k_index_cache_fp8,
        inputs.weights[:1],
        inputs.seq_lens[::2],
        wide[:1, : inputs.block_table.shape[1]],
    )
    assert torch.equal(select(one, 2048), expected)


@pytest.mark.parametrize("num_heads", [16, 64])
def test_scores_of_any_data_are_within_a_share_of_their_products(num_heads: int) -> None:
    """Heads that point the same way, and channels 30 times as large: the worst data known."""
    generator = torch.Generator().manual_seed(num_heads)
    tokens, large = 4096, torch.ones(128)
    large[:4] = 30
    q = torch.randn(1, num_heads, 128, generator=generator) * 0.2
    q = (q + torch.randn(1, 1, 128, generator=generator)) * large
    k = torch.randn(tokens, 128, generator=generator) * large
    cache = torch.zeros(tokens // 64, 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(k.bfloat16(), torch.arange(tokens), cache, backend="cpu")
    folded = flashdsa.quantize_index_q(
        q.bfloat16(), torch.rand(1, num_heads, generator=generator), backend="cpu"
    )
    lengths = torch.tensor([tokens], dtype=torch.int32)
    table = torch.arange(tokens // 64, dtype=torch.int32)[None]
    operands = (folded[0], cache, folded[1], lengths, table)
    scores = flashdsa.indexer_logits(*(x.cuda() for x in operands), tokens, backend="sm90")
    error = (scores.cpu().double() - reference.indexer_logits(*operands, tokens)).abs()
    products = reference.indexer_logits(*operands, tokens, absolute="products")
    assert (error <= PRODUCT_TOLERANCE_ANY_DATA * products).all()
