"""The e4m3 and page oracle agrees with torch's casts and with bytes placed by hand."""

import struct

import pytest
import torch

from flashdsa import reference


def test_all_256_codes_decode_as_torch_does():
    codes = torch.arange(256).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float64)
    torch.testing.assert_close(
        reference.decode_e4m3(codes), expected, rtol=0, atol=0, equal_nan=True
    )
    assert reference.decode_e4m3(codes).isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.signbit(reference.decode_e4m3(codes)[0x80])


def test_decoding_accepts_int8_and_fp8_tensors():
    codes = torch.tensor([0x38, 0xB8, 0x7E], dtype=torch.uint8)
    for same in (codes, codes.view(torch.int8), codes.view(torch.float8_e4m3fn)):
        assert reference.decode_e4m3(same).tolist() == [1.0, -1.0, 448.0]


def test_every_code_but_nan_survives_a_round_trip():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(reference.encode_e4m3(reference.decode_e4m3(codes)), codes)


def test_encoding_rounds_as_torch_does_at_ties_and_beside_them():
    grid = reference.decode_e4m3(torch.arange(0x7F).to(torch.uint8)).float()
    ties = (grid[1:] + grid[:-1]) / 2
    just_above = torch.nextafter(ties, torch.tensor(torch.inf))
    just_below = torch.nextafter(ties, torch.tensor(-torch.inf))
    x = torch.cat([grid, ties, just_above, just_below])
    x = torch.cat([x, -x])
    assert torch.equal(reference.encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_encoding_rounds_as_torch_does_on_random_values(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20000, generator=generator) * torch.exp2(
        20 * torch.rand(20000, generator=generator) - 14
    )
    x = x.clamp(-448, 448)
    assert torch.equal(reference.encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_encoding_saturates_and_keeps_nan_and_the_sign_of_zero():
    x = torch.tensor([448.1, 1e9, -torch.inf, torch.nan, 0.0, -0.0, -1e-9])
    expected = [0x7E, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x80]
    assert reference.encode_e4m3(x).tolist() == expected


def test_a_key_is_scaled_by_its_largest_element():
    k = torch.zeros(3, 128)
    k[0, 0], k[0, 1] = -4.48, 2.24
    k[2, 5] = 5e-5  # below the floor of 1e-4
    codes, scale = reference.quantize_index_k(k)
    floor = torch.tensor(1e-4) / 448
    torch.testing.assert_close(scale, torch.stack([torch.tensor(4.48) / 448, floor, floor]))
    assert scale.dtype == torch.float32
    assert reference.decode_e4m3(codes)[0, :3].tolist() == [-448.0, 224.0, 0.0]
    assert (codes[1] == 0).all()
    assert reference.decode_e4m3(codes)[2, 5].item() == 224.0


def test_the_quantized_key_is_within_half_an_e4m3_step(seed):
    k = torch.randn(50, 128, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    codes, scale = reference.quantize_index_k(k)
    error = (reference.decode_e4m3(codes) * scale[:, None] - k.double()).abs()
    smallest_step = scale[:, None].double() * 2.0**-9
    assert (error <= torch.maximum(k.double().abs() / 16, smallest_step / 2) * (1 + 1e-6)).all()


def test_query_scales_are_folded_into_the_weights():
    q, weights = torch.ones(1, 2, 128), torch.tensor([[3.0, -2.0]])
    q[0, 1] = 0.5
    codes, folded = reference.quantize_index_q(q, weights)
    assert (reference.decode_e4m3(codes) == 448).all()
    one = torch.tensor(1.0)
    torch.testing.assert_close(folded[0], torch.stack([3 * (one / 448), -2 * (0.5 * one / 448)]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_token_lies_in_its_page_as_the_contract_says(dtype):
    cache = torch.full((3, 64, 1, 132), 0x55, dtype=dtype)
    k = torch.zeros(2, 128)
    k[0], k[1, 127] = 1.0, -2.0
    written = reference.write_index_k_cache(k, torch.tensor([1 * 64 + 63, 2 * 64]), cache)
    assert (cache == 0x55).all(), "the input cache is not changed"
    pages = written.view(3, 8448)
    assert pages[1, 63 * 128 : 64 * 128].tolist() == [0x7E] * 128
    scale = struct.unpack("<f", bytes(pages[1, 8192 + 63 * 4 : 8192 + 64 * 4].tolist()))[0]
    assert scale == pytest.approx(1 / 448, rel=1e-7)
    assert pages[2, :128].tolist() == [0] * 127 + [0xFE]
    scale = struct.unpack("<f", bytes(pages[2, 8192:8196].tolist()))[0]
    assert scale == pytest.approx(2 / 448, rel=1e-7)
    assert int((pages != 0x55).sum()) == 2 * 132, "nothing else is touched"


def test_padding_slots_are_skipped_and_reading_is_the_inverse(seed):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(5, 128, generator=generator)
    slots = torch.tensor([200, -1, 0, 64, -1])
    cache = torch.zeros(4, 64, 1, 132, dtype=torch.uint8)
    written = reference.write_index_k_cache(k, slots, cache)
    codes, scale = reference.read_index_k_cache(written, slots[slots >= 0])
    expected_codes, expected_scale = reference.quantize_index_k(k[slots >= 0])
    assert torch.equal(codes, expected_codes) and torch.equal(scale, expected_scale)
    assert int(written.view(4, 8448).any(dim=1).sum()) == 3  # pages 0, 1 and 3
