"""The oracle against formulas written otherwise: attention, the indexer, quantised rows."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from flashdsa import reference

S, S_KV, H, D, D_V = 4, 12, 3, 10, 6


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_formula(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """O and lse by masked dense softmax, all indices valid: another way to say the same."""
    counts = torch.zeros(len(q), len(kv), dtype=torch.float64)
    counts.scatter_add_(1, indices.long(), torch.ones_like(indices, dtype=torch.float64))
    logits = sm_scale * torch.einsum("shd,td->sht", q, kv) + counts.log()[:, None, :]
    lse = torch.logsumexp(logits, dim=-1)
    if sink is not None:
        logits = torch.cat([logits, sink[None, :, None].expand(len(q), -1, 1)], dim=-1)
    p = torch.softmax(logits, dim=-1)[..., : len(kv)]
    return torch.einsum("sht,td->shd", p, kv[:, :D_V]), lse


def test_one_key_gives_its_value_and_its_logit(generator):
    q, kv = normal(generator, 1, H, D), normal(generator, S_KV, D)
    O, lse = reference.sparse_mla_fwd(q, kv, torch.tensor([[7]]), d_v=D_V, sm_scale=0.5)
    torch.testing.assert_close(O[0], kv[7, :D_V].expand(H, -1))
    torch.testing.assert_close(lse[0], 0.5 * q[0] @ kv[7])


def test_equal_logits_average_the_values_and_add_a_logarithm():
    q, kv = torch.zeros(1, 1, D), torch.arange(S_KV * D, dtype=torch.float64).view(S_KV, D)
    O, lse = reference.sparse_mla_fwd(q, kv, torch.tensor([[1, 4, 4, 9]]), d_v=D_V)
    torch.testing.assert_close(O[0, 0], (kv[1] + 2 * kv[4] + kv[9])[:D_V] / 4)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


def test_all_keys_is_dense_attention(generator):
    q, kv = normal(generator, S, H, D), normal(generator, S_KV, D)
    indices = torch.stack([torch.randperm(S_KV, generator=generator) for _ in range(S)])
    O, _ = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), kv.expand(H, -1, -1), kv[:, :D_V].expand(H, -1, -1)
    )
    torch.testing.assert_close(O, dense.transpose(0, 1))


def test_duplicates_and_sinks_follow_the_dense_formula(generator):
    q, kv, sink = normal(generator, S, H, D), normal(generator, S_KV, D), normal(generator, H)
    indices = torch.randint(S_KV // 2, (S, 20), generator=generator)
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink)
    dense_O, dense_lse = dense_formula(q, kv, indices, D**-0.5, sink)
    torch.testing.assert_close(O, dense_O)
    torch.testing.assert_close(lse, dense_lse)


def test_valid_slots_are_those_in_range_and_before_the_length():
    big = 2**31
    rows = torch.tensor([[3, -1, 0, 12, 3], [11, 12, 19, big - 1, -big], [1, 2, 3, 4, 5]])

    def valid(*given):
        return [found.tolist() for found in reference.valid_slots(*given)]

    assert valid(rows, 12) == [[3, 0, 3], [11], [1, 2, 3, 4, 5]]
    assert valid(rows[:, None], 12, torch.tensor([4, 0, 9])) == [[3, 0], [], [1, 2, 3, 4, 5]]
    assert valid(rows[2:], 12, torch.tensor([-3])) == [[]]
    assert valid(rows[:2], 12, None, 5) == [[0, 1, 2, 3, 4], []]
    assert valid((torch.tensor([-2, 9, 5, 40]), torch.tensor([2, big, 5, -7])), 12) == [
        [0, 1],
        [9, 10, 11],
        [],
        [],
    ]
    assert valid(rows[:0], 12) == []


def test_invalid_slots_are_as_good_as_absent_over_nan_rows(generator):
    q, kv = normal(generator, 1, H, D), normal(generator, S_KV, D)
    expected = reference.sparse_mla_fwd(q, kv, torch.tensor([[2, 5]]), d_v=D_V)
    kv[0] = kv[11] = kv[7] = torch.nan
    got = reference.sparse_mla_fwd(
        q, kv, torch.tensor([[-1, 2, 12, 5, 7, 0]]), d_v=D_V, topk_length=torch.tensor([4])
    )
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


def test_a_row_without_a_valid_slot_is_zero_with_infinite_lse(generator):
    q, kv = normal(generator, 2, H, D), normal(generator, S_KV, D)
    sink = torch.tensor([math.inf, -math.inf, 1.0])
    indices = torch.tensor([[-1, 12], [3, -1]])
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink)
    assert (O[0] == 0).all() and (lse[0] == math.inf).all()
    assert torch.isfinite(lse[1]).all()
    grads = reference.mla_bwd(q, kv, torch.ones_like(O), lse, O, indices, attn_sink=sink)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][0] == 0).all()


def test_infinite_sinks_take_everything_or_nothing(generator):
    q, kv = normal(generator, S, 2, D), normal(generator, S_KV, D)
    indices = torch.randint(S_KV, (S, 5), generator=generator)
    sink = torch.tensor([math.inf, -math.inf])
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink)
    plain_O, plain_lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    assert (O[:, 0] == 0).all()
    torch.testing.assert_close(O[:, 1], plain_O[:, 1])
    torch.testing.assert_close(lse, plain_lse)
    dQ, _, d_sink = reference.mla_bwd(
        q, kv, normal(generator, S, 2, D_V), lse, O, indices, attn_sink=sink
    )
    assert (d_sink == 0).all() and (dQ[:, 0] == 0).all() and (dQ[:, 1] != 0).any()


def test_huge_logits_do_not_overflow(generator):
    q, kv = 1e6 * normal(generator, S, H, D), normal(generator, S_KV, D)
    indices = torch.arange(S_KV).repeat(S, 1)
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    best = torch.einsum("shd,td->sht", q, kv).argmax(dim=-1)
    torch.testing.assert_close(O, kv[best][..., :D_V])
    assert lse.abs().max() > 1e5 and torch.isfinite(lse).all()


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("kv_3d", [False, True])
def test_backward_is_autograd_of_the_dense_formula(generator, with_sink, kv_3d):
    q = normal(generator, S, H, D).requires_grad_()
    kv = normal(generator, S_KV, D).requires_grad_()
    sink = normal(generator, H).requires_grad_() if with_sink else None
    indices = torch.randint(S_KV - 2, (S, 9), generator=generator)  # duplicates; two rows unnamed
    dO = normal(generator, S, H, D_V)
    O, lse = dense_formula(q, kv, indices, 0.7, sink)
    wanted = torch.autograd.grad(O, [x for x in (q, kv, sink) if x is not None], dO)

    given = (q, kv[:, None] if kv_3d else kv, dO, lse, O)
    dQ, dKV, d_sink = reference.mla_bwd(
        *given, indices[:, None] if kv_3d else indices, sm_scale=0.7, attn_sink=sink
    )
    torch.testing.assert_close(dQ, wanted[0])
    torch.testing.assert_close(dKV, wanted[1][:, None] if kv_3d else wanted[1])
    assert (dKV[-2:] == 0).all()
    if with_sink:
        torch.testing.assert_close(d_sink, wanted[2])
    else:
        assert d_sink is None


def test_backward_uses_the_lse_and_o_that_it_is_given(generator):
    q, kv, dO = normal(generator, S, H, D), normal(generator, S_KV, D), normal(generator, S, H, D_V)
    indices = torch.randint(S_KV, (S, 9), generator=generator)
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    dQ, dKV, _ = reference.mla_bwd(q, kv, dO, lse, O, indices)
    halved = reference.mla_bwd(q, kv, dO, lse + math.log(2), O, indices)
    torch.testing.assert_close(halved[0], dQ / 2)  # P halves, delta stays: dS halves
    torch.testing.assert_close(halved[1], dKV / 2)
    without_delta = reference.mla_bwd(q, kv, dO, lse, torch.zeros_like(O), indices)[0]
    assert not torch.allclose(without_delta, dQ)


def test_magnitudes_bound_what_they_measure(generator):
    q, kv, dO = normal(generator, S, H, D), normal(generator, S_KV, D), normal(generator, S, H, D_V)
    sink = normal(generator, H)
    indices = torch.randint(S_KV, (S, 9), generator=generator)
    O, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink)
    options = {"d_v": D_V, "attn_sink": sink}
    size, _ = reference.sparse_mla_fwd(q, kv, indices, absolute=True, **options)
    assert (O.abs() <= size * (1 + 1e-12)).all()
    positive, _ = reference.sparse_mla_fwd(q, kv.abs(), indices, absolute=True, **options)
    torch.testing.assert_close(
        positive, reference.sparse_mla_fwd(q, kv.abs(), indices, d_v=D_V, attn_sink=sink)[0]
    )
    given = (q, kv, dO, lse, O, indices)
    gradients = reference.mla_bwd(*given, attn_sink=sink)
    call = reference.MlaBackward(*given, attn_sink=sink)
    sizes = (*call.magnitude(), call.sink_magnitude())
    for gradient, gradient_size in zip(gradients, sizes, strict=True):
        assert (gradient.abs() <= gradient_size * (1 + 1e-12)).all()
        assert (gradient_size <= 1e3 * gradient.abs().max()).all()


def test_the_spread_is_what_elements_of_kv_move(generator):
    """By autograd, as values, by products of logits and by whole logits; a key comes twice."""
    q, kv, sink = normal(generator, 1, H, D), normal(generator, S_KV, D), normal(generator, H)
    indices = torch.tensor([[3, 0, 5, 3, -1]])
    named, times = torch.tensor([3, 0, 5]), torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)

    def attend(of_value, of_product, of_logit):
        rows = kv[named]
        s = D**-0.5 * torch.einsum("hd,hid->hi", q[0], rows * (1 + of_product)) * (1 + of_logit)
        lse = (s + times.log()).logsumexp(-1, keepdim=True)
        p = torch.exp(s + times.log() - lse)
        out = p @ (rows[:, :D_V] * (1 + of_value)) * torch.sigmoid(lse - sink[:, None])
        return out, lse[:, 0]

    zeros = (torch.zeros(*shape, dtype=torch.float64) for shape in ((3, D_V), (H, 3, D), (H, 3)))
    moved = torch.autograd.functional.jacobian(attend, tuple(zeros))
    expected = [
        sum(x.square().flatten(1).sum(1) for x in of_output).sqrt()[None] for of_output in moved
    ]
    found = reference.sparse_mla_spread(q, kv, indices, d_v=D_V, attn_sink=sink)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


NAN, INF = math.nan, math.inf


@pytest.fixture
def pages() -> torch.Tensor:
    """Three pages; token (page, offset) has a key of ones times 2^-page and scale offset + 1."""
    cache = torch.zeros(3, 8448, dtype=torch.uint8)
    for page, code in enumerate((0x38, 0x30, 0x28)):  # 1, 0.5, 0.25
        cache[page, :8192] = code
        scales = torch.arange(1, 65, dtype=torch.float32)
        cache[page, 8192:] = scales.view(torch.uint8)
    return cache.view(3, 64, 1, 132)


@pytest.fixture
def query() -> torch.Tensor:
    """One row, two heads: ones, and minus ones."""
    codes = torch.full((1, 2, 128), 0x38, dtype=torch.uint8)
    codes[0, 1] = 0xB8
    return codes.view(torch.float8_e4m3fn)


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_a_score_is_the_scaled_weighted_sum_of_positive_products(pages, query):
    weights = torch.tensor([[-3.0, 100.0]])  # the second head's product is negative: relu drops it
    scores = reference.indexer_logits(query, pages, weights, lens(67), table([2, 0]), 70)
    assert scores.shape == (1, 70) and scores.dtype == torch.float64
    assert scores[0, :64].tolist() == [-3.0 * 32 * (t + 1) for t in range(64)]
    assert scores[0, 64:67].tolist() == [-3.0 * 128 * (t + 1) for t in range(3)]
    assert scores[0, 67:].tolist() == [-INF] * 3
    operands = (query, pages, weights, lens(67), table([2, 0]), 70)
    size = reference.indexer_logits(*operands, absolute="weights")
    assert torch.equal(size[0, :67], -scores[0, :67])


def test_ids_are_page_times_64_plus_offset(pages, query):
    weights = torch.tensor([[1.0, 0.0]])
    args = (query, pages, weights, lens(67), table([2, 0]))
    # page 2: 32 (o + 1) for o < 64; page 0: 128, 256, 384
    best = reference.dsa_topk_indexer(*args, 2, sorted=True)
    assert best.tolist() == [[2 * 64 + 63, 2 * 64 + 62]]
    assert reference.dsa_topk_indexer(*args, 2).tolist() == [[2 * 64 + 62, 2 * 64 + 63]]
    every = reference.dsa_topk_indexer(*args, 70)
    assert every.tolist() == [[128 + o for o in range(64)] + [0, 1, 2] + [-1] * 3]
    assert every.dtype == torch.int32


def test_a_repeated_page_gives_its_tokens_twice(pages, query):
    args = (query, pages, torch.ones(1, 2), lens(128), table([1, 1]))
    best = reference.dsa_topk_indexer(*args, 4, sorted=True)
    assert best.tolist() == [[64 + 63, 64 + 63, 64 + 62, 64 + 62]]


def test_bad_pages_narrow_tables_and_negative_lengths_emit_nothing(pages, query):
    q, w = query.repeat(4, 1, 1), torch.ones(4, 2)
    rows = table([0, 3], [-1, 1], [2, 0], [2**31 - 1, -(2**31)])
    best = reference.dsa_topk_indexer(q, pages, w, lens(66, 66, -4, 1000), rows, 3, sorted=True)
    assert best.tolist() == [[63, 62, 61], [65, 64, -1], [-1] * 3, [-1] * 3]
    narrow = reference.dsa_topk_indexer(query, pages, w[:1], lens(1000), table([1]), 70)
    assert narrow.tolist() == [[64 + o for o in range(64)] + [-1] * 6]


def test_given_scores_are_ranked_instead_of_the_own_ones(pages, query):
    scores = torch.tensor([[5.0, 1.0, 7.0, 7.0]])
    args = (query, pages, torch.ones(1, 2), lens(4), table([1]))
    best = reference.dsa_topk_indexer(*args, 3, sorted=True, scores=scores)
    assert best.tolist() == [[64 + 2, 64 + 3, 64]]


@pytest.mark.parametrize(
    ("row", "length", "topk", "by_position", "by_score"),
    [
        ([1.0, 3.0, 2.0], 3, 2, [1, 2], [1, 2]),
        ([1.0, 3.0, 2.0, 9.0], 3, 2, [1, 2], [1, 2]),
        ([2.0, 1.0, 2.0, 2.0], 4, 2, [0, 2], [0, 2]),
        ([1.0, 2.0, 1.0, 3.0], 4, 3, [0, 1, 3], [3, 1, 0]),
        ([NAN, -INF, NAN, 0.0], 4, 2, [1, 3], [3, 1]),
        ([NAN, -INF, NAN, 0.0], 4, 3, [0, 1, 3], [3, 1, 0]),
        ([-0.0, 0.0, -0.0], 3, 2, [0, 1], [0, 1]),
        ([0.0, INF], 2, 4, [0, 1, -1, -1], [1, 0, -1, -1]),
        ([5.0], 0, 1, [-1], [-1]),
        ([5.0], -2, 1, [-1], [-1]),
        ([5.0, 6.0], 9, 3, [0, 1, -1], [1, 0, -1]),
    ],
)
def test_topk_by_hand(row, length, topk, by_position, by_score):
    scores = torch.tensor([row])
    assert reference.topk_indices(scores, lens(length), topk).tolist() == [by_position]
    assert reference.topk_indices(scores, lens(length), topk, sorted=True).tolist() == [by_score]


def test_a_nan_key_byte_makes_its_token_s_score_nan(pages, query):
    pages.view(3, 8448)[0, 5 * 128 + 3] = 0x7F
    scores = reference.indexer_logits(query, pages, torch.ones(1, 2), lens(64), table([0]), 64)
    assert scores[0].isnan().nonzero().flatten().tolist() == [5]


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
