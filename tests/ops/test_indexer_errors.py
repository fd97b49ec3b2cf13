"""Wrong arguments of the indexer's operations: the right exception, and nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashdsa
from flashdsa.adapters.cudnn_dsa import local_to_global_wrapper
from flashdsa.errors import UnsupportedError
from flashdsa.ops.entries_kept import keep_last
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

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


def test_scales_of_index_keys() -> None:
    k, cache = torch.zeros(1, 128), torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    for call in (
        lambda scale: flashdsa.quantize_index_k(k, scale=scale),
        lambda scale: flashdsa.quantize_index_q(k[None], torch.zeros(1, 1), scale=scale),
        lambda scale: flashdsa.write_index_k_cache(k, torch.tensor([0]), cache, scale=scale),
    ):
        with pytest.raises(ValueError, match='scale: expected "ue8m0" or "fp32"; got \'mxfp4\''):
            call("mxfp4")
        with pytest.raises(TypeError, match='scale: expected "ue8m0" or "fp32"; got None'):
            call(None)


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


def _prefill_arguments(dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    fp8 = dtype == torch.float8_e4m3fn
    return {
        "q_index": torch.randn(3, 4, 128).to(dtype),
        "k_index": torch.randn(10, 128).to(dtype),
        "weights": torch.randn(3, 4),
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32),
        "ends": torch.tensor([5, 2, 10], dtype=torch.int32),
        "k_scale": torch.rand(10) if fp8 else None,
    }


WRONG = [
    ("q_index", 3, TypeError, "q_index: expected a torch.Tensor; got int"),
    ("q_index", torch.randn(3, 4, 128).double(), TypeError, "q_index: expected dtype float8"),
    ("q_index", torch.randn(3, 0, 128).half(), ValueError, "q_index: expected .* H >= 1"),
    ("k_index", torch.randn(10, 128), TypeError, "k_index: expected dtype float8_e4m3fn; got fl"),
    (
        "k_index",
        torch.randn(10, 64).to(torch.float8_e4m3fn),
        ValueError,
        r"k_index: expected shape \[S_kv, 128\]",
    ),
    ("weights", torch.randn(3, 5), ValueError, r"weights: expected shape \[S, H\] = \[3, 4\]"),
    ("weights", torch.randn(3, 4).half(), TypeError, "weights: expected dtype float32"),
    ("starts", torch.tensor([0, 0, 0]), TypeError, "starts: expected dtype int32; got int64"),
    ("starts", _int32(0, 0), ValueError, r"starts: expected shape \[S\] = \[3\]"),
    ("starts", _int32(0, -1, 0), ValueError, r"starts: expected values in \[0, 10\].*s\[1\] = -1"),
    ("starts", _int32(0, 0, 11), ValueError, r"starts: expected values in \[0, 10\].*\[2\] = 11"),
    ("ends", _int32(5, 1, 10), ValueError, r"ends: expected .*ends\[1\] = 1 where it starts at 2"),
    ("ends", _int32(5, 2, 11), ValueError, r"ends: expected values in \[starts, 10\]"),
    ("k_scale", None, TypeError, "k_scale: expected the scales of e4m3 keys.*got None"),
    ("k_scale", torch.rand(9), ValueError, r"k_scale: expected shape \[S_kv\] = \[10\]"),
    ("topk_indices", torch.zeros(3, 0, dtype=torch.int32), ValueError, "topk_indices: .*topk >= 1"),
    ("topk_indices", torch.zeros(3, 4), TypeError, "topk_indices: expected dtype int32"),
    ("backend", "gpu", ValueError, "backend: expected one of"),
]


def test_a_wrong_argument_is_named_and_nothing_is_written(subtests: CaseLoop) -> None:
    for name, value, error, message in WRONG:
        with subtests.test(message):
            out = torch.full((3, 4), POISON, dtype=torch.int32)
            arguments = {**_prefill_arguments(), "topk_indices": out, name: value}
            with pytest.raises(error, match=message):
                flashdsa.dsa_topk_prefill(**arguments)
            assert (out == POISON).all()
            if name not in ("topk_indices", "backend"):
                with pytest.raises(error, match=message):
                    flashdsa.prefill_logits(**{**_prefill_arguments(), name: value})


@pytest.mark.parametrize("name", ["dsa_topk_prefill", "prefill_logits"])
def test_a_batch_is_told_how_to_fold(name: str) -> None:
    call = public_calls("cpu")[name]
    batched = {n: x[None] if n in call.tensors else x for n, x in call.arguments.items()}
    with pytest.raises(
        ValueError,
        match=r"^q_index: expected shape \[S, H, 128\]; got 4 dimensions, .*; fold the batch into "
        r"S \(q_index.flatten\(0, 1\)\) and into S_kv \(k_index.flatten\(0, 1\)\), and add "
        r"b \* S_kv to the starts and ends of sequence b",
    ):
        call.function(**batched)


@pytest.mark.parametrize("name", ["indexer_scores", "indexer_bwd", "indexer_kl_loss"])
def test_a_batch_in_training_is_told_how_to_fold(name: str) -> None:
    call = public_calls("cpu")[name]
    batched = {n: x[None] if n in call.tensors else x for n, x in call.arguments.items()}
    with pytest.raises(ValueError, match=r"^q(_index)?: .*; got 4 dimensions, .*fold the batch"):
        call.function(**batched)


def test_keys_without_scales_take_none() -> None:
    arguments = {**_prefill_arguments(torch.bfloat16), "k_scale": torch.rand(10)}
    with pytest.raises(TypeError, match="k_scale: expected None, as keys of bfloat16"):
        flashdsa.prefill_logits(**arguments)


WRONG_OFFSETS = [
    (torch.tensor([0.0, 3.0]), None, TypeError, "cu_seqlens_q: expected dtype int32 or int64"),
    (torch.tensor([[0, 3]]), None, ValueError, r"cu_seqlens_q: expected shape \[B \+ 1\]"),
    (torch.tensor([0, 3]), torch.tensor([0, 1, 3]), ValueError, "cu_seqlens_k: expected B"),
    (torch.tensor([], dtype=torch.int32), None, ValueError, "cu_seqlens_q: expected B"),
]


def test_wrong_offsets_of_sequences(subtests: CaseLoop) -> None:
    for cu_q, cu_k, error, message in WRONG_OFFSETS:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.causal_ranges(cu_q, cu_k)


NO_OFFSETS = [
    ([2, 5, 8], None, None, r"cu_seqlens_q: .* begin at 0; got cu_seqlens_q\[0\] = 2"),
    ([-1, 5, 8], None, 8, r"cu_seqlens_q: .* begin at 0; got cu_seqlens_q\[0\] = -1"),
    ([0, 5, 3], None, None, r"cu_seqlens_q: .* decrease; got cu_seqlens_q\[2\] = 3 after 5"),
    ([0, 2, 5], [0, 4, 3], 5, r"cu_seqlens_k: .* decrease; got cu_seqlens_k\[2\] = 3 after 4"),
    ([0, 2, 5], [1, 4, 6], 5, r"cu_seqlens_k: .* begin at 0; got cu_seqlens_k\[0\] = 1"),
    ([0, 2, 3], None, 2, "num_queries: expected at least the last of cu_seqlens_q, 3; got 2"),
    ([0, 2, 3], None, 0, "num_queries: expected at least the last of cu_seqlens_q, 3; got 0"),
    ([0, 2], [0, 2**31], 2, r"cu_seqlens_k: expected at most 2147483647 .*k\[1\] = 2147483648"),
]


def test_offsets_that_are_none(subtests: CaseLoop) -> None:
    for cu_q, cu_k, num_queries, message in NO_OFFSETS:
        with subtests.test(message):
            keys = None if cu_k is None else torch.tensor(cu_k)
            with pytest.raises(ValueError, match=f"^{message}"):
                flashdsa.causal_ranges(torch.tensor(cu_q), keys, num_queries=num_queries)


@pytest.mark.filterwarnings("error")
def test_offsets_with_gaps_give_no_warning_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        gaps = torch.tensor([[0, 1], [24, 1], [64, 1]])[:, 0]
        found = flashdsa.causal_ranges(gaps, num_queries=64)
        assert all(map(torch.equal, found, flashdsa.causal_ranges(gaps.contiguous())))
        local = torch.zeros(64, 1, dtype=torch.int32)
        moved = local_to_global_wrapper(local, 0, cu_seqlens_q=gaps, cu_seqlens_k=gaps)["indices"]
        assert moved.flatten().tolist() == [0] * 24 + [24] * 40
        state = torch.zeros(2, 64, 2, 1)
        keep_last(state, torch.ones(64, 1), torch.ones(64, 1), gaps, torch.zeros(2).int())
        assert state.sum() == 2 * 64
    finally:
        torch.set_warn_always(before)


def test_what_holds_no_values_is_not_checked_by_them() -> None:
    def ranges(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.causal_ranges(offsets, num_queries=3)

    offsets = torch.tensor([0, 1, 3])
    starts, ends = ranges(offsets)
    assert torch.equal(make_fx(ranges)(offsets)(offsets)[1], ends)
    batched = torch.vmap(ranges)(torch.stack([offsets, offsets]))
    assert torch.equal(batched[0], torch.stack([starts, starts]))
    with FakeTensorMode():
        assert ranges(torch.zeros(3, dtype=torch.int64))[0].shape == (3,)
    assert ranges(offsets.to("meta"))[0].shape == (3,)


def test_scores_have_no_gradient() -> None:
    arguments = _prefill_arguments(torch.bfloat16)
    scores = flashdsa.prefill_logits(**{**arguments, "weights": torch.randn(3, 4).requires_grad_()})
    with pytest.raises(UnsupportedError, match="prefill_logits: no gradient"):
        scores.nan_to_num(neginf=0).sum().backward()
