"""torch's own checks of each custom op: schema, fake implementation, autograd, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

import flashdsa
from flashdsa.backends import registry as registry_module
from flashdsa.backends.cpu import prefill as cpu_prefill
from flashdsa.dispatch.registration import custom_op
from flashdsa.ops import OPERATIONS
from tests.ops import inputs


@pytest.fixture(autouse=True)
def _compare_float8_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.allclose, by which opcheck sees mutated arguments, lacks float8: compare as fp32."""
    allclose = torch.allclose

    def allclose_with_float8(a: torch.Tensor, b: torch.Tensor, **options: Any) -> bool:
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.float(), b.float()
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose_with_float8)


NO_RANGES = (None,) * 5
"""ends, and the four tensors of a second source."""


def _second_source(dtype: torch.dtype, grad: bool = False) -> tuple[Any, ...]:
    """No ends, then rows and a range of them."""
    x = inputs.attention(dtype, seed=1)
    starts, ends = (torch.tensor(one, dtype=torch.int32) for one in ([[0], [-2], [5]], [4, 3, 9]))
    return None, x.kv.requires_grad_(grad), starts, None, ends


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck_of_two_sources(grad: bool) -> None:
    x, second = inputs.attention(torch.float32), _second_source(torch.float32, grad)
    q, kv = x.q.requires_grad_(grad), x.kv.requires_grad_(grad)
    lists = x.indices, x.topk_length, x.attn_sink, *second
    opcheck(
        custom_op(OPERATIONS["sparse_mla_fwd"]),
        (q, kv, *lists, x.d_v, 0.3, False, "cpu", True, 2, True, None, "cpu"),
    )
    out, lse = torch.randn(3, 2, x.d_v), torch.randn(3, 2)
    args = (
        q.detach(), kv.detach(), out, lse, out, *(None if y is None else y.detach() for y in lists),
    )  # fmt: skip
    opcheck(custom_op(OPERATIONS["mla_bwd"]), (*args, 0.3, True, None, 2, "cpu"))


def _forward_args(dtype: torch.dtype, grad: bool, optional: bool) -> tuple[Any, ...]:
    x = inputs.attention(dtype)
    q, kv = x.q.requires_grad_(grad), x.kv.requires_grad_(grad)
    length, sink = (x.topk_length, x.attn_sink.requires_grad_(grad)) if optional else (None, None)
    lists = x.indices, length, sink, *NO_RANGES
    return (q, kv, *lists, x.d_v, 0.3, False, "cpu", optional, 1, False, None, "cpu")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "sink_and_length"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_opcheck_sparse_mla_fwd(dtype: torch.dtype, optional: bool, grad: bool) -> None:
    opcheck(custom_op(OPERATIONS["sparse_mla_fwd"]), _forward_args(dtype, grad, optional))


@pytest.mark.parametrize("optional", [False, True], ids=["plain", "max_logits_and_length"])
def test_opcheck_sparse_mla_fwd_out(optional: bool) -> None:
    x = inputs.attention(torch.bfloat16)
    rows = x.q.shape[:2]
    out, lse = torch.zeros(*rows, x.d_v, dtype=torch.bfloat16), torch.zeros(rows)
    further = (torch.zeros(rows), x.topk_length, x.attn_sink) if optional else (None,) * 3
    args = (x.q, x.kv, x.indices, out, lse, *further, *NO_RANGES, 0.3, 1, False, None, "cpu")
    opcheck(custom_op(OPERATIONS["sparse_mla_fwd_out"]), args)


@pytest.mark.parametrize("dkv_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "sink_and_length"])
def test_opcheck_mla_bwd(optional: bool, dkv_dtype: torch.dtype | None) -> None:
    x = inputs.attention(torch.bfloat16)
    length, sink = (x.topk_length, x.attn_sink) if optional else (None, None)
    out, lse = flashdsa.sparse_mla_fwd(
        x.q, x.kv, x.indices, d_v=x.d_v, topk_length=length, attn_sink=sink
    )
    args = (x.q, x.kv, torch.randn_like(out), lse, out, x.indices, length, sink)
    opcheck(custom_op(OPERATIONS["mla_bwd"]), (*args, *NO_RANGES, 0.3, True, dkv_dtype, 1, "cpu"))


INDEXER = {
    "dsa_topk_indexer": {"candidates": torch.tensor([[1, 0], [3, -1]]).int(), "block": 8},
    "indexer_logits": {},
    "topk_indices": {"sorted": True},
    "dsa_topk_prefill": {
        "q_index": torch.randn(3, 4, 128).bfloat16(),
        "k_index": torch.randn(64, 128).bfloat16(),
        "k_scale": None,
        "sorted": True,
        "block": 2,
    },
    "prefill_logits": {"starts": None},
    "quantize_index_k": {"k": torch.randn(3, 128).bfloat16()},
    "quantize_index_q": {"q": torch.randn(3, 4, 128).bfloat16(), "mxfp4": True},
    "write_index_k_cache": {},
    "read_index_k_cache": {},
    "attention_target": {"sm_scale": 0.3},
    "indexer_scores": {},
    "indexer_bwd": {"deterministic": True},
    "indexer_kl": {},
    "indexer_kl_bwd": {},
}
"""What is other than in a small call."""


@pytest.mark.parametrize("name", INDEXER)
def test_opcheck_indexer(name: str) -> None:
    spec, call = OPERATIONS[name], inputs.small_calls()[name]
    given = {**call.arguments, **INDEXER[name]}
    operands = tuple(given.get(row.name) for row in spec.operands)
    if name in ("indexer_scores", "indexer_kl"):
        for argument in ("q_index", "k_index", "weights", "scores"):
            if argument in given:
                given[argument].requires_grad_()
    values = spec.filled(operands, {"table_page_size": 64, "check": True, **given})
    opcheck(custom_op(spec), (*operands, *values.values(), "cpu"))


def test_fakes_give_the_shapes_and_dtypes_of_the_real_ones_beyond_2_31_elements() -> None:
    with torch.device("meta"):
        q = torch.empty(60_000, 128, 576, dtype=torch.bfloat16)
        kv = torch.empty(4_000_000, 1, 576, dtype=torch.bfloat16)
        indices = torch.empty(60_000, 2048, dtype=torch.int32)
    out, lse = flashdsa.sparse_mla_fwd(q, kv, indices)
    assert out.shape == (60_000, 128, 512)
    assert out.numel() > 2**31
    assert lse.dtype == torch.float32
    dq, dkv = flashdsa.mla_bwd(q, kv, out, lse, out, indices)
    assert dq.shape == q.shape
    assert dkv.shape == kv.shape
    assert dkv.dtype == torch.float32


def test_an_operation_that_writes_returns_nothing(
    monkeypatch: pytest.MonkeyPatch, new_calls: None
) -> None:
    """torch's dispatcher takes nothing else, whatever an implementation returns."""
    real = cpu_prefill.topk_prefill

    def returning(*operands: Any, **parameters: Any) -> int:
        real(*operands, **parameters)
        return 1

    monkeypatch.setattr(registry_module, "_load", lambda _: returning)
    q, k = torch.randn(2, 3, 128), torch.randn(5, 128)
    ends, ids = torch.tensor([3, 5], dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    op = torch.ops.flashdsa.dsa_topk_prefill.default
    assert op(q, k, torch.ones(2, 3), ends, ids, None, None, None, False, 1, "cpu") is None
    assert ids[0].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck_of_what_no_trace_goes_through(grad: bool) -> None:
    opcheck(torch.ops.flashdsa.checked_slots.default, (torch.tensor([2, -1, 0]), 3, True))
    x, ends = inputs.attention(torch.float32), torch.tensor([4, 9, 2], dtype=torch.int32)
    trained = (torch.randn(3, 2, 128), torch.randn(9, 128), torch.randn(3, 2))
    given = (*(y.requires_grad_(grad) for y in trained), x.q, torch.randn(9, x.q.shape[2]))
    opcheck(
        torch.ops.flashdsa.indexer_kl_loss_dense.default,
        (*given, torch.randn(3, 2) + 4, ends, None, None, 0.3, 1000, False),
    )
