"""Wrong arguments of the indexer's operations: the right exception, and nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashdsa
from tests.ops import inputs
from tests.support.subtests import CaseLoop

POISON = 123


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _arguments() -> dict[str, Any]:
    return inputs.indexer()._asdict()


# q (2, 4, 128), cache (5, 64, 1, 132), weights (2, 4), seq_lens [130, 70], block_table (2, 3).
CACHE = inputs.indexer().k_index_cache_fp8
INPUTS = [
    ("q_index_fp8", 3, TypeError, "q_index_fp8: expected a torch.Tensor; got int"),
    (
        "q_index_fp8",
        torch.zeros(()).to(torch.float8_e4m3fn),
        ValueError,
        r"q_index_fp8: expected shape \[B, H, 128\]",
    ),
    *(
        ("q_index_fp8", torch.zeros(shape).to(torch.float8_e4m3fn), ValueError, message)
        for shape, message in (
            ((8, 128), r"q_index_fp8: expected shape \[B, H, 128\].*; got 2 dimensions"),
            ((1, 2, 4, 128), r"q_index_fp8: expected shape \[B, H, 128\]; got 4 dimensions"),
            ((1, 1, 2, 4, 128), r"q_index_fp8: expected shape \[B, H, 128\].*; got 5 dimensions"),
        )
    ),
    ("q_index_fp8", torch.zeros(2, 4, 128), TypeError, "q_index_fp8: expected dtype float8_e4m3fn"),
    (
        "q_index_fp8",
        torch.zeros(2, 4, 64).to(torch.float8_e4m3fn),
        ValueError,
        r"q_index_fp8: expected shape \[B, H, 128\] = \[2, 4, 128\]; got .*64",
    ),
    (
        "q_index_fp8",
        torch.zeros(2, 0, 128).to(torch.float8_e4m3fn),
        ValueError,
        "q_index_fp8: expected .* H >= 1; got H = 0",
    ),
    ("k_index_cache_fp8", CACHE.float(), TypeError, "k_index_cache_fp8: expected dtype uint8 or"),
    ("k_index_cache_fp8", CACHE[:, :32], ValueError, r"k_index_cache_fp8: expected shape .*64, 1,"),
    ("k_index_cache_fp8", CACHE[0], ValueError, "k_index_cache_fp8: expected shape .*; got 3 dim"),
    (
        "k_index_cache_fp8",
        torch.zeros(5, 128, 1, 132, dtype=torch.uint8)[:, ::2],
        ValueError,
        "k_index_cache_fp8: expected each page's bytes to be contiguous",
    ),
    ("weights", torch.zeros(2, 4).bfloat16(), TypeError, "weights: expected dtype float32; got bf"),
    ("weights", torch.zeros(2, 5), ValueError, r"weights: expected shape \[B, H\] = \[2, 4\]"),
    ("weights", torch.zeros(4, 2).t(), ValueError, "weights: expected a contiguous last dimension"),
    ("seq_lens", torch.tensor([1, 2]), TypeError, "seq_lens: expected dtype int32; got int64"),
    ("seq_lens", _int32(1), ValueError, r"seq_lens: expected shape \[B\] = \[2\]; got .*\[1\]"),
    ("seq_lens", _int32(1, 2).to("meta"), ValueError, "seq_lens: expected device cpu .*; got meta"),
    (
        "seq_lens",
        _int32(5, -1),
        ValueError,
        r"seq_lens: expected values >= 0; got seq_lens\[1\] = -1",
    ),
    (
        "seq_lens",
        _int32(193, 1),
        ValueError,
        r"block_table: expected at least 4 pages for seq_lens\[0\] = 193; got a table of 3 pages",
    ),
    ("block_table", torch.zeros(2, 3), TypeError, "block_table: expected dtype int32; got float32"),
    ("block_table", _int32(1, 2, 3), ValueError, "block_table: expected shape .*; got 1 dim"),
    ("block_table", _int32(1)[None].expand(3, 3), ValueError, "block_table: expected shape"),
    (
        "block_table",
        torch.stack([_int32(0, 1, 2), _int32(0, 5, 0)]),
        ValueError,
        r"block_table: expected page ids in \[0, 5\); got block_table\[1, 1\] = 5",
    ),
    (
        "block_table",
        torch.stack([_int32(0, -1, 2), _int32(0, 1, 0)]),
        ValueError,
        r"block_table: expected page ids in \[0, 5\); got block_table\[0, 1\] = -1",
    ),
    ("backend", "gpu", ValueError, "backend: expected one of"),
    ("backend", "sm100", NotImplementedError, "backend 'sm100'"),
]
OUTPUT = [
    (torch.zeros(2, 16), TypeError, "topk_indices: expected dtype int32; got float32"),
    (torch.zeros(3, 16).int(), ValueError, r"topk_indices: expected shape .*\[2, 16\]; got .*\[3"),
    (torch.zeros(2, 0).int(), ValueError, "topk_indices: expected shape .* topk >= 1; got 0"),
    (torch.zeros(16, 2).int().t(), ValueError, "topk_indices: expected a contiguous last dim"),
    (torch.zeros(2, 16).int().to("meta"), ValueError, "topk_indices: expected device cpu"),
]


def test_indexer_inputs(subtests: CaseLoop) -> None:
    for name, value, error, message in INPUTS:
        with subtests.test(f"{name}: {message}"):
            arguments = {**_arguments(), name: value}
            out = torch.full((2, 16), POISON, dtype=torch.int32)
            with pytest.raises(error, match=message):
                flashdsa.dsa_topk_indexer(**arguments, topk_indices=out)
            assert (out == POISON).all(), "something was written before the error"
            with pytest.raises(error, match=message):
                flashdsa.indexer_logits(**arguments, max_len=200)


def _requests(next_n: int = 2) -> dict[str, Any]:
    """Two requests with so many queries each."""
    x = inputs.indexer()
    return {
        "q_index_fp8": x.q_index_fp8.view(torch.uint8)[:, None]
        .repeat(1, next_n, 1, 1)
        .view(torch.float8_e4m3fn),
        "k_index_cache_fp8": x.k_index_cache_fp8,
        "weights": x.weights[:, None].repeat(1, next_n, 1),
        "seq_lens": x.seq_lens[:, None].repeat(1, next_n) - torch.arange(next_n).flip(0).int(),
        "block_table": x.block_table,
    }


OF_REQUESTS = [
    ("weights", torch.zeros(2, 4), r"weights: expected shape \[B, next_n, H\]; got 2 dim"),
    ("weights", torch.zeros(2, 3, 4), r"weights: expected shape \[B, next_n, H\] = \[2, 2, 4\]"),
    ("seq_lens", _int32(5, 6), r"seq_lens: expected shape \[B, next_n\]; got 1 dim"),
    ("block_table", _int32(0, 1, 2, 0)[:, None], r"block_table: expected shape .* = \[2, 1\]"),
]


def test_requests_with_several_queries(subtests: CaseLoop) -> None:
    for name, value, message in OF_REQUESTS:
        with subtests.test(message):
            out = torch.full((2, 2, 16), POISON, dtype=torch.int32)
            with pytest.raises(ValueError, match=message):
                flashdsa.dsa_topk_indexer(**{**_requests(), name: value}, topk_indices=out)
            assert (out == POISON).all(), "something was written before the error"


@pytest.mark.parametrize("next_n", [0, 5])
def test_requests_have_one_to_four_queries(next_n: int) -> None:
    out = torch.full((2, next_n, 16), POISON, dtype=torch.int32)
    with pytest.raises(ValueError, match="q_index_fp8: expected next_n of 1 to 4"):
        flashdsa.dsa_topk_indexer(**_requests(next_n), topk_indices=out)


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_queries_of_a_request_are_rows_with_one_table(next_n: int) -> None:
    arguments = _requests(next_n)
    out = torch.full((2, next_n, 16), POISON, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(**arguments, topk_indices=out)
    rows = {name: x.flatten(0, 1) for name, x in arguments.items() if x.dim() > 1}
    rows["seq_lens"] = arguments["seq_lens"].flatten()
    rows["k_index_cache_fp8"] = arguments["k_index_cache_fp8"]
    rows["block_table"] = arguments["block_table"].repeat_interleave(next_n, dim=0)
    expected = torch.full((2 * next_n, 16), POISON, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(**rows, topk_indices=expected)
    assert torch.equal(out.flatten(0, 1), expected)


def test_indexer_output(subtests: CaseLoop) -> None:
    for out, error, message in OUTPUT:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.dsa_topk_indexer(**_arguments(), topk_indices=out)


def test_page_ids_in_unused_slots_may_be_anything() -> None:
    arguments = _arguments()
    arguments["block_table"][1, 2] = -7  # row 1 has 70 tokens: two pages
    out = torch.full((2, 16), -POISON, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(**arguments, topk_indices=out)
    assert (out >= 0).all()


def test_a_bound_call_clamps_and_skips() -> None:
    arguments = _arguments()
    arguments["seq_lens"] = _int32(10_000, -5)
    arguments["block_table"] = torch.stack([_int32(2, 9, 1), _int32(0, 0, 0)])
    out = torch.full((2, 200), POISON, dtype=torch.int32)
    operands = (*arguments.values(), out)
    flashdsa.bind("dsa_topk_indexer", operands)(operands)
    good = torch.cat([torch.arange(2 * 64, 3 * 64), torch.arange(64, 2 * 64)]).int()
    assert torch.equal(out[0], torch.cat([good, torch.full((72,), -1, dtype=torch.int32)]))
    assert (out[1] == -1).all()
    ranked = torch.full((2, 100), POISON, dtype=torch.int32)
    operands = (*arguments.values(), ranked)
    flashdsa.bind("dsa_topk_indexer", operands)(operands)
    assert set(ranked[0].tolist()) <= set(good.tolist())
    assert len(set(ranked[0].tolist())) == 100


@pytest.mark.parametrize(
    ("max_len", "error", "message"),
    [
        (0, ValueError, "max_len: expected at least 1; got 0"),
        (129, ValueError, "max_len: expected at least the longest of seq_lens, 130; got 129"),
        (1.5, TypeError, "max_len: expected an integer; got float"),
    ],
)
def test_max_len(max_len: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flashdsa.indexer_logits(**_arguments(), max_len=max_len)


RANKINGS = [
    (torch.zeros(2, 9).double(), _int32(1, 2), 3, TypeError, "scores: expected dtype float32"),
    (torch.zeros(9), _int32(1), 3, ValueError, r"scores: expected shape \[B, max_len\]; got 1"),
    (torch.zeros(9, 2).t(), _int32(1, 2), 3, ValueError, "scores: expected a contiguous last"),
    (torch.zeros(2, 9), torch.zeros(2), 3, TypeError, "lengths: expected dtype int32"),
    (torch.zeros(2, 9), _int32(1), 3, ValueError, r"lengths: expected shape \[B\] = \[2\]"),
    (torch.zeros(2, 9), _int32(1, 10), 3, ValueError, r"lengths: .*got lengths\[1\] = 10"),
    (torch.zeros(2, 9), _int32(-1, 1), 3, ValueError, r"lengths: .*got lengths\[0\] = -1"),
    (torch.zeros(2, 9), _int32(1, 1), 0, ValueError, "topk: expected at least 1; got 0"),
    (torch.zeros(2, 9), _int32(1, 1), True, TypeError, "topk: expected an integer; got bool"),
]


def test_topk_indices(subtests: CaseLoop) -> None:
    for scores, lengths, topk, error, message in RANKINGS:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.topk_indices(scores, lengths, topk)


KEYS = [
    (torch.zeros(3, 128).half(), TypeError, "k: expected dtype bfloat16 or float32; got float16"),
    (torch.zeros(3, 64), ValueError, r"k: expected shape \[T, 128\] = \[3, 128\]; got .*64"),
    (torch.zeros(128), ValueError, r"k: expected shape \[T, 128\]; got 1 dimensions"),
    (torch.zeros(128, 128).t(), ValueError, "k: expected a contiguous last dimension"),
    ("k", TypeError, "k: expected a torch.Tensor; got str"),
]


def test_quantize_index_k(subtests: CaseLoop) -> None:
    for k, error, message in KEYS:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.quantize_index_k(k)


QUERIES = [
    (torch.zeros(2, 4, 64), torch.zeros(2, 4), ValueError, r"q: expected shape \[B, H, 128\]"),
    (torch.zeros(2, 4, 128), torch.zeros(2, 3), ValueError, r"weights: expected .*\[2, 4\]"),
    (torch.zeros(2, 4, 128).int(), torch.zeros(2, 4), TypeError, "q: expected dtype bfloat16"),
    (torch.zeros(2, 4, 128), torch.zeros(2, 4).half(), TypeError, "weights: expected dtype fl"),
]


def test_quantize_index_q(subtests: CaseLoop) -> None:
    for q, weights, error, message in QUERIES:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.quantize_index_q(q, weights)


SLOTS = [
    (torch.tensor([0, 320]), ValueError, r"slots: expected slots in \[0, 320\), .*; got 320"),
    (torch.tensor([0, -2]), ValueError, r"slots: expected slots in \[0, 320\), .*; got -2"),
    (torch.tensor([7, 7]), ValueError, "slots: expected distinct slots; got 7 2 times"),
    (torch.tensor([0.0, 1.0]), TypeError, "slots: expected dtype int32 or int64; got float32"),
    (torch.tensor([1]), ValueError, r"slots: expected shape \[T\], one a key = \[2\]; got .*1"),
    (torch.tensor([[1, 2]]), ValueError, r"slots: expected shape \[T\]; got 2 dimensions"),
]


def test_write_index_k_cache(subtests: CaseLoop) -> None:
    for slots, error, message in SLOTS:
        with subtests.test(message):
            cache = torch.full_like(CACHE, POISON)
            with pytest.raises(error, match=message):
                flashdsa.write_index_k_cache(torch.randn(2, 128), slots, cache)
            assert (cache == POISON).all(), "something was written before the error"


@pytest.mark.parametrize("slot", [-1, 320])
def test_read_index_k_cache(slot: int) -> None:
    with pytest.raises(ValueError, match=rf"slots: expected slots in \[0, 320\), .*; got {slot}"):
        flashdsa.read_index_k_cache(CACHE, torch.tensor([0, slot]))


@pytest.mark.parametrize(
    ("ids", "error"), [("slots", ValueError), (None, TypeError), (True, TypeError)]
)
def test_ids_are_slots_or_positions(ids: Any, error: type[Exception]) -> None:
    out = _int32(*[7] * 8).view(2, 4)
    with pytest.raises(error, match='ids: expected "slot" or "position"'):
        flashdsa.dsa_topk_indexer(**_arguments(), topk_indices=out, ids=ids)
    assert (out == 7).all()
