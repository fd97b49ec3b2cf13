"""Wrong arguments of the attention operations: the right exception, naming argument and values."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flashdsa
from flashdsa.errors import ArgumentValueError
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls


def _forward_arguments() -> dict[str, Any]:
    x = inputs.attention(torch.bfloat16)
    return {"q": x.q, "kv": x.kv, "indices": x.indices, "d_v": x.d_v}


def _backward_arguments() -> dict[str, Any]:
    arguments = _forward_arguments()
    out, lse = flashdsa.sparse_mla_fwd(**arguments)
    del arguments["d_v"]
    return {**arguments, "dO": torch.ones_like(out), "lse": lse, "O": out}


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# q is (3, 2, 12), kv (7, 12), indices (3, 6), d_v 8.
SHARED = [
    ("q", [[1.0]], TypeError, r"q: expected a torch.Tensor; got list"),
    ("q", _int32(3, 2, 12), TypeError, "q: expected dtype bfloat16 or float16 or .*; got int32"),
    ("q", torch.zeros(3, 12).bfloat16(), ValueError, r"q: expected shape \[S, H, d_qk\]; got 2"),
    ("q", torch.zeros(()).bfloat16(), ValueError, r"q: expected shape \[S, H, d_qk\]; got"),
    ("q", torch.zeros(3, 0, 12).bfloat16(), ValueError, r"q: expected .*H >= 1.*\[3, 0, 12\]"),
    ("kv", None, TypeError, "kv: expected a torch.Tensor; got NoneType"),
    ("kv", torch.zeros(7, 12), TypeError, "kv: expected dtype bfloat16.*; got float32"),
    ("kv", torch.zeros(7, 2, 12).bfloat16(), ValueError, r"kv: expected one kv head.*\[7, 2, 12\]"),
    ("kv", torch.zeros(7, 13).bfloat16(), ValueError, r"kv: expected shape .*\[7, 12\]; got .*13"),
    ("kv", torch.zeros(12).bfloat16(), ValueError, r"kv: expected shape .*; got 1 dimensions"),
    ("kv", torch.zeros(2, 64, 1, 1, 12).bfloat16(), ValueError, "kv: expected shape .*; got 5 dim"),
    ("kv", torch.zeros(2, 16, 2, 12).bfloat16(), ValueError, r"kv: expected one kv head.*2, 16, 2"),
    (
        "kv",
        torch.zeros(4, 64, 12).bfloat16()[::2],
        ValueError,
        r"kv: expected pages that follow each other.*strides \[1536, 12, 1\]",
    ),
    ("kv", torch.zeros(12, 7).bfloat16().t(), ValueError, r"kv: expected a contiguous last.*1, 7"),
    ("indices", torch.zeros(3, 6), TypeError, "indices: .* dtype int32 or int64; got float32"),
    ("indices", _int32(3, 6).short(), TypeError, "indices: .* dtype int32 or int64; got int16"),
    ("indices", _int32(4, 6), ValueError, r"indices: expected shape .*\[3, 6\]; got .*\[4, 6\]"),
    ("indices", _int32(3, 0), ValueError, "indices: expected topk >= 1 columns; got 0"),
    ("indices", _int32(3, 2, 6), ValueError, r"indices: expected one kv head.*\[3, 2, 6\]"),
    ("indices", _int32(6, 3).t(), ValueError, "indices: expected a contiguous last dimension"),
    ("indices", _int32(3, 6).to("meta"), ValueError, "indices: expected device cpu .*; got meta"),
    ("topk_length", torch.zeros(3), TypeError, "topk_length: .*int32 or int64; got float32"),
    ("topk_length", _int32(2), ValueError, r"topk_length: expected shape \[S\] = \[3\]; got .*2"),
    ("attn_sink", torch.zeros(2).bfloat16(), TypeError, "attn_sink: expected dtype float32; got"),
    ("attn_sink", torch.zeros(2).double(), TypeError, "attn_sink: expected dtype float32; got"),
    ("attn_sink", torch.zeros(3), ValueError, r"attn_sink: expected shape \[H\] = \[2\]; got .*3"),
    ("indices", (_int32(3),), ValueError, r"indices: expected ids, or a pair .*; got 1 values"),
    ("indices", (_int32(3), 7), TypeError, "ends: expected a torch.Tensor; got int"),
    ("indices", (_int32(3), _int32(4)), ValueError, r"ends: expected shape \[S\] = \[3\]; got"),
    ("indices", (_int32(3, 6), _int32(3)), ValueError, r"indices: expected starts \[S\].*\[3, 6\]"),
    ("indices", (_int32(3), torch.zeros(3)), TypeError, "ends: .*int32 or int64; got float32"),
    ("index_block", 0, ValueError, "index_block: expected at least 1; got 0"),
    ("index_block", True, TypeError, "index_block: expected an integer; got bool"),
    ("extra_kv", torch.zeros(5, 12).bfloat16(), ValueError, "extra_kv: expected extra_indices"),
    ("extra_indices", _int32(3, 2), ValueError, "extra_indices: expected extra_kv beside it; got"),
    ("extra_topk_length", _int32(3), ValueError, "extra_topk_length: expected extra_kv beside it"),
    ("sm_scale", "1", TypeError, "sm_scale: expected a float or None; got str"),
    ("sm_scale", True, TypeError, "sm_scale: expected a float or None; got bool"),
    ("sm_scale", np.float32("inf"), ValueError, "sm_scale: expected a finite number; got inf"),
    ("sm_scale", torch.tensor(0.1), TypeError, "sm_scale: expected a float or None; got Tensor"),
    ("sm_scale", float("nan"), ValueError, "sm_scale: expected a finite number; got nan"),
    ("backend", None, TypeError, "backend: expected .*; got None"),
    ("backend", "gpu", ValueError, "backend: expected one of auto, cpu, .*; got 'gpu'"),
    ("backend", "sm90", NotImplementedError, "backend 'sm90'"),
]
FORWARD_ONLY = [
    ("kv", torch.zeros(7, 576).byte(), ValueError, r"kv: expected .* 656 .*; got .*\[7, 576\]"),
    ("kv", torch.zeros(7, 656).byte(), ValueError, "kv: packed rows .* of 576 columns.*got 12"),
    ("d_v", 0, ValueError, "d_v: expected at least 1; got 0"),
    ("d_v", 13, ValueError, "d_v: expected at most q's last dimension, 12.*; got 13"),
    ("d_v", 8.0, TypeError, "d_v: expected an integer; got float"),
]
BACKWARD_ONLY = [
    ("kv", torch.zeros(7, 656).byte(), NotImplementedError, "mla_bwd: packed rows .*no gradient"),
    ("dO", torch.zeros(3, 2, 8), TypeError, "dO: expected dtype bfloat16; got float32"),
    ("dO", torch.zeros(3, 2).bfloat16(), ValueError, r"dO: expected shape \[S, H, d_v\]; got 2"),
    ("dO", torch.zeros(3, 2, 13).bfloat16(), ValueError, r"dO: expected .* in \[1, 12\].*; got 13"),
    ("dO", torch.zeros(3, 8, 2).bfloat16().mT, ValueError, "dO: expected a contiguous last dim"),
    ("O", torch.zeros(3, 2, 9).bfloat16(), ValueError, r"O: expected shape .*\[3, 2, 8\]; got"),
    (
        "dO",
        torch.zeros(3, 2, 7).bfloat16(),
        ValueError,
        r"O: .*\[3, 2, 7\]; got shape \[3, 2, 8\] \(d_v is dO's; one of the two is wrong\)",
    ),
    ("O", torch.zeros(3, 2, 8), TypeError, "O: expected dtype bfloat16; got float32"),
    ("lse", torch.zeros(3, 2).bfloat16(), TypeError, "lse: expected dtype float32; got bfloat16"),
    ("lse", torch.zeros(2, 3), ValueError, r"lse: expected shape \[S, H\] = \[3, 2\]; got"),
    ("lse", torch.zeros(3, 2).to("meta"), ValueError, "lse: expected device cpu .*; got meta"),
    ("dkv_dtype", "fp32", TypeError, "dkv_dtype: expected a torch.dtype or None; got str"),
    ("dkv_dtype", torch.float16, TypeError, "dkv_dtype: expected float32 or bfloat16 or None"),
]


def _sums(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


ADDED = [
    ({"dkv": [1]}, TypeError, "^dkv: expected a torch.Tensor; got list"),
    ({"dkv": _sums(7, 12).double()}, TypeError, "^dkv: expected dtype float32; got float64"),
    ({"dkv": _sums(7, 12).bfloat16()}, TypeError, "^dkv: expected dtype float32; got bfloat16"),
    ({"dkv": _sums(7, 12), "dkv_dtype": torch.bfloat16}, TypeError, "^dkv: .* dtype bfloat16"),
    ({"dkv": _sums(7, 12), "dkv_dtype": "fp32"}, TypeError, "^dkv_dtype: expected a torch.dtype"),
    ({"dkv": _sums(7, 1, 12)}, ValueError, "^dkv: expected shape that of kv; got 3 dimensions"),
    ({"dkv": _sums(6, 12)}, ValueError, r"^dkv: .* that of kv = \[7, 12\]; got shape \[6, 12\]"),
    ({"dkv": _sums(7, 12, device="meta")}, ValueError, "^dkv: expected device cpu .*; got meta"),
    ({"extra_dkv": _sums(5, 12)}, ValueError, "^extra_dkv: expected extra_kv beside it; got None"),
]


def test_what_gradients_are_added_to(subtests: CaseLoop) -> None:
    """Refused before the backward runs: without an implementation, too."""
    arguments = {**_backward_arguments(), "backend": "sm90"}
    extra = {"extra_kv": torch.zeros(7, 12).bfloat16(), "extra_indices": _int32(3, 2)}
    for changed, error, message in ADDED:
        with subtests.test(message), pytest.raises(error, match=message):
            flashdsa.mla_bwd(**{**arguments, **changed})
        if "dkv" not in changed:
            continue
        second = {f"extra_{n}" if n == "dkv" else n: x for n, x in changed.items()}
        second = {**extra, "dkv": None, **second}
        of_second = message.replace("^dkv:", "^extra_dkv:").replace("of kv", "of extra_kv")
        with subtests.test(of_second), pytest.raises(error, match=of_second):
            flashdsa.mla_bwd(**{**arguments, **second})


TARGETS = [
    ([1], TypeError, "expected a torch.Tensor; got list"),
    (_sums(3, 6).double(), TypeError, "expected dtype float32; got float64"),
    (_sums(3, 5), ValueError, r"expected shape \[S, topk\] = \[3, 6\]; got shape \[3, 5\]"),
    (_sums(3, 6, device="meta"), ValueError, "expected device cpu .*; got meta"),
]


@pytest.mark.parametrize("index_block", [1, 4])
def test_what_targets_are_added_to(index_block: int, subtests: CaseLoop) -> None:
    arguments = _backward_arguments()
    given = {name: arguments[name] for name in ("q", "kv", "lse", "indices")}
    for total, error, message in TARGETS:
        with subtests.test(message), pytest.raises(error, match="^accumulate_into: " + message):
            flashdsa.attention_target(
                **given, index_block=index_block, accumulate_into=total, backend="sm90"
            )


def test_options_of_a_target_that_is_given_are_refused(subtests: CaseLoop) -> None:
    call = public_calls("cpu")["indexer_kl_loss"]
    names = ("q_index", "k_index", "weights", "indices")
    given = {name: call.arguments[name] for name in names}
    given["target"] = torch.ones(given["indices"].shape)
    for name, value in (("sm_scale", 0.1), ("attn_sink", torch.zeros(64)), ("index_block", 4)):
        with (
            subtests.test(name),
            pytest.raises(ValueError, match=f"^target: expected either it .*; got it and {name}$"),
        ):
            call.function(**given, **{name: value})


RANGE = (_int32(3), torch.tensor([1, 9, 3]))
SECOND = {"extra_kv": torch.zeros(5, 12).bfloat16(), "extra_indices": _int32(3, 2)}
TOGETHER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indices": RANGE, "topk_length": _int32(3)}, ValueError, "^topk_length: expected None, .*"),
    ({"indices": RANGE, "index_block": 4}, ValueError, "index_block: expected 1, .*range.*got 4"),
    (
        {**SECOND, "extra_indices": RANGE, "extra_topk_length": _int32(3)},
        ValueError,
        "extra_topk_length: expected None, since extra_indices are a range",
    ),
    ({**SECOND, "extra_indices": _int32(4, 2)}, ValueError, r"extra_indices: .*\[3, 2\]; got"),
    ({**SECOND, "extra_indices": _int32(3, 0)}, ValueError, "extra_indices: .*extra_topk >= 1"),
    ({**SECOND, "extra_topk_length": _int32(2)}, ValueError, r"extra_topk_length: .*= \[3\]"),
    ({**SECOND, "extra_kv": torch.zeros(5, 13).bfloat16()}, ValueError, r"extra_kv: .*\[5, 12\]"),
    ({**SECOND, "extra_kv": torch.zeros(5, 12)}, TypeError, "extra_kv: .* dtype bfloat16"),
    (
        {**SECOND, "extra_kv": torch.zeros(5, 2, 12).bfloat16()},
        ValueError,
        r"extra_kv: expected one kv head.*\[5, 2, 12\]",
    ),
]
"""Arguments that are wrong beside each other."""


def test_second_sources_and_ranges(subtests: CaseLoop) -> None:
    for changed, error, message in TOGETHER:
        for function, arguments in (
            (flashdsa.sparse_mla_fwd, _forward_arguments()),
            (flashdsa.mla_bwd, _backward_arguments()),
        ):
            with subtests.test(message), pytest.raises(error, match=message):
                function(**{**arguments, **changed})


def test_both_sources_have_packed_rows_or_none() -> None:
    q, ids = torch.zeros(3, 2, 576).bfloat16(), _int32(3, 6)
    rows, packed = torch.zeros(7, 576).bfloat16(), torch.zeros(7, 656).byte()
    for kv, extra in ((rows, packed), (packed, rows)):
        with pytest.raises(TypeError, match="extra_kv: expected rows as kv has them"):
            flashdsa.sparse_mla_fwd(q, kv, ids, extra_kv=extra, extra_indices=ids)


def test_forward(subtests: CaseLoop) -> None:
    for name, value, error, message in SHARED + FORWARD_ONLY:
        with subtests.test(f"{name}: {message}"):
            with pytest.raises(error, match=message):
                flashdsa.sparse_mla_fwd(**{**_forward_arguments(), name: value})
            with pytest.raises(error, match=message):
                flashdsa.sparse_mla(**{**_forward_arguments(), name: value})


def test_backward(subtests: CaseLoop) -> None:
    for name, value, error, message in SHARED + BACKWARD_ONLY:
        with subtests.test(f"{name}: {message}"), pytest.raises(error, match=message):
            flashdsa.mla_bwd(**{**_backward_arguments(), name: value})


@pytest.mark.parametrize(
    ("dtype", "dkv_dtype", "expected"),
    [(torch.float32, torch.bfloat16, "float32"), (torch.float64, torch.float32, "float64")],
)
def test_dkv_dtype_must_fit_the_inputs(
    dtype: torch.dtype, dkv_dtype: torch.dtype, expected: str
) -> None:
    x = inputs.attention(dtype)
    out, lse = flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    with pytest.raises(TypeError, match=f"dkv_dtype: expected {expected} or None"):
        flashdsa.mla_bwd(x.q, x.kv, out, lse, out, x.indices, dkv_dtype=dkv_dtype)


def test_numbers_of_numpy_are_scales() -> None:
    arguments = _forward_arguments()
    expected = flashdsa.sparse_mla_fwd(**arguments, sm_scale=float(np.float32(0.1)))
    for scale in (np.float32(0.1), np.float64(np.float32(0.1))):
        got = flashdsa.sparse_mla_fwd(**arguments, sm_scale=scale)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    flashdsa.sparse_mla_fwd(**arguments, sm_scale=np.int64(1))


FLAGS = {
    "deterministic": ("sparse_mla", "mla_bwd", "indexer_scores", "indexer_bwd", "indexer_kl_loss"),
    "sorted": ("dsa_topk_indexer", "dsa_topk_prefill", "topk_indices"),
    "return_max_logits": ("sparse_mla_fwd", "sparse_mla_fwd, buffers"),
}


def test_a_flag_is_a_bool(subtests: CaseLoop) -> None:
    each = [(flag, name) for flag, names in FLAGS.items() for name in names]
    for (flag, name), value in product(each, ["no", 1, None, torch.tensor(True)]):
        with subtests.test(f"{name}, {flag}={value!r}"):
            call = public_calls("cpu")[name]
            with pytest.raises(
                TypeError, match=f"{flag}: expected a bool; got {type(value).__name__}"
            ):
                call.function(**{**call.arguments, flag: value})


FOLDED_ATTENTION = (
    r"q: expected shape \[S, H, d_qk\]; got 4 dimensions, shape \[1, 3, 2, 12\]; fold the "
    r"batch into S \(q.flatten\(0, 1\)\) and into S_kv \(kv.flatten\(0, 1\)\), and add b \* S_kv "
    r"to the valid indices of sequence b; invalid ones stay -1"
)


def _batched(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: x[None] if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


@pytest.mark.parametrize(
    "function", [flashdsa.sparse_mla_fwd, flashdsa.sparse_mla, flashdsa.mla_bwd]
)
def test_a_batch_is_told_how_to_fold(function: Any) -> None:
    arguments = _forward_arguments()
    if function is flashdsa.mla_bwd:
        arguments = _backward_arguments()
    with pytest.raises(ValueError, match=f"^{FOLDED_ATTENTION}"):
        function(**_batched(arguments))


def test_a_batch_with_buffers_is_told_how_to_fold() -> None:
    arguments = _forward_arguments()
    out, lse = flashdsa.sparse_mla_fwd(**arguments)
    del arguments["d_v"]
    with pytest.raises(ValueError, match=f"^{FOLDED_ATTENTION}"):
        flashdsa.sparse_mla_fwd(**_batched({**arguments, "out": out, "lse": lse}))
    rows = _batched(arguments)
    operands = rows["q"], rows["kv"], rows["indices"], out, lse
    with pytest.raises(ValueError, match=f"^{FOLDED_ATTENTION}"):
        flashdsa.bind("sparse_mla_fwd_out", operands)


def test_a_batch_folded_as_the_message_says_gives_what_its_sequences_give() -> None:
    first, second = inputs.attention(torch.float64), inputs.attention(torch.float64, seed=1)
    q, kv = torch.stack([first.q, second.q]), torch.stack([first.kv, second.kv])
    indices = torch.stack([first.indices, second.indices])
    S_kv = kv.shape[1]
    valid = (indices >= 0) & (indices < S_kv)
    offset = torch.arange(2, dtype=torch.int32)[:, None, None] * S_kv
    folded = torch.where(valid, indices + offset, -1)
    got = flashdsa.sparse_mla(q.flatten(0, 1), kv.flatten(0, 1), folded.flatten(0, 1), d_v=8)
    apart = [flashdsa.sparse_mla(x.q, x.kv, x.indices, d_v=8) for x in (first, second)]
    torch.testing.assert_close(got, torch.cat(apart))


@pytest.mark.parametrize("backend", [("cpu",), ("cpu", None), ["cpu", "cpu"], 3])
def test_a_pair_of_backends_is_two_names(backend: Any) -> None:
    with pytest.raises(TypeError, match=r"backend: expected the name .* \(forward, backward\)"):
        flashdsa.sparse_mla(**_forward_arguments(), backend=backend)


def test_both_backends_of_a_pair_are_held_against_the_list_before_the_forward() -> None:
    for pair in (("cpu", "gpu"), ("gpu", "cpu")):
        with pytest.raises(ValueError, match=r"backend: expected one of auto, .*; got 'gpu'"):
            flashdsa.sparse_mla(**_forward_arguments(), backend=pair)


@pytest.mark.parametrize("name", ["indices", "extra_indices"])
def test_a_list_has_no_more_slots_than_a_length_counts(name: str) -> None:
    """Tensors without memory: one of this size would have 8 GiB."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kv = empty(9, 576)
    lists = {"indices": empty(1, 4, dtype=torch.int32)}
    if name == "extra_indices":
        lists["extra_kv"] = kv
    lists[name] = empty(1, 2**31, dtype=torch.int32)
    with pytest.raises(ArgumentValueError, match=f"{name}: expected at most 2147483647 slots"):
        flashdsa.sparse_mla(empty(1, 8, 576), kv, **lists)
