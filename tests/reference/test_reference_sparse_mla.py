"""The sparse MLA oracle agrees with closed forms, with torch's attention and with autograd."""

import math

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


def test_the_default_scale_is_one_over_the_root_of_d_qk(generator):
    q, kv = normal(generator, 1, H, D), normal(generator, S_KV, D)
    _, lse = reference.sparse_mla_fwd(q, kv, torch.tensor([[2]]), d_v=D_V)
    torch.testing.assert_close(lse[0], q[0] @ kv[2] / math.sqrt(D))


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
