"""`fake_quantize_index`: the numbers that the fp8 indexer sees, and a gradient that passes by."""

from __future__ import annotations

import pytest
import torch

import flashdsa


def test_fp32_scales_give_what_the_cache_holds(seed: int) -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(seed))
    fp8, scale = flashdsa.quantize_index_k(x)
    assert torch.equal(flashdsa.fake_quantize_index(x, scale="fp32"), fp8.float() * scale[:, None])


def test_power_of_two_scales_are_exact_in_bf16_and_use_the_range(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 128, generator=generator) * torch.logspace(-6, 3, 200)[:, None]
    x[0], x[1, 0] = 0, 448 * 4  # nothing, and a scale that is a power of two already
    wide = flashdsa.fake_quantize_index(x)
    assert torch.equal(
        flashdsa.fake_quantize_index(x.bfloat16().float()).bfloat16().float(),
        flashdsa.fake_quantize_index(x.bfloat16().float()),
    )
    assert float(wide[1, 0]) == 448 * 4
    error = ((wide - x).norm(dim=1) / x.norm(dim=1))[40:]
    assert float(error.max()) < 0.04  # e4m3 has 3 bits of mantissa: at most 1/16 a number


def test_the_gradient_passes_straight_through(seed: int) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    weight = torch.randn(4, 128)
    (flashdsa.fake_quantize_index(x) * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.zeros(3, 64), "fp32", r"x: expected a last dimension of 128; got shape \[3, 64\]"),
        (torch.zeros(128), "bf16", 'scale: expected "ue8m0" or "fp32"; got \'bf16\''),
        (torch.zeros(128, dtype=torch.int32), "fp32", "x: expected dtype"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, scale: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flashdsa.fake_quantize_index(x, scale=scale)
