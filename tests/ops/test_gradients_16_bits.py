"""Gradients of 16-bit inputs are rounded once, and no factor of theirs is rounded before.

A factor that many terms share (a loss scale, a mean's 1 / n, weights of one value) and that is
rounded makes a gradient longer or shorter as a whole. So of the error its share along the true
gradient is judged, too, in which other roundings cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.support.subtests import CaseLoop

BETWEEN = 1 + 2**-8 - 2**-20
"""bf16 is off by 3.9e-3 of it."""
FACTORS = {
    "mean": 1 / 12,
    "first loss scale": 65_536.0,
    "between": BETWEEN,
    "scaled small weights": 32_768 * 1e-7,
}
SUMS = 1e-5
"""What fp32 sums may be off by."""
S, KEYS, H, D = 6, 20, 2, 16
SLOTS = torch.arange(S * 8, dtype=torch.int32).view(S, 8) % KEYS
Exact = Callable[[list[Tensor], Tensor, Tensor], Sequence[Tensor]]
"""Gradients in float64 of leaves, the results' gradient and the results in 16 bits."""


class Case(NamedTuple):
    """A function of leaves; those in `wide` are float32, the others have 16 bits."""

    leaves: list[Tensor]
    function: Callable[..., Tensor]
    wide: tuple[int, ...] = ()
    exact: Exact | None = None

    def in_dtype(self, dtype: torch.dtype) -> list[Tensor]:
        kinds = [torch.float32 if n in self.wide else dtype for n in range(len(self.leaves))]
        return [x.to(kind) for x, kind in zip(self.leaves, kinds, strict=True)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def shared(*shape: int) -> Tensor:
    return torch.full(shape, BETWEEN, dtype=torch.float64)


def wide(leaf: Tensor) -> torch.dtype:
    """Dtype of sums over `leaf`."""
    return torch.float64 if leaf.dtype == torch.float64 else torch.float32


def attention(backend: str) -> Case:
    """Two sources and a sink. The backward is of the given, rounded O."""
    ids = {"extra_indices": SLOTS.flip(1) % 7, "sm_scale": BETWEEN * D**-0.5}

    def attend(q: Tensor, kv: Tensor, extra_kv: Tensor, sink: Tensor) -> Tensor:
        return flashdsa.sparse_mla(
            q, kv, SLOTS, extra_kv=extra_kv, attn_sink=sink, d_v=12, backend=backend, **ids
        )

    def exact(leaves: list[Tensor], d_out: Tensor, out: Tensor) -> Sequence[Tensor]:
        q, kv, extra_kv, sink = leaves
        two = {"extra_kv": extra_kv, "attn_sink": sink.float(), **ids}
        _, lse = flashdsa.sparse_mla_fwd(q, kv, SLOTS, d_v=12, **two)
        return flashdsa.mla_bwd(q, kv, d_out, lse, out, SLOTS, **two)

    leaves = [normal(S, H, D), normal(KEYS, D), normal(7, D), shared(H)]
    return Case(leaves, attend, (3,), exact)


def index_operands(weights: Tensor) -> list[Tensor]:
    return [normal(S, H, 128), normal(KEYS, 128), weights]


def index_scores(backend: str) -> Case:
    return Case(
        index_operands(shared(S, H)),
        lambda *leaves: flashdsa.indexer_scores(*leaves, SLOTS, backend=backend),
        (2,),
    )


def sparse_loss(backend: str) -> Case:
    target = normal(S, 8).abs()

    def loss(*leaves: Tensor) -> Tensor:
        given = target.to(wide(leaves[0]))
        return flashdsa.indexer_kl_loss(*leaves, SLOTS, target=given, backend=backend)

    return Case(index_operands(normal(S, H)), loss)


def dense_loss(weights: Tensor, row_weight: float) -> Case:
    rows = [torch.full((S,), row_weight).double(), normal(S, H).abs() + 4]
    q, k = normal(S, H, D).half().bfloat16(), normal(KEYS, D).half().bfloat16()
    ends = torch.arange(3, 3 + S, dtype=torch.int32)

    def loss(q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
        of_rows, lse = (x.float().to(wide(q_index)) for x in rows)
        return flashdsa.indexer_kl_loss_dense(
            *(q_index, k_index, weights, q.to(q_index.dtype), k.to(q_index.dtype), lse, ends),
            row_weight=of_rows,
        )

    return Case(index_operands(weights), loss, (2,) if weights[0, 0] == BETWEEN else ())


def entries(backend: str) -> Case:
    def pool(kv: Tensor, gate: Tensor, ape: Tensor, norm_weight: Tensor) -> Tensor:
        tables = shared(26, 3).to(wide(kv)), shared(26, 3).to(wide(kv))
        return flashdsa.compress_kv(
            kv, gate, ape, ratio=4, overlap=True, norm_weight=norm_weight, rotation=tables,
            backend=backend,
        )  # fmt: skip

    leaves = [normal(26, 2 * D), normal(26, 2 * D), normal(4, 2 * D), shared(D)]
    return Case(leaves, pool, (2, 3))


def rotation() -> Case:
    positions = torch.arange(S)
    return Case(
        [normal(S, H, D), shared(S, 5), shared(S, 5)],
        lambda x, cos, sin: flashdsa.rotate_tail(x, positions, (cos, sin)),
        (1, 2),
    )


def straight_through() -> Case:
    return Case([normal(S, 128)], flashdsa.fake_quantize_index, exact=lambda _, d_out, __: [d_out])


def cases(backend: str) -> dict[str, Case]:
    of_backend = {
        "sparse_mla": attention(backend),
        "indexer_scores": index_scores(backend),
        "indexer_kl_loss": sparse_loss(backend),
        "compress_kv": entries(backend),
    }
    if backend != "cpu":
        return of_backend
    return of_backend | {
        "indexer_kl_loss_dense": dense_loss(normal(S, H), 1 / S),
        "indexer_kl_loss_dense, shared weights": dense_loss(shared(S, H), 1e-7),
        "rotate_tail": rotation(),
        "fake_quantize_index": straight_through(),
    }


def autograd(function: Callable[..., Tensor], leaves: list[Tensor], d_out: Tensor) -> list[Tensor]:
    result = function(*[x.requires_grad_() for x in leaves])
    return list(torch.autograd.grad(result, leaves, d_out))


def faults(got: Tensor, exact: Tensor) -> list[str]:
    """In what a gradient is worse than the exact one, rounded."""
    exact = exact.double()
    rounded = exact.to(got.dtype).double()
    held = rounded.isfinite()
    if not torch.equal(got.isfinite(), held):
        return ["not finite where it is, or the other way round"]
    size, truth = exact[held].norm(), exact[held]
    error, least = (x[held] - truth for x in (got.double(), rounded))
    found = []
    if error.norm() > 1.02 * least.norm() + SUMS * size:
        found.append(f"norm: {error.norm() / size:.1e}, rounding {least.norm() / size:.1e}")
    bias = (error - least) @ truth / size**2
    if abs(bias) > 10 * SUMS:
        found.append(f"bias: {bias:.1e}")
    return found


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_the_exact_ones_rounded_once(
    dtype: torch.dtype, backend: str, subtests: CaseLoop, seed: int
) -> None:
    torch.manual_seed(seed)
    for (name, case), factor in product(cases(backend).items(), FACTORS):
        for drawn in (False, True):
            with subtests.test(f"{name}, {factor}, {'drawn' if drawn else 'shared'} gradient"):
                leaves = case.in_dtype(dtype)
                out = case.function(*leaves)
                ones = torch.randn(out.shape) if drawn else torch.ones(out.shape)
                largest = torch.finfo(out.dtype).max
                d_out = (ones * FACTORS[factor]).clamp(-largest, largest).to(out.dtype)
                exact_leaves, exact_d_out = [x.double() for x in leaves], d_out.double()
                if case.exact:
                    exact = case.exact(exact_leaves, exact_d_out, out.double())
                else:
                    exact = autograd(case.function, exact_leaves, exact_d_out)
                got = autograd(case.function, leaves, d_out)
                verdict = [faults(x, y) for x, y in zip(got, exact, strict=True)]
                assert not any(verdict), verdict
