"""torch's default dtype and autocast are the caller's: no operation computes otherwise for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

import flashdsa
from tests.ops import inputs
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

Cast = Callable[[Tensor], Tensor]
"""What autocast does to the operands that it casts."""
Outputs = list[Tensor]
BF16, FP32 = torch.bfloat16, torch.float32
CASTING = {"sparse_mla", "sparse_mla_fwd", "attention_target", "indexer_scores", "indexer_kl_loss"}
"""Operations whose documents say that autocast casts operands of theirs."""
NO_RESULT = {"warm_up"}


def _normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


class Training:
    """Operands of the indexer's training: of the attention and of the indexer."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        rows, keys, topk = 5, 9, 6
        self.q = _normal(rows, 3, 24, dtype=dtype, seed=2)
        self.kv = _normal(keys, 24, dtype=dtype, seed=3)
        self.q_index = _normal(rows, 4, 128, dtype=dtype, seed=4)
        self.k_index = _normal(keys, 128, dtype=dtype, seed=5)
        self.weights = _normal(rows, 4, seed=6)
        self.indices = torch.randint(-1, keys, (rows, topk), generator=generator).int()
        self.lse = _normal(rows, 3, seed=8) + 4
        self.ends = torch.tensor([0, 3, 9, 5, 8], dtype=torch.int32)


def _attention(dtype: torch.dtype) -> inputs.Attention:
    x = inputs.attention(dtype)
    return x._replace(q=4 * x.q)


def _leaves(*tensors: Tensor) -> Outputs:
    return [x.detach().clone().requires_grad_() for x in tensors]


def _with_gradients(results: Outputs, leaves: Outputs) -> Outputs:
    """The results, and what `backward()` brings."""
    torch.stack([x.double().square().sum() for x in results]).sum().backward()
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return [*(x.detach() for x in results), *gradients]


def sparse_mla(dtype: torch.dtype, cast: Cast) -> Outputs:
    x = _attention(dtype)
    q, kv, sink = _leaves(x.q, x.kv, x.attn_sink)
    out = flashdsa.sparse_mla(cast(q), cast(kv), x.indices, d_v=x.d_v, attn_sink=sink)
    return _with_gradients([out], [q, kv, sink])


def sparse_mla_fwd(dtype: torch.dtype, cast: Cast) -> Outputs:
    x = _attention(dtype)
    q, kv = cast(x.q), cast(x.kv)
    return list(flashdsa.sparse_mla_fwd(q, kv, x.indices, d_v=x.d_v, return_max_logits=True))


def sparse_mla_fwd_out(dtype: torch.dtype, _: Cast) -> Outputs:
    x = _attention(dtype)
    out, lse = torch.zeros(3, 2, x.d_v, dtype=dtype), torch.zeros(3, 2, dtype=FP32)
    return list(flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v, out=out, lse=lse))


def mla_bwd(dtype: torch.dtype, _: Cast) -> Outputs:
    x = _attention(dtype)
    O, dO, lse = _normal(3, 2, 8, dtype=dtype), _normal(3, 2, 8, dtype=dtype, seed=2), X_LSE
    return list(flashdsa.mla_bwd(x.q, x.kv, dO, lse, O, x.indices, attn_sink=x.attn_sink))


X_LSE = torch.full((3, 2), 6.0, dtype=FP32)


def merge_attention(dtype: torch.dtype, _: Cast) -> Outputs:
    outs, lses = _normal(3, 4, 2, 8, dtype=dtype), _normal(3, 4, 2)
    return list(flashdsa.merge_attention(outs, lses))


def lse_for_merge(dtype: torch.dtype, _: Cast) -> Outputs:
    return [flashdsa.lse_for_merge(torch.tensor([1.5, torch.inf], dtype=dtype))]


def lse_to_base2(dtype: torch.dtype, _: Cast) -> Outputs:
    return [flashdsa.lse_to_base2(_normal(5, dtype=dtype))]


def lse_from_base2(dtype: torch.dtype, _: Cast) -> Outputs:
    return [flashdsa.lse_from_base2(_normal(5, dtype=dtype))]


def _chosen(sorted: bool) -> Tensor:
    out = torch.full((2, 8), -7, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(*inputs.indexer(), out, sorted=sorted)
    return out


def dsa_topk_indexer(_: torch.dtype, __: Cast) -> Outputs:
    return [_chosen(False), _chosen(True)]


def bind(dtype: torch.dtype, _: Cast) -> Outputs:
    x, ids = _attention(dtype), torch.full((2, 8), -7, dtype=torch.int32)
    out, lse = torch.zeros(3, 2, x.d_v, dtype=dtype), torch.zeros(3, 2, dtype=FP32)
    for operation, operands in (
        ("sparse_mla_fwd_out", (x.q, x.kv, x.indices, out, lse)),
        ("dsa_topk_indexer", (*inputs.indexer(), ids)),
    ):
        flashdsa.bind(operation, operands)(operands)
    return [out, lse, ids]


def indexer_logits(_: torch.dtype, __: Cast) -> Outputs:
    return [flashdsa.indexer_logits(*inputs.indexer(), 140)]


def topk_indices(_: torch.dtype, __: Cast) -> Outputs:
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    return [flashdsa.topk_indices(_normal(2, 9), lengths, 4, sorted=True)]


def warm_up(_: torch.dtype, __: Cast) -> Outputs:
    flashdsa.warm_up("dsa_topk_indexer", H=4, topk=8, backend="cpu")
    return []


def dsa_topk_prefill(dtype: torch.dtype, _: Cast) -> Outputs:
    x, chosen = Training(dtype), []
    for sorted in (False, True):
        out = torch.full((5, 4), -7, dtype=torch.int32)
        operands = x.q_index, x.k_index, x.weights, None, x.ends, out
        flashdsa.dsa_topk_prefill(*operands, sorted=sorted)
        chosen.append(out)
    return chosen


def prefill_logits(dtype: torch.dtype, _: Cast) -> Outputs:
    x = Training(dtype)
    return [flashdsa.prefill_logits(x.q_index, x.k_index, x.weights, None, x.ends)]


def causal_ranges(_: torch.dtype, __: Cast) -> Outputs:
    return list(flashdsa.causal_ranges(torch.tensor([0, 3, 7]), torch.tensor([0, 5, 9])))


def quantize_index_k(dtype: torch.dtype, _: Cast) -> Outputs:
    return list(flashdsa.quantize_index_k(_normal(3, 128, dtype=dtype)))


def quantize_index_q(dtype: torch.dtype, _: Cast) -> Outputs:
    return list(flashdsa.quantize_index_q(_normal(3, 4, 128, dtype=dtype), _normal(3, 4)))


def fake_quantize_index(dtype: torch.dtype, _: Cast) -> Outputs:
    results = []
    for scale in ("ue8m0", "fp32"):
        (x,) = _leaves(_normal(3, 128, dtype=dtype))
        results += _with_gradients([flashdsa.fake_quantize_index(x, scale=scale)], [x])
    return results


SLOTS = torch.tensor([5, -1, 70])


def write_index_k_cache(dtype: torch.dtype, _: Cast) -> Outputs:
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(_normal(3, 128, dtype=dtype), SLOTS, cache)
    return [cache]


def read_index_k_cache(_: torch.dtype, __: Cast) -> Outputs:
    slots = torch.tensor([3, 200])
    return list(flashdsa.read_index_k_cache(inputs.indexer().k_index_cache_fp8, slots))


def quantize_kv(dtype: torch.dtype, _: Cast) -> Outputs:
    kv = _normal(3, 576, dtype=dtype)
    return [flashdsa.quantize_kv(kv, scale=scale) for scale in ("ue8m0", "fp32")]


def _caches() -> Outputs:
    return [torch.zeros(128, 656, dtype=torch.uint8), torch.zeros(128, 576, dtype=BF16)]


def write_kv_cache(dtype: torch.dtype, _: Cast) -> Outputs:
    caches = _caches()
    for cache in caches:
        flashdsa.write_kv_cache(_normal(3, 576, dtype=dtype), SLOTS, cache)
    return caches


def read_kv_cache(_: torch.dtype, __: Cast) -> Outputs:
    packed, rows = _caches()
    packed[:3], rows[:3] = flashdsa.quantize_kv(_normal(3, 576)), _normal(3, 576)
    return [flashdsa.read_kv_cache(cache, torch.tensor([2, 0])) for cache in (packed, rows)]


def attention_target(dtype: torch.dtype, cast: Cast) -> Outputs:
    x = Training(dtype)
    total = torch.ones(x.indices.shape, dtype=FP32)
    operands = cast(x.q), cast(x.kv), x.lse, x.indices
    alone = flashdsa.attention_target(*operands)
    return [alone, flashdsa.attention_target(*operands, accumulate_into=total)]


def indexer_scores(dtype: torch.dtype, cast: Cast) -> Outputs:
    x = Training(dtype)
    q, k, weights = leaves = _leaves(x.q_index, x.k_index, x.weights)
    scores = flashdsa.indexer_scores(cast(q), cast(k), weights, x.indices)
    return _with_gradients([scores.masked_fill(x.indices < 0, 0)], leaves)


def indexer_bwd(dtype: torch.dtype, _: Cast) -> Outputs:
    x = Training(dtype)
    return list(flashdsa.indexer_bwd(x.q_index, x.k_index, x.weights, x.indices, _normal(5, 6)))


def indexer_kl(_: torch.dtype, __: Cast) -> Outputs:
    (scores,) = _leaves(_normal(5, 6))
    return _with_gradients([flashdsa.indexer_kl(scores, _normal(5, 6, seed=2).exp())], [scores])


def indexer_kl_bwd(_: torch.dtype, __: Cast) -> Outputs:
    target = _normal(5, 6, seed=2).exp()
    return [flashdsa.indexer_kl_bwd(_normal(5, 6), target, _normal(5))]


def indexer_kl_loss(dtype: torch.dtype, cast: Cast) -> Outputs:
    x = Training(dtype)
    q, k, weights = leaves = _leaves(x.q_index, x.k_index, x.weights)
    attention = {"q": cast(x.q), "kv": cast(x.kv), "lse": x.lse}
    loss = flashdsa.indexer_kl_loss(cast(q), cast(k), weights, x.indices, **attention)
    return _with_gradients([loss], leaves)


def indexer_kl_loss_dense(dtype: torch.dtype, _: Cast) -> Outputs:
    x = Training(dtype)
    q, k, weights = leaves = _leaves(x.q_index, x.k_index, x.weights)
    loss = flashdsa.indexer_kl_loss_dense(q, k, weights, x.q, x.kv, x.lse, x.ends)
    return _with_gradients([loss], leaves)


def _as_called(name: str) -> Callable[[torch.dtype, Cast], Outputs]:
    """A small right call of the function, with what it returns and what it may have written."""

    def run(_: torch.dtype, __: Cast) -> Outputs:
        copies = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
        results = function(**copies)
        results = [results] if isinstance(results, Tensor) else list(results or ())
        return [*results, *(x for x in copies.values() if isinstance(x, Tensor))]

    function, given, _ = CALLS[name]
    return run


CALLS = public_calls("cpu")
OPERATIONS: dict[str, Callable[[torch.dtype, Cast], Outputs]] = {
    name: globals().get(name) or _as_called(name) for name in flashdsa.__all__
}
"""By the names of the public functions: those above, and else a small right call."""
OPERATIONS["sparse_mla_fwd(out=)"] = sparse_mla_fwd_out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _bits(results: Outputs) -> list[tuple[torch.dtype, bytes]]:
    return [(x.dtype, x.reshape(-1).view(torch.uint8).numpy().tobytes()) for x in results]


def test_the_default_dtype_changes_no_bit(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    for name, dtype, operands in product(
        OPERATIONS, [torch.float64, BF16, torch.float16], [BF16, FP32]
    ):
        new_calls()
        with subtests.test(f"{name}, {operands}, default {dtype}"):
            run = OPERATIONS[name]
            with default_dtype(dtype):
                got = _bits(run(operands, _as_it_is))
            assert got == _bits(run(operands, _as_it_is))
            assert got or name in NO_RESULT


def test_autocast_casts_what_documents_say_and_changes_no_bit_else(
    subtests: CaseLoop, new_calls: Callable[[], None]
) -> None:
    for name, operands, served in product(OPERATIONS, [BF16, FP32], [False, True]):
        new_calls()
        with subtests.test(f"{name}, {operands}, {served=}"):
            run = OPERATIONS[name]
            if served:
                run(operands, _as_it_is)
            with torch.autocast("cpu", dtype=BF16):
                got = _bits(run(operands, _as_it_is))
            cast = Tensor.bfloat16 if name in CASTING else _as_it_is
            assert got == _bits(run(operands, cast))
            assert got or name in NO_RESULT
