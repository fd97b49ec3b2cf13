"""The dense warm-up's loss: right, the sparse one over every key, and bounded in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashdsa
from flashdsa.errors import DoubleBackwardError
from flashdsa.ops.indexer_loss_dense import loss_and_gradients
from flashdsa.verify.compare import compare, failures
from tests.support.subtests import CaseLoop

S, S_KV, HEADS, INDEX_HEADS, D = 7, 40, 3, 5, 24


class Warm:
    """Random operands; lse is that of the visible keys."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, *, per_head: bool = False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.index = [normal(S, INDEX_HEADS, 128), normal(S_KV, 128), normal(S, INDEX_HEADS) / 11]
        self.q = normal(S, HEADS, D)
        self.k = normal(S_KV, HEADS, D) if per_head else normal(S_KV, D)
        self.key_start = torch.tensor([0, 3, 5, 10, -4, 20, 0], dtype=torch.int32)
        self.key_end = torch.tensor([40, 9, 6, 99, 17, 20, 1], dtype=torch.int32)
        key = torch.arange(S_KV)
        self.visible = (key >= self.key_start[:, None]) & (key < self.key_end[:, None])
        self.logits = torch.einsum(
            "shd,thd->sht" if per_head else "shd,td->sht", self.q.double(), self.k.double()
        )
        self.logits = (self.logits * D**-0.5).masked_fill(~self.visible[:, None], -torch.inf)
        lse = self.logits.logsumexp(-1)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.lse = lse.masked_fill(lse == -torch.inf, torch.inf).to(sums)
        self.row_weight = torch.rand(S, generator=generator, dtype=torch.float64).to(sums)

    def loss(self, *index: Tensor, **options) -> Tensor:
        bounds = {"key_start": self.key_start, "row_weight": self.row_weight}
        return flashdsa.indexer_kl_loss_dense(
            *(index or self.index), self.q, self.k, self.lse, self.key_end, **{**bounds, **options}
        )

    def plain(self, *index: Tensor) -> Tensor:
        """The formula, in float64."""
        q, k, weights = (x.double() for x in index)
        p = (self.logits - self.lse.double()[..., None]).exp().nan_to_num(0).sum(1)
        z = torch.einsum("shd,td->sht", q, k).relu()
        scores = torch.einsum("sht,sh->st", z, weights)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(S):
            seen = self.visible[row]
            if seen.any():
                target = p[row, seen] / p[row, seen].sum()
                log_pi = scores[row, seen].log_softmax(0)
                kl = torch.nn.functional.kl_div(log_pi, target, reduction="sum")
                total = total + self.row_weight[row].double() * kl
        return total


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize("per_head", [False, True])
def test_value_and_gradients(per_head: bool, chunk_bytes: int, seed: int) -> None:
    warm = Warm(seed, per_head=per_head)
    found, expected = ([x.clone().requires_grad_() for x in warm.index] for _ in range(2))
    loss, plain = warm.loss(*found, chunk_bytes=chunk_bytes), warm.plain(*expected)
    torch.testing.assert_close(loss, plain)
    (3 * loss).backward()
    (3 * plain).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bf16_is_within_the_contract(seed: int) -> None:
    warm = Warm(seed, torch.bfloat16)
    found = [x.clone().requires_grad_() for x in warm.index]
    expected = [x.double().requires_grad_() for x in warm.index]
    warm.loss(*found).backward()
    warm.plain(*expected).backward()
    verdicts = [
        compare("gradient", a.grad, b.grad, norm_tolerance=2.5e-3, dtype=torch.bfloat16)
        for a, b in zip(found, expected, strict=True)
        if a.grad is not None and b.grad is not None
    ]
    assert len(verdicts) == 3 and failures(verdicts) == []


def test_it_is_the_sparse_loss_where_the_slots_name_every_visible_key(seed: int) -> None:
    warm = Warm(seed)
    indices = torch.where(warm.visible, torch.arange(S_KV), -1).int()
    kl = flashdsa.indexer_kl_loss(
        *warm.index, indices, q=warm.q, kv=warm.k, lse=warm.lse, sm_scale=D**-0.5
    )
    torch.testing.assert_close(warm.loss(), (kl * warm.row_weight).sum())
    torch.testing.assert_close(warm.loss(row_weight=None), kl.mean())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_nothing_of_all_queries_and_all_keys_is_made() -> None:
    queries = keys = 600
    q_index = torch.randn(queries, 1, 128)
    k_index, weights = torch.randn(keys, 128), torch.randn(queries, 1)
    q, k, lse = torch.randn(queries, 2, D), torch.randn(keys, D), torch.zeros(queries, 2)
    key_end = torch.arange(1, queries + 1, dtype=torch.int32)
    sizes = []
    for chunk_bytes in (2 * 64 * keys * 4, 2**28):
        with Largest() as largest:
            operands = q_index, k_index, weights, q, k, lse, key_end, None, None
            loss_and_gradients(*operands, 0.1, chunk_bytes, True)
        sizes.append(largest.bytes)
    whole = queries * keys * 4
    assert sizes[0] <= q_index.numel() * 4 < whole / 4
    assert sizes[1] >= whole


@pytest.mark.parametrize("weigh", [lambda loss: loss, torch.square], ids=["loss", "square"])
def test_a_gradient_of_a_gradient_is_an_error(weigh: Callable, seed: int) -> None:
    """Also of a gradient penalty, which would be trained without it."""
    warm = Warm(seed)
    found = [x.requires_grad_() for x in warm.index]
    loss = weigh(warm.loss(*found))
    (gradient,) = torch.autograd.grad(loss, found[:1], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="no gradient of a gradient"):
        (loss + gradient.norm()).backward()


UNSEEN = [torch.nan, torch.inf, 3e38]


@pytest.mark.parametrize("value", UNSEEN)
@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_what_no_query_sees_reaches_nothing(chunk_bytes: int, value: float, seed: int) -> None:
    """A key outside every range, one that is outside some, a query without keys or weight."""
    warm = Warm(seed, torch.float32)
    warm.key_start[:], warm.key_end[:] = 0, torch.tensor([30, 9, 0, 30, 17, 30, 1])
    warm.row_weight[5] = 0
    expected = [x.clone().requires_grad_() for x in warm.index]
    warm.loss(*expected, chunk_bytes=chunk_bytes).backward()
    q, k, weights = (x.clone() for x in warm.index)
    q[2], q[5], k[30:], weights[2], weights[5] = (value,) * 5
    warm.q[2], warm.q[5], warm.lse[2], warm.k[30:] = (value,) * 4
    found = [x.requires_grad_() for x in (q, k, weights)]
    loss = warm.loss(*found, chunk_bytes=chunk_bytes)
    loss.backward()
    assert loss.isfinite()
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.grad, wanted.grad)
        assert got.grad.any()


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_what_one_query_sees_reaches_no_other(chunk_bytes: int, seed: int) -> None:
    warm = Warm(seed, torch.float32)
    warm.key_start[:], warm.key_end[:] = 0, torch.tensor([30, 9, 30, 40, 17, 30, 1])
    warm.index[1][35] = torch.nan
    found = [x.clone().requires_grad_() for x in warm.index]
    loss = warm.loss(*found, chunk_bytes=chunk_bytes)
    loss.backward()
    q, k, weights = (x.grad for x in found)
    rows = [index for index in range(S) if not q[index].isfinite().all()]
    assert rows == [index for index in range(S) if not weights[index].isfinite().all()] == [3]
    assert loss.isnan() and k[35].isnan().all() and q[0].any()


def test_a_nan_that_is_seen_is_never_hidden(seed: int) -> None:
    for name in ("q", "k", "lse"):
        warm = Warm(seed, torch.float32)
        getattr(warm, name)[0] = torch.nan
        assert warm.loss().isnan(), name


@pytest.mark.parametrize("deviation", [10, 100, 1000])
def test_fp32_with_large_logits_is_within_the_contract(deviation: float, seed: int) -> None:
    warm = Warm(seed, torch.float32)
    warm.q, warm.k = (x * deviation**0.5 for x in (warm.q, warm.k))
    lse = torch.einsum("shd,td->sht", warm.q.double(), warm.k.double()) * D**-0.5
    warm.lse = lse.masked_fill(~warm.visible[:, None], -torch.inf).logsumexp(-1).float()
    warm.lse.masked_fill_(warm.lse == -torch.inf, torch.inf)
    found, exact = [x.clone().requires_grad_() for x in warm.index], Warm(seed)
    expected = [x.detach().double().requires_grad_() for x in found]
    warm.loss(*found).backward()
    for name in ("q", "k", "lse", "row_weight"):
        setattr(exact, name, getattr(warm, name).double())
    exact.loss(*expected).backward()
    for got, wanted in zip(found, expected, strict=True):
        error = (got.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert 0 < error <= 1e-5


def test_it_compiles_to_one_graph(seed: int) -> None:
    warm = Warm(seed)
    found, expected = ([x.clone().requires_grad_() for x in warm.index] for _ in range(2))
    torch.compiler.reset()
    torch.compile(warm.loss, backend="aot_eager", fullgraph=True)(*found).backward()
    warm.loss(*expected).backward()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


WRONG = [
    ({"key_end": torch.zeros(S)}, "key_end: expected dtype int32"),
    ({"lse": torch.zeros(S, HEADS)}, "lse: expected dtype float64"),
    ({"k": torch.zeros(S_KV, D + 1, dtype=torch.float64)}, "q: expected shape"),
    ({"q": torch.zeros((), dtype=torch.float64)}, "q: expected shape"),
    ({"key_end": torch.zeros(S, dtype=torch.int32, device="meta")}, "key_end: expected device cpu"),
    ({"chunk_bytes": 0}, "chunk_bytes: expected at least 1"),
]


def test_wrong_arguments_are_named(subtests: CaseLoop, seed: int) -> None:
    for change, message in WRONG:
        with subtests.test(message):
            warm = Warm(seed)
            names = ("q_index", "k_index", "weights")
            arguments = dict(zip(names, warm.index, strict=True))
            arguments |= {"q": warm.q, "k": warm.k, "lse": warm.lse, "key_end": warm.key_end}
            with pytest.raises((TypeError, ValueError), match=message):
                flashdsa.indexer_kl_loss_dense(**{**arguments, **change})
