"""Rows as other libraries' writers have them, byte for byte: which are equal, and where not.

Each model says what a peer's quantiser computes, in fp32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.mxfp4 import pack_keys

SMALL = 1e-4 * 448
"""Largest number of a group below which writers have different floors."""


def rows_of_any_size(columns: int) -> Tensor:
    """(300, columns) bf16, of sizes 1e-7 to 1e4, zeros and powers of two times 448 among them."""
    torch.manual_seed(0)
    rows = torch.randn(300, columns) * torch.logspace(-7, 4, 300)[:, None]
    rows[7], rows[8], rows[9] = 0, 448 * 2.0**-3, 448 * 2.0**-3 + 1
    return rows.bfloat16()


def ceil_to_power(scale: Tensor) -> Tensor:
    """2 to the ceiling of the logarithm."""
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float()


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Bytes of groups, each over its scale."""
    return (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("rule", ["fp32", "ue8m0"])
def test_rows_of_656_bytes_are_flashmlas_unless_a_group_is_small(rule: str) -> None:
    """Its floor, and vLLM's, is on the scale; ours is on the largest number, and nearer."""
    x = rows_of_any_size(576)
    groups = x[:, :512].float().unflatten(1, (4, 128))
    largest = groups.abs().amax(-1)
    scale = (largest / 448).clamp_min(1e-4)
    scale = ceil_to_power(scale) if rule == "ue8m0" else scale
    theirs = torch.cat(
        [e4m3(groups, scale).flatten(1), scale.view(torch.uint8), x[:, 512:].view(torch.uint8)], 1
    )
    ours = flashdsa.quantize_kv(x, scale=rule)
    differ = (ours != theirs).any(1)
    assert torch.equal(differ & (largest.amin(1) >= SMALL), torch.zeros(300, dtype=torch.bool))
    assert differ.sum() > 100
    every = torch.arange(300)
    error = [
        (flashdsa.read_kv_cache(one, every).double() - x.double())[differ].norm()
        for one in (ours, theirs)
    ]
    assert error[0] < error[1]


@pytest.mark.parametrize(("name", "group"), [("v4", 64), ("v41_interleaved", 32)])
def test_rows_with_power_scales_are_the_servers_unless_a_group_is_small(
    name: str, group: int
) -> None:
    """FlashMLA's floor is on the scale, as ours; that of SGLang's V4 and vLLM's V4.1 on the largest
    number."""
    x = rows_of_any_size(512)
    coded = 448 if name == "v4" else 512
    groups = x[:, :coded].float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1)
    rope = x[:, coded:].contiguous().view(torch.uint8)
    unused = torch.zeros(300, 1 if name == "v4" else 0, dtype=torch.uint8)
    ours = flashdsa.quantize_kv(x, kv_format=name)
    for floor_on_scale in (True, False):
        floored = (
            (largest / 448).clamp_min(1e-4) if floor_on_scale else largest.clamp_min(1e-4) / 448
        )
        scale = ceil_to_power(floored)
        exponents = (scale.log2() + 127).to(torch.uint8)
        theirs = torch.cat([e4m3(groups, scale).flatten(1), rope, exponents, unused], 1)
        differ = (ours != theirs).any(1)
        if floor_on_scale:
            assert not differ.any()
        else:
            assert not differ[largest.amin(1) >= SMALL].any() and differ.any()


def test_index_keys_are_sglangs_and_with_power_scales_vllms(backend: str, device: str) -> None:
    """Pages too: 64 keys, then 64 scales in fp32."""
    x = rows_of_any_size(128)
    plain = x.float().abs().amax(-1).clamp_min(1e-4) / torch.tensor(448.0)
    cache = torch.zeros(5, 64, 1, 132, dtype=torch.uint8, device=device)
    slots = torch.arange(300, device=device)
    for rule, scale in (("fp32", plain), ("ue8m0", ceil_to_power(plain))):
        codes = e4m3(x.float(), scale)
        fp8, found = flashdsa.quantize_index_k(x.to(device), scale=rule, backend=backend)
        assert torch.equal(found.cpu(), scale) and torch.equal(fp8.cpu().view(torch.uint8), codes)
        flashdsa.write_index_k_cache(x.to(device), slots, cache, scale=rule, backend=backend)
        pages = cache.cpu().view(5, -1)
        assert torch.equal(pages[:, :8192].reshape(-1, 128)[:300], codes)
        assert torch.equal(pages[:, 8192:].contiguous().view(torch.float32).view(-1)[:300], scale)


def test_mxfp4_codes_are_deepgemms_except_ties_and_minus_zero() -> None:
    """DeepGEMM and SGLang round 0.75, 1.75 and 3.5 down, and write no -0."""
    x = rows_of_any_size(128).float() * 100
    x[:3] = torch.tensor([0.75, -1.75, 3.5, 6.0]).repeat(32) * torch.tensor([[1.0], [2], [0.5]])
    groups = x.unflatten(1, (4, 32))
    scale = ceil_to_power(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    size = (groups / scale[..., None]).abs().flatten(1)
    code = torch.bucketize(size, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    theirs = code + 8 * ((x < 0) & (code > 0))
    packed = pack_keys(x)
    ours = torch.stack([packed[:, :64] & 15, packed[:, :64] >> 4], dim=2).flatten(1)
    assert torch.equal(packed[:, 64:], (scale.log2() + 127).to(torch.uint8))
    is_tie = torch.isin(size, torch.tensor([0.75, 1.75, 3.5]))
    is_zero = (ours % 8 == 0) & (theirs % 8 == 0)
    assert is_tie[:3].any() and (is_zero & (ours == 8)).any()
    assert torch.equal(ours == theirs, ~is_tie & ~(ours == 8))
    assert torch.equal((ours % 8)[is_tie], (theirs % 8 + 1)[is_tie])
