"""Wrong arguments of the indexer over shared keys: the right exception, and nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashdsa
from flashdsa.errors import UnsupportedError
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

POISON = 123


def _arguments(dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    fp8 = dtype == torch.float8_e4m3fn
    return {
        "q_index": torch.randn(3, 4, 128).to(dtype),
        "k_index": torch.randn(10, 128).to(dtype),
        "weights": torch.randn(3, 4),
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32),
        "ends": torch.tensor([5, 2, 10], dtype=torch.int32),
        "k_scale": torch.rand(10) if fp8 else None,
    }


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
            arguments = {**_arguments(), "topk_indices": out, name: value}
            with pytest.raises(error, match=message):
                flashdsa.dsa_topk_prefill(**arguments)
            assert (out == POISON).all()
            if name not in ("topk_indices", "backend"):
                with pytest.raises(error, match=message):
                    flashdsa.prefill_logits(**{**_arguments(), name: value})


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
    arguments = {**_arguments(torch.bfloat16), "k_scale": torch.rand(10)}
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
    ([0, 2, 3], None, 9, "num_queries: expected the last of cu_seqlens_q, 3; got 9"),
    ([0, 2, 3], None, 2, "num_queries: expected the last of cu_seqlens_q, 3; got 2"),
    ([0, 2, 3], None, 0, "num_queries: expected the last of cu_seqlens_q, 3; got 0"),
    ([0, 2], [0, 2**31], 2, r"cu_seqlens_k: expected at most 2147483647 .*k\[1\] = 2147483648"),
]


def test_offsets_that_are_none(subtests: CaseLoop) -> None:
    for cu_q, cu_k, num_queries, message in NO_OFFSETS:
        with subtests.test(message):
            keys = None if cu_k is None else torch.tensor(cu_k)
            with pytest.raises(ValueError, match=f"^{message}"):
                flashdsa.causal_ranges(torch.tensor(cu_q), keys, num_queries=num_queries)


def test_where_values_are_not_checked_offsets_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashdsa.dispatch.checks.are_values_read", lambda tensor: False)
    starts, ends = flashdsa.causal_ranges(torch.tensor([0, 2, 3]), num_queries=5)
    assert starts.tolist() == [0, 0, 2, 2, 2] and ends.tolist() == [1, 2, 3, 4, 5]
    starts, ends = flashdsa.causal_ranges(torch.tensor([0, 2, 3]), num_queries=2)
    assert starts.tolist() == [0, 0] and ends.tolist() == [1, 2]


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
    arguments = _arguments(torch.bfloat16)
    scores = flashdsa.prefill_logits(**{**arguments, "weights": torch.randn(3, 4).requires_grad_()})
    with pytest.raises(UnsupportedError, match="prefill_logits: no gradient"):
        scores.nan_to_num(neginf=0).sum().backward()
