"""torch's default dtype and autocast are the caller's: no operation computes otherwise for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flashdsa
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import Call

BF16, FP32 = torch.bfloat16, torch.float32
INDEXER = ("q_index", "k_index")
CASTING = {
    "sparse_mla": ("q", "kv", "extra_kv"),
    "sparse_mla_fwd": ("q", "kv", "extra_kv"),
    "attention_target": ("q", "kv"),
    "indexer_scores": INDEXER,
    "indexer_kl_loss": ("q", "kv", *INDEXER),
}
"""Arguments that autocast casts, as documents say."""
DIFFERENTIABLE = {
    *("sparse_mla", "fake_quantize_index", "indexer_scores", "indexer_kl", "indexer_kl_loss"),
    *("indexer_kl_loss_dense", "compress_kv", "rotate_tail"),
}
ROWS = {"q", "kv", "extra_kv", "dO", "O", "out", "outs", *INDEXER, "k", "x", "gate"}
ROWS |= {"state", "grad_entries"}
"""Arguments that may be bf16 or fp32."""
FORMS: dict[str, dict[str, Any]] = {
    "attention_target": {"accumulate_into": None},
    "dsa_topk_prefill": {"sorted": True},
    "fake_quantize_index": {"scale": "fp32"},
    "quantize_kv": {"scale": "fp32"},
    "sparse_mla_fwd": {"return_max_logits": True},
    "topk_indices": {"sorted": True},
}
"""What makes another form of a call."""


def _of_other_dtypes(name: str, call: Call) -> Call | None:
    """bf16 rows in fp32, fp32 ones in bf16; the e4m3 keys of a prefill as bf16. None: has none."""
    arguments = dict(call.arguments)
    if "k_scale" in arguments:
        arguments |= {n: arguments[n].to(BF16) for n in INDEXER} | {"k_scale": None}
        return call._replace(arguments=arguments)
    for argument, x in arguments.items():
        if argument in ROWS or name.startswith("lse_"):
            arguments[argument] = x.to(FP32 if x.dtype is BF16 else BF16) if x.itemsize > 1 else x
    if all(x is call.arguments[argument] for argument, x in arguments.items()):
        return None
    return call._replace(arguments=arguments)


CALLS = inputs.small_calls()
CALLS["warm_up"] = Call(flashdsa.warm_up, {"operation": "topk_indices", "backend": "cpu"})
for each, changed in FORMS.items():
    arguments = {**CALLS[each].arguments, **changed}
    CALLS[f"{each}, again"] = CALLS[each]._replace(arguments=arguments)
for each in [*CALLS]:
    if (other := _of_other_dtypes(each, CALLS[each])) is not None:
        CALLS[f"{each}, other dtypes"] = other


def _bits(name: str, cast: bool = False) -> list[tuple[torch.dtype, bytes]]:
    """What a call gives and writes, and what `backward()` brings.

    Args:
        cast: what autocast casts is bf16 already.
    """
    function, given, _ = CALLS[name]
    public, _, form = name.partition(", ")
    copies: dict[str, Any] = {
        n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()
    }
    tensors = [x for x in copies.values() if isinstance(x, Tensor)]
    if public in DIFFERENTIABLE and "state" not in form and "cache" not in form:
        for x in tensors:
            x.requires_grad_(x.is_floating_point())
    casting = CASTING.get(public, ()) if cast and "buffers" not in form else ()
    of_call = {
        n: x.bfloat16() if n in casting and x.is_floating_point() else x for n, x in copies.items()
    }
    results = function(**of_call)
    results = [results] if isinstance(results, Tensor) else list(results or ())
    wanted = [x.double().square().sum() for x in results if x.requires_grad]
    if wanted:
        torch.stack(wanted).sum().backward()
    gradients = [x.grad for x in tensors if x.grad is not None]
    assert bool(gradients) == any(x.requires_grad for x in tensors)
    every = [x.detach() for x in (*results, *tensors, *gradients)]
    return [(x.dtype, x.reshape(-1).view(torch.uint8).numpy().tobytes()) for x in every]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_every_function_is_called() -> None:
    assert {name.partition(",")[0] for name in CALLS} == set(flashdsa.__all__) - {"explain"}
    assert {*CASTING, *DIFFERENTIABLE} <= set(flashdsa.__all__)


def test_the_default_dtype_changes_no_bit(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    for name, dtype in product(CALLS, [torch.float64, BF16]):
        new_calls()
        with subtests.test(f"{name}, default {dtype}"):
            with default_dtype(dtype):
                got = _bits(name)
            assert got == _bits(name)


def test_autocast_casts_what_documents_say_and_changes_no_bit_else(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    for name, served in product(CALLS, [False, True]):
        new_calls()
        with subtests.test(f"{name}, {served=}"):
            if served:
                _bits(name)
            with torch.autocast("cpu", dtype=BF16):
                got = _bits(name)
            assert got == _bits(name, cast=True)
