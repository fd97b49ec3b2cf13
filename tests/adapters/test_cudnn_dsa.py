"""cuDNN Frontend's sparse attention and top-k: results by name, gradients, buffers, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdsa.adapters.cudnn_dsa import DSA, _torch_stream
from tests.support.formulas import assert_close, attention, largest_logits

ROWS = [[3, 0, 7], [5], []]


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, indices, topk_length; keys 8 and 9 are NaN, and only invalid slots name them."""
    torch.manual_seed(6)
    q, kv = torch.randn(3, 2, 576).to(dtype), torch.randn(10, 576).to(dtype)
    kv[8:] = torch.nan
    indices = torch.tensor([[3, -1, 0, 7], [5, 10, 8, 9], [8, 9, 8, 9]], dtype=torch.int32)
    return q, kv, indices, torch.tensor([4, 2, 0], dtype=torch.int32)


def test_attention_with_autograd_and_the_backward_by_itself() -> None:
    q, kv, indices, lengths = _inputs()
    sink = torch.tensor([0.3, -0.5], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, kv, sink)]
    result = DSA.sparse_attention(leaves[0], leaves[1], indices, leaves[2], topk_length=lengths)
    out, max_logits, lse = result
    expected, expected_lse = attention(q, kv, ROWS, 576**-0.5, sink=sink)
    assert_close(out.detach(), expected, 1e-11)
    assert_close(lse, expected_lse, 1e-11)
    assert_close(max_logits, largest_logits(q, kv, ROWS, 576**-0.5), 1e-11)
    assert result["out"] is result.out is result[0]
    dout = torch.randn_like(out)
    out.backward(dout)

    dq, dkv = torch.full_like(q, 9.0), torch.full_like(kv, 9.0)
    got = DSA.sparse_attention_backward_wrapper(
        q, kv, out.detach(), dout, lse, sink, indices, topk_length=lengths, dq=dq, dkv=dkv
    )
    assert got["dq"] is dq and got["dkv"] is dkv
    for gradient, leaf in zip((dq, dkv, got["d_sink"]), leaves, strict=True):
        assert leaf.grad is not None
        assert_close(gradient, leaf.grad, 1e-11)
    assert not dkv[8:].any() and not dq[2].any()


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, kv, indices, lengths = _inputs(torch.bfloat16)
    sink = torch.full((2,), -torch.inf)
    got = DSA.sparse_attention_forward_wrapper(q, kv, indices, topk_length=lengths)
    assert list(got.keys()) == ["out", "max_logits", "lse", "lse_indexer"]
    gradients = DSA.sparse_attention_backward_wrapper(
        q, kv, got.out, torch.randn_like(got.out), got.lse, sink, indices, topk_length=lengths
    )
    assert not gradients.d_sink.any() and gradients.dkv.dtype == torch.bfloat16
    assert gradients.dq.isfinite().all() and gradients.dkv.isfinite().all()


def test_handle_0_is_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """ExternalStream(0) is a new stream of torch's, which does not wait for the inputs."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    device = torch.device("cuda", 1)
    assert _torch_stream(0, device) == ("default", device)
    assert _torch_stream(0x7F00, device) == (0x7F00, device)


def test_the_forward_wrapper_records_no_gradient_and_names_what_it_refuses() -> None:
    q, kv, indices, _ = _inputs()
    out = DSA.sparse_attention_forward_wrapper(q.requires_grad_(), kv, indices)["out"]
    assert not out.requires_grad
    with pytest.raises(ValueError, match="indexer_topk: expected 0 to"):
        DSA.sparse_attention_forward_wrapper(q, kv, indices, indexer_topk=indices.shape[1] + 1)
    with pytest.raises(AttributeError):
        _ = DSA.sparse_attention(q, kv, indices).no_such_name


def test_lse_of_the_first_slots() -> None:
    q, kv, indices, lengths = _inputs()
    got = DSA.sparse_attention_forward_wrapper(q, kv, indices, topk_length=lengths, indexer_topk=3)
    _, expected = attention(q, kv, [[3, 0], [5], []], 576**-0.5)
    assert_close(got.lse_indexer, expected, 1e-11)
    plain = DSA.sparse_attention_forward_wrapper(q, kv, indices, topk_length=lengths)
    assert plain.lse_indexer is None and torch.equal(got.out, plain.out)


def test_queries_without_any_slot() -> None:
    """No columns; and a backward whose lse is -inf there, as cuDNN's own reference has it."""
    q, kv, indices, lengths = _inputs()
    none = DSA.sparse_attention_forward_wrapper(q, kv, indices[:, :0])
    assert not none.out.any() and none.lse.isposinf().all() and none.max_logits.isneginf().all()
    got = DSA.sparse_attention_forward_wrapper(q, kv, indices, topk_length=lengths)
    lse = torch.where(got.lse.isposinf(), -torch.inf, got.lse)
    sink, dout = torch.zeros(2, dtype=torch.float64), torch.randn_like(got.out)
    same = [
        DSA.sparse_attention_backward_wrapper(
            q, kv, got.out, dout, x, sink, indices, topk_length=lengths
        )
        for x in (got.lse, lse)
    ]
    for first, second in zip(*same, strict=True):
        assert torch.equal(first, second) and first.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_k_of_staggered_rows_with_ties(dtype: torch.dtype) -> None:
    """Two rows a sequence, the first of which sees a key less; ties go to the smallest index."""
    values = torch.tensor([[1.0, 5, 5, 5, 9, 9], [1, 5, 5, 5, 9, 9], [2, 1, 0, 9, 9, 9],
                           [2, 1, 0, 9, 9, 9]], dtype=dtype)  # fmt: skip
    values[2:, 3:] = torch.nan
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    got = DSA.indexer_top_k_wrapper(values, lengths, 3, next_n=2, tie_break=1)
    assert got.indices.tolist() == [[1, 2, 3], [1, 2, 4], [0, 1, -1], [0, 1, 2]]
    assert got["values"].dtype == dtype
    assert got["values"].tolist() == [[5, 5, 5], [5, 5, 9], [2, 1, -torch.inf], [2, 1, 0]]
    assert DSA.indexer_top_k_wrapper(values[:2], lengths, 3, return_val=False)["values"] is None
    larger = DSA.indexer_top_k_wrapper(values, lengths, 2, next_n=2, tie_break=2).indices
    assert larger.tolist() == [[2, 3], [3, 4], [0, 1], [0, 1]]


def test_top_k_names_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="tie_break: expected 0, 1 or 2; got 3"):
        DSA.indexer_top_k_wrapper(torch.zeros(1, 4), torch.ones(1).int(), 2, tie_break=3)
    with pytest.raises(ValueError, match="input_values: expected 1 x next_n = 2 rows; got 1"):
        DSA.indexer_top_k_wrapper(torch.zeros(1, 4), torch.ones(1).int(), 2, next_n=2)


def test_local_ids_become_global_ones() -> None:
    local = torch.tensor([[[0, -1]], [[3, 2]]], dtype=torch.int64)
    got = DSA.local_to_global_wrapper(local, 10)["indices"]
    assert got.tolist() == [[[0, -1]], [[13, 12]]] and got.dtype == torch.int32
    packed = torch.tensor([[0, 1], [2, -1], [0, -3]], dtype=torch.int32)
    cu_q, cu_k = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 5, 12]).int()
    moved = DSA.local_to_global_wrapper(packed, 0, cu_q, cu_k)["indices"]
    assert moved.tolist() == [[0, 1], [7, -1], [5, -1]]
    with pytest.raises(ValueError, match="cu_seqlens"):
        DSA.local_to_global_wrapper(packed, 0, cu_q)
    with pytest.raises(ValueError, match="local_indices"):
        DSA.local_to_global_wrapper(packed, 4)


def test_ids_that_int32_does_not_hold_name_no_key() -> None:
    local = torch.tensor([[[3, 2**32 + 3, 2**63 - 1, -(2**32) + 3]]])
    moved = DSA.local_to_global_wrapper(local, 10)["indices"].tolist()[0][0]
    assert moved == [3, 2**31 - 1, 2**31 - 1, -1]


def test_valid_ids_move_to_the_front_in_their_order() -> None:
    rows = torch.tensor([[[-1, 4, -7, 2]], [[0, -1, -1, 9]]], dtype=torch.int32)
    indices, lengths = DSA.compactify_wrapper(rows)
    assert indices.tolist() == [[4, 2, -1, -1], [0, 9, -1, -1]]
    assert lengths.tolist() == [2, 2] and lengths.dtype == torch.int32
