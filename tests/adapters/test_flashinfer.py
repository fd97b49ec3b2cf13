"""FlashInfer's top-k functions, sparse decode and differentiable attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.adapters import flashinfer, tilelang
from tests.support.formulas import assert_close, attention


def _int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_top_k_has_values_and_int64_indices(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, 4, 4, 2], [3, 3, 3, 3]], dtype=dtype)
    values, indices = flashinfer.top_k(scores, 2, sorted=True)
    assert indices.dtype == torch.int64 and values.dtype == dtype
    assert indices.tolist() == [[1, 2], [0, 1]] and values.tolist() == [[4, 4], [3, 3]]
    assert flashinfer.top_k(scores, 3, tie_break=2)[1].tolist() == [[1, 2, 3], [1, 2, 3]]
    by_value = flashinfer.top_k(scores, 3, sorted=True, tie_break=flashinfer.TopKTieBreak.LARGE)
    assert by_value[1].tolist() == [[2, 1, 3], [3, 2, 1]]
    with pytest.raises(ValueError, match="tie_break: expected 0, 1 or 2; got 3"):
        flashinfer.top_k(scores, 2, tie_break=3)
    with pytest.raises(ValueError, match="k: expected 1 to 4"):
        flashinfer.top_k(scores, 5)


def test_top_k_as_slots_of_a_page_table() -> None:
    """Scores outside a row's window are NaN; the window begins within the row."""
    scores = torch.full((3, 8), torch.nan)
    scores[0, :5] = torch.tensor([0.0, 3, 1, 2, 5])
    scores[1, 2:6] = torch.tensor([9.0, 8, 7, 6])
    scores[2, :2] = torch.tensor([1.0, 2])
    starts, lengths = _int32(0, 2, 0), _int32(5, 4, 2)
    pages = _int32([4, 6, 0, 0], [3, 8, 5, 1])
    raw, out = torch.empty(3, 3, dtype=torch.int32), torch.empty(3, 3, dtype=torch.int32)
    got = flashinfer.top_k_page_table_transform(
        scores, pages, lengths, 3, row_to_batch=_int32(0, 1, 1), row_starts=starts,
        page_table_row_starts=_int32(0, 1, 2), page_size=4, out=out, out_raw_indices=raw,
    )  # fmt: skip
    assert got is out
    assert raw.tolist() == [[1, 3, 4], [0, 1, 2], [0, 1, -1]]
    assert out.tolist() == [[17, 19, 24], [32, 33, 34], [20, 21, -1]]
    with pytest.raises(ValueError, match="page_table_row_starts"):
        flashinfer.top_k_page_table_transform(
            scores, pages, lengths, 3, row_starts=starts, page_size=4
        )
    by_token = flashinfer.top_k_page_table_transform(
        scores[:1], torch.arange(10, 18).int()[None], lengths[:1], 7
    )
    assert by_token.tolist() == [[10, 11, 12, 13, 14, -1, -1]]


def test_each_row_of_the_transform_may_have_a_page_table_of_its_own() -> None:
    torch.manual_seed(4)
    scores, lengths = torch.randn(6, 96), _int32(96, 64, 33, 5, 1, 0)
    pages = torch.randperm(6 * 12).view(6, 12).int()
    got = flashinfer.top_k_page_table_transform(scores, pages, lengths, 9, page_size=8)
    for row, length in enumerate(lengths.tolist()):
        best = sorted(scores[row, :length].topk(min(9, length)).indices.tolist())
        slots = [int(pages[row, at // 8]) * 8 + at % 8 for at in best]
        assert got[row].tolist() == slots + [-1] * (9 - len(slots))


def test_top_k_as_ids_of_packed_keys() -> None:
    scores = torch.tensor([[1.0, 9, 8, torch.nan], [5, 6, 7, 8]])
    got = flashinfer.top_k_ragged_transform(scores, _int32(100, 200), _int32(3, 1), 2)
    assert got.tolist() == [[101, 102], [200, -1]]


@pytest.mark.parametrize("start", [None, 2])
def test_of_equal_scores_the_larger_index_on_request(start: int | None) -> None:
    """Of windows with scores outside that would win; a short row ends in -1."""
    scores = torch.full((3, 9), torch.inf)
    first = start or 0
    for row, window in enumerate(([1.0, 2, 2, 2, 0, 2], [5.0, 5], [7.0, 7, 7])):
        scores[row, first : first + len(window)] = torch.tensor(window)
    got = flashinfer.top_k_ragged_transform(
        scores,
        _int32(0, 100, 200),
        _int32(6, 2, 3),
        3,
        tie_break=2,
        row_starts=None if start is None else _int32(start, start, start),
    )
    assert got.tolist() == [[2, 3, 5], [100, 101, -1], [200, 201, 202]]


def _decode(**changed: Any) -> Any:
    torch.manual_seed(8)
    query = torch.randn(2, 2, 3, 576).bfloat16()
    cache = torch.randn(2, 64, 576).bfloat16()
    cache[1, 30:] = torch.nan
    tables = torch.randint(0, 94, (2, 2, 5), dtype=torch.int32)
    tables[0, 0, 1], tables[1, 0] = -1, -1
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": tables,
        "seq_lens": None,
        "max_seq_len": 128,
        "sparse_mla_top_k": 5,
        "bmm1_scale": 0.05,
    }
    return arguments, flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments | changed)


@pytest.mark.parametrize(("base", "factor"), [(None, 1 / math.log(2)), ("basee", 1.0)])
def test_sparse_decode(base: str | None, factor: float) -> None:
    buffer = torch.empty(4, 3)
    sink, lens = torch.randn(3), _int32([5, 4], [5, 5])
    into = torch.empty(2, 2, 3, 512, dtype=torch.bfloat16)
    arguments, (out, lse) = _decode(
        return_lse=True,
        return_lse_base=base,
        lse=buffer,
        out=into,
        sinks=[sink],
        sparse_mla_top_k_lens=lens,
    )
    rows = [
        [i for i in row[:n] if i >= 0]
        for row, n in zip(
            arguments["block_tables"].flatten(0, 1).tolist(), [5, 4, 5, 5], strict=True
        )
    ]
    expected, expected_lse = attention(
        arguments["query"].flatten(0, 1), arguments["kv_cache"].flatten(0, 1), rows, 0.05, sink=sink
    )
    assert out is into and lse is buffer
    assert_close(out, expected.view(2, 2, 3, 512), 4e-3)
    expected_lse[2] = -torch.inf
    assert_close(lse, torch.logaddexp(expected_lse, sink.double()) * factor, 1e-5)


def test_sparse_decode_without_sinks_has_no_lse_of_nothing() -> None:
    _, (_, lse) = _decode(return_lse=True)
    assert lse[2].isneginf().all() and lse[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_length_per_query_bounds_its_slots(shape: tuple[int, ...]) -> None:
    """As the slots in use, unless these are given; a length per sequence says nothing of slots."""
    lens = _int32(2, 1, 5, 4)
    expected = _decode(sparse_mla_top_k_lens=lens)[1]
    assert torch.equal(_decode(seq_lens=lens.view(shape))[1], expected)
    both = _decode(seq_lens=_int32(1, 1, 1, 1), sparse_mla_top_k_lens=lens)[1]
    assert torch.equal(both, expected)
    per_sequence = _decode(seq_lens=_int32(1, 1))[1]
    assert torch.equal(per_sequence, _decode()[1]) and not torch.equal(per_sequence, expected)


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("scale_format", ["auto", "pow2_fp32", "arbitrary-FP32"])
def test_sparse_decode_of_packed_rows(width: int, scale_format: str) -> None:
    torch.manual_seed(10)
    values = torch.randn(128, width)
    form = "v32" if width == 576 else "v32_no_rope"
    rows = flashdsa.quantize_kv(values, kv_format=form, scale="fp32")
    read = flashdsa.read_kv_cache(rows[:, None, None], torch.arange(128), kv_format=form)
    sizes = {"qk_rope_head_dim": width - 512, "kv_scale_format": scale_format}
    query = torch.randn(2, 2, 3, width).bfloat16()
    arguments, out = _decode(query=query, kv_cache=rows.view(2, 1, 64, -1), **sizes)
    ids = [[i for i in row if i >= 0] for row in arguments["block_tables"].flatten(0, 1).tolist()]
    expected, _ = attention(query.flatten(0, 1), read, ids, 0.05)
    assert_close(out, expected.view(2, 2, 3, 512), 4e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sparse_mla_top_k", 0),
        ("bmm1_scale", torch.tensor(1.0)),
        ("bmm2_scale", 2.0),
        ("bmm2_scale", torch.tensor(1.0)),
        ("kv_lora_rank", 256),
        ("cum_seq_lens_q", torch.tensor([0])),
        ("enable_dcp", True),
        ("kv_scale_format", "ue8m0_g32"),
        ("kv_scale_format", "arbitrary_fp32"),
        ("skip_softmax_threshold_scale_factor", 0.1),
        ("uses_shared_paged_kv_idx", False),
        ("causal_seqlens_kv_global", torch.tensor([0])),
    ],
)
def test_what_decode_refuses_is_named(name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=name):
        _decode(**{name: value})


def _training() -> tuple[list[Tensor], Tensor, list[list[int]]]:
    torch.manual_seed(9)
    leaves = [torch.randn(*shape) for shape in ((3, 2, 512), (3, 2, 64), (9, 512), (9, 64))]
    leaves[2][8] = torch.nan
    indices = _int32([0, 5, -1, 2], [9, 7, 7, -1], [-1, -1, 2**30, -1])
    return leaves, indices, [[0, 5, 2], [7, 7], []]


def test_attention_of_latent_and_rope_apart() -> None:
    leaves, indices, rows = _training()
    q, kv = torch.cat(leaves[:2], -1), torch.cat(leaves[2:], -1)
    out, lse = flashinfer.dsa_sparse_attention(*leaves, indices, return_lse=True)
    expected, expected_lse = attention(q, kv, rows, 576**-0.5)
    expected_lse[2] = -torch.inf
    assert_close(out, expected, 1e-5)
    assert_close(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("mapped", [False, True], ids=["own rows", "mapped rows"])
@pytest.mark.parametrize("given", ["tensor", "callable"])
@pytest.mark.parametrize("direct", [None, True])
def test_gradients_of_keys_are_added_to_the_callers_buffer(
    mapped: bool, given: str, direct: bool | None
) -> None:
    leaves, indices, _ = _training()
    plain = [x.clone().requires_grad_() for x in leaves]
    dout = torch.randn(3, 2, 512)
    flashinfer.dsa_sparse_attention(*plain, indices).backward(dout)
    wanted = torch.cat([x.grad for x in plain[2:] if x.grad is not None], -1)
    target = _int32(0, 1, 2, 3, 3, 2, 1, 0, 4) if mapped else torch.arange(9)
    accumulated = torch.ones(9, 600)
    own = [x.clone().requires_grad_() for x in leaves]
    destination: dict[str, Any] = {"dkv_acc": accumulated}
    if mapped:
        destination["dkv_dst_map"] = target
    if given == "callable":
        both = (accumulated, target) if mapped else accumulated
        destination = {"dkv_acc": lambda: both}
    out = flashinfer.dsa_sparse_attention(*own, indices, **destination, dkv_direct=direct)
    out.backward(dout)
    expected = torch.zeros(9, 576).index_add_(0, target.long(), wanted)
    assert_close(accumulated[:, :576] - 1, expected, 1e-5)
    assert (accumulated[:, 576:] == 1).all()
    assert all(x.grad is None or not x.grad.any() for x in own[2:])
    for mine, theirs in zip(own[:2], plain[:2], strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close(mine.grad, theirs.grad, 1e-6)
    with pytest.raises(ValueError, match="dkv_dst_map"):
        flashinfer.dsa_sparse_attention(*leaves, indices, dkv_dst_map=target)


@pytest.mark.parametrize(
    ("buffer", "target", "said"),
    [
        (torch.zeros(9, 600), [0, 1, 2, 3, 9, 0, 1, 2, 3], r"dkv_dst_map: expected .* \[0, 9\)"),
        (torch.zeros(9, 600), [0, 1, 2, 3, -1, 0, 1, 2, 3], "dkv_dst_map: expected"),
        (torch.zeros(9, 600), [0, 1], "dkv_dst_map: expected shape"),
        (torch.zeros(8, 576), None, "dkv_acc: expected"),
        (torch.zeros(9, 575), None, "dkv_acc: expected"),
        (torch.zeros(9, 576).half(), None, "dkv_acc: expected"),
        (lambda: (torch.zeros(9, 576), torch.arange(9)), [0] * 9, "dkv_dst_map: expected one"),
    ],
    ids=["beyond", "negative", "short map", "few rows", "few columns", "dtype", "two maps"],
)
def test_wrong_destinations_of_gradients_are_named(
    buffer: Any, target: list[int] | None, said: str
) -> None:
    """On the CPU they are looked at without `check_dst_map`; nothing is added then."""
    leaves, indices, _ = _training()
    own = [x.requires_grad_() for x in leaves]
    given = None if target is None else _int32(*target)
    out = flashinfer.dsa_sparse_attention(*own, indices, dkv_acc=buffer, dkv_dst_map=given)
    with pytest.raises(ValueError, match=said):
        out.sum().backward()
    assert callable(buffer) or not buffer.any()


def test_destinations_are_not_looked_at_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`check_dst_map` decides, whatever the device."""
    read: list[int] = []
    monkeypatch.setattr(flashinfer, "_require_rows", lambda *given: read.append(1))
    leaves, indices, _ = _training()
    for check in (False, None, True):
        own = [x.clone().requires_grad_() for x in leaves]
        out = flashinfer.dsa_sparse_attention(
            *own, indices, dkv_acc=torch.zeros(9, 576), dkv_dst_map=torch.arange(9).int(),
            check_dst_map=check,
        )  # fmt: skip
        out.sum().backward()
    assert len(read) == 2


def test_autocast_casts_what_goes_to_the_callers_buffer_too() -> None:
    leaves, indices, _ = _training()
    dout = torch.randn(3, 2, 512).bfloat16()
    found = []
    for cast, autocast in ((torch.Tensor.bfloat16, False), (torch.Tensor.float, True)):
        own = [x.clone().requires_grad_() for x in leaves]
        buffer = torch.zeros(9, 576)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = flashinfer.dsa_sparse_attention(*map(cast, own), indices, dkv_acc=buffer)
            out.backward(dout)
        found.append([out, buffer, own[0].grad, own[1].grad])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected) and got.any()


def test_tilelangs_causal_rule_becomes_minus_one() -> None:
    indices = _int32([0, 3, 5, 8], [2, 7, -1, 6])
    got = tilelang.indices_from_tilelang(indices, _int32(3, 6), num_keys=8)
    assert got.tolist() == [[0, 3, -1, -1], [2, -1, -1, 6]]
    batched = tilelang.indices_from_tilelang(indices[None, :, None], _int32(3, 6), num_keys=8)
    assert batched[0, :, 0].tolist() == got.tolist()
