"""Every backend's indexer scores within the contract and selects exactly by its own scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashdsa
from flashdsa import reference
from flashdsa.problem import INT32_MAX
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs, pack_pages
from flashdsa.verify.judge_indexer import (
    check_scores,
    check_selection,
    judge_scores,
    judge_selection,
)
from tests.support.cases import INDEXER_CASES

INT32_MIN = -(2**31)
POISON = 0x7B7B7B7B
FEATURES = [
    "sorted",
    "negative_weights",
    "plateaus",
    "zero_scores",
    "repeated_pages",
    "one_sequence",
    "nan_keys",
    "int8_cache",
    "strided",
]


def select(inputs, backend, **options):
    ids = inputs.output_buffer()
    flashdsa.dsa_topk_indexer(*inputs.operands, ids, backend=backend, **options)
    return ids


def random_tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return reference.quantize_index_k(torch.randn(count, 128, generator=generator))


def random_queries(batch, heads, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(batch, heads, 128, generator=generator)
    codes, weights = reference.quantize_index_q(q, torch.randn(batch, heads, generator=generator))
    return codes.view(torch.float8_e4m3fn), weights


def test_scores_and_selection_are_within_the_contract(subtests, backend, device, seed):
    for case in INDEXER_CASES:
        with subtests.test(case.name):
            inputs = make_indexer_inputs(case, seed, device)
            scores, verdicts = check_scores(inputs, backend)
            assert failures(verdicts + check_selection(inputs, scores, backend)) == []


@given(
    lengths=st.lists(st.integers(0, 200), max_size=3),
    draw_seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_lengths_and_features(backend, device, lengths, draw_seed, data):
    if backend == "cpu":
        sizes, heads = st.integers(1, 210), [1, 2, 5, 64]
    else:  # kernels are compiled for these
        sizes, heads = st.sampled_from([512, 1024, 2048]), [16, 32, 64]
    options = dict.fromkeys(data.draw(st.sets(st.sampled_from(FEATURES))), True)
    topk, num_heads = data.draw(sizes), data.draw(st.sampled_from(heads))
    case = IndexerCase("drawn", tuple(lengths), topk, num_heads, **options)
    inputs = make_indexer_inputs(case, draw_seed, device)
    scores, verdicts = check_scores(inputs, backend)
    assert failures(verdicts + check_selection(inputs, scores, backend)) == []


@pytest.mark.parametrize("by_score", [False, True], ids=["default order", "sorted"])
def test_selection_and_scores_are_bit_identical_from_run_to_run(by_score, backend, device, seed):
    case = IndexerCase("runs", (3000, 700, 64), 2048, plateaus=True, nan_keys=True)
    inputs = make_indexer_inputs(case, seed, device)
    ids = select(inputs, backend, sorted=by_score)
    scores = flashdsa.indexer_logits(*inputs.operands, inputs.max_len, backend=backend)
    for _ in range(3):
        assert torch.equal(select(inputs, backend, sorted=by_score), ids)
        again = flashdsa.indexer_logits(*inputs.operands, inputs.max_len, backend=backend)
        assert torch.equal(again.view(torch.int32), scores.view(torch.int32))


def test_tokens_with_the_same_132_bytes_score_bit_identically_wherever_they_lie(
    backend, device, seed
):
    """Five distinct tokens, shuffled differently in rows of different lengths, one query."""
    lengths = (1, 7, 65, 129, 200, 1000, 4099)
    codes, scale = random_tokens(5, seed)
    needed = [-(-length // 64) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(5, (64 * sum(needed),), generator=generator)
    cache = pack_pages(codes[drawn], scale[drawn]).to(device)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    which = torch.full((len(lengths), max(lengths)), -1)
    first = 0
    for b, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[b, :count] = torch.arange(first, first + count)
        which[b, :length] = drawn[64 * first : 64 * first + length]
        first += count
    q, weights = random_queries(1, 64, seed)
    q = q.view(torch.uint8).repeat(len(lengths), 1, 1).view(torch.float8_e4m3fn).to(device)
    scores = flashdsa.indexer_logits(
        q,
        cache,
        weights.repeat(len(lengths), 1).to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table.to(device),
        max(lengths),
        backend=backend,
    ).cpu()
    for token in range(5):
        values = scores[which == token].view(torch.int32)
        assert len(values) > 100 and len(values.unique()) == 1


@pytest.mark.parametrize("one_sequence", [False, True], ids=["own pages", "one sequence"])
def test_a_row_scores_bit_identically_alone_and_in_a_batch(one_sequence, backend, device, seed):
    case = IndexerCase("batch", (40, 300, 65, 299), 50, one_sequence=one_sequence)
    inputs = make_indexer_inputs(case, seed, device)
    together = flashdsa.indexer_logits(*inputs.operands, 300, backend=backend)
    for b in range(len(case.seq_lens)):
        one = slice(b, b + 1)
        alone = flashdsa.indexer_logits(
            inputs.q[one],
            inputs.cache,
            inputs.weights[one],
            inputs.seq_lens[one],
            inputs.block_table[one],
            300,
            backend=backend,
        )
        assert torch.equal(alone, together[one])


def test_scores_do_not_depend_on_the_width_asked_for(backend, device, seed):
    inputs = make_indexer_inputs(IndexerCase("width", (300, 65), 50), seed, device)
    narrow = flashdsa.indexer_logits(*inputs.operands, 300, backend=backend)
    wide = flashdsa.indexer_logits(*inputs.operands, 1000, backend=backend)
    assert torch.equal(wide[:, :300], narrow)
    assert (wide[:, 300:] == -torch.inf).all()


def test_ties_at_the_cut_go_to_the_smallest_positions(backend, device, seed):
    """Every token is the same, pages lie in descending order: ids fall while positions rise."""
    codes, scale = random_tokens(1, seed)
    cache = pack_pages(codes.repeat(320, 1), scale.repeat(320)).to(device)
    q, weights = random_queries(1, 8, seed)
    ids = torch.full((1, 100), POISON, dtype=torch.int32, device=device)
    table = torch.tensor([[4, 3, 2, 1, 0]], dtype=torch.int32, device=device)
    length = torch.tensor([320], dtype=torch.int32, device=device)
    operands = (q.to(device), cache, weights.to(device), length, table)
    for by_score in (False, True):
        ids.fill_(POISON)
        flashdsa.dsa_topk_indexer(*operands, ids, sorted=by_score, backend=backend)
        expected = torch.tensor([[*range(256, 320), *range(192, 228)]], dtype=torch.int32)
        exact = by_score or backend == "cpu"
        assert failures([judge_selection("ids", ids, expected, exact_order=exact)]) == []


def test_nothing_around_a_strided_output_is_written(backend, device, seed):
    inputs = make_indexer_inputs(IndexerCase("around", (300, 0, 65), 70), seed, device)
    memory = torch.full((6, 90), POISON, dtype=torch.int32, device=device)
    flashdsa.dsa_topk_indexer(*inputs.operands, memory[::2, 10:80], backend=backend)
    assert (memory[1::2] == POISON).all()
    assert (memory[:, :10] == POISON).all() and (memory[:, 80:] == POISON).all()
    assert torch.equal(memory[::2, 10:80], select(inputs, backend))


def test_a_row_within_topk_gets_all_its_tokens_then_minus_one(backend, device, seed):
    case = IndexerCase("all", (0, 1, 64, 130), 130, nan_keys=True, negative_weights=True)
    inputs = make_indexer_inputs(case, seed, device)
    ids = select(inputs, backend)
    for b, length in enumerate(case.seq_lens):
        positions = torch.arange(length)
        expected = inputs.block_table[b].cpu()[positions // 64] * 64 + positions % 64
        assert ids[b, :length].sort().values.tolist() == expected.sort().values.tolist()
        assert (ids[b, length:] == -1).all()


def test_the_indexer_leaves_its_inputs_as_they_were(backend, device, seed):
    inputs = make_indexer_inputs(IndexerCase("inputs", (300, 65), 70), seed, device)
    before = [operand.clone() for operand in inputs.operands]
    select(inputs, backend)
    for operand, copy in zip(inputs.operands, before, strict=True):
        width = {1: torch.uint8, 4: torch.int32}[operand.dtype.itemsize]
        assert torch.equal(operand.view(width), copy.view(width))


@pytest.mark.parametrize("topk", [150, 400], ids=["topk below lengths", "topk beyond lengths"])
def test_the_launch_clamps_what_the_checked_call_rejects(topk, backend, device, seed):
    """Negative lengths, tables too narrow, pages outside the cache: harmless, never emitted."""
    inputs = make_indexer_inputs(IndexerCase("launch", (300,) * 6, topk), seed, device)
    num_pages = inputs.cache.shape[0]
    table = inputs.block_table[:, :5].clone()
    good = table.clone()
    table[0, 1], table[1, 4], table[2, :] = -1, num_pages, INT32_MAX
    table[3, 0], table[3, 2] = INT32_MIN, num_pages + 5
    lengths = torch.tensor([300, 300, 300, 299, -7, INT32_MAX], dtype=torch.int32, device=device)
    clamped = lengths.clamp(0, 320)

    # Scores are bit-identical wherever a token lies: those over good pages serve the good tokens.
    scores = flashdsa.indexer_logits(
        inputs.q, inputs.cache, inputs.weights, clamped, good, 320, backend=backend
    )
    ids = torch.full((6, topk), POISON, dtype=torch.int32, device=device)
    operands = inputs.q, inputs.cache, inputs.weights, lengths, table, ids
    flashdsa.bind("dsa_topk_indexer", operands, backend=backend)(operands)
    expected = reference.dsa_topk_indexer(
        inputs.q, inputs.cache, inputs.weights, lengths, table, topk, scores=scores
    )
    assert (expected[2] == -1).all() and (expected[4] == -1).all()
    verdict = judge_selection("ids", ids, expected, exact_order=backend == "cpu")
    assert failures([verdict]) == []


def test_a_bound_call_equals_the_checked_one_on_good_input(backend, device, seed):
    inputs = make_indexer_inputs(IndexerCase("both", (300, 0, 65), 70), seed, device)
    flashdsa.warm_up("dsa_topk_indexer", H=64, topk=70, backend=backend)
    ids = inputs.output_buffer()
    operands = (*inputs.operands, ids)
    flashdsa.bind("dsa_topk_indexer", operands, backend=backend)(operands)
    assert torch.equal(ids, select(inputs, backend))


def test_pages_beyond_2_to_the_31_bytes_are_reached(backend, device, seed):
    """The cache is reserved, not filled: only the pages that the table names may be touched."""
    num_pages = 2**31 // 8448 + 20
    try:
        cache = torch.empty(num_pages, 64, 1, 132, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 2.1 GB of address space: {error}")
    codes, scale = random_tokens(256, seed)
    pages = [num_pages - 1, 0, num_pages - 18, num_pages - 2]
    for page, packed in zip(pages, pack_pages(codes, scale), strict=True):
        cache[page] = packed
    q, weights = (x.to(device) for x in random_queries(1, 64, seed))
    table = torch.tensor([pages], dtype=torch.int32, device=device)
    length = torch.tensor([250], dtype=torch.int32, device=device)
    operands = (q, cache, weights, length, table)
    ids = torch.full((1, 100), POISON, dtype=torch.int32, device=device)
    flashdsa.dsa_topk_indexer(*operands, ids, sorted=True, backend=backend)
    scores = flashdsa.indexer_logits(*operands, 250, backend=backend)
    expected = reference.dsa_topk_indexer(*operands, 100, sorted=True, scores=scores)
    of_scores = judge_scores(operands, 250, scores, backend)
    assert failures([judge_selection("ids", ids, expected, exact_order=True), of_scores]) == []
