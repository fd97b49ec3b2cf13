"""`fake_quantize_index`: the numbers that the fp8 indexer sees, and a gradient that passes by."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa.backends.packed_rows import next_power_of_two


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


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_as_the_cache_shows_it(value: float, scale: str) -> None:
    x = torch.ones(3, 128)
    x[1, 5] = value
    x.requires_grad_()
    out = flashdsa.fake_quantize_index(x, scale=scale)
    fp8, scales = flashdsa.quantize_index_k(x.detach())
    cached = fp8.float() * scales[:, None]
    assert torch.equal(out.isnan(), cached.isnan()) and out[1].isnan().all()
    assert torch.equal(out[::2].isfinite(), torch.ones(2, 128, dtype=torch.bool))
    out.sum().backward()
    assert x.grad is not None and (x.grad == 1).all()


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    exponent = torch.arange(-22, 121)
    power = torch.full((143,), 2.0, dtype=torch.float64).pow(exponent).float()
    above, below = power.nextafter(2 * power), power.nextafter(power / 2)
    assert torch.equal(next_power_of_two(power), power)
    assert torch.equal(next_power_of_two(above), 2 * power)
    assert torch.equal(next_power_of_two(below), power)
    kept = torch.tensor([torch.inf, torch.nan])
    torch.testing.assert_close(next_power_of_two(kept), kept, equal_nan=True)


def test_the_gradient_passes_straight_through(seed: int) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    weight = torch.randn(4, 128)
    (flashdsa.fake_quantize_index(x) * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.zeros(3, 64), "fp32", r"x: expected a last dimension of 128; got shape \[3, 64\]"),
        (torch.zeros(128), "bf16", 'scale: expected "ue8m0", "fp32" or "mxfp4"; got'),
        (torch.zeros(128, dtype=torch.int32), "fp32", "x: expected dtype"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, scale: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flashdsa.fake_quantize_index(x, scale=scale)
