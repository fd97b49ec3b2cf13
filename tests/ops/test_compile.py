"""torch.compile takes the operations whole, with a number of queries that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.ops import OPERATIONS
from tests.ops import inputs
from tests.ops.test_compiled_sizes import EXPORTED, GRADIENTS, assert_alike, forget_tables
from workbench.public_calls import public_calls

PUBLIC = {*OPERATIONS} | {"sparse_mla", "indexer_kl_loss"}
FURTHER = [
    name
    for name in public_calls("cpu")
    if name.partition(",")[0] in PUBLIC
    and (name in GRADIENTS or (", " in name and name not in EXPORTED))
]
"""Calls of operations whose sizes are not changed, or only where a gradient is asked for."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def test_training_step_compiles_whole_with_dynamic_s() -> None:
    compilations = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal compilations
        compilations += 1
        return graph

    def step(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        return flashdsa.sparse_mla(q * 2, kv, indices, d_v=8).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    for num_queries in (3, 5, 8):
        x = inputs.attention(torch.float32, num_queries)
        q, kv = x.q.requires_grad_(), x.kv.requires_grad_()
        grads = torch.autograd.grad(compiled(q, kv, x.indices), (q, kv))
        eager = torch.autograd.grad(step(q, kv, x.indices), (q, kv))
        for got, expected in zip(grads, eager, strict=True):
            torch.testing.assert_close(got, expected)
    assert compilations == 1


def test_forward_and_backward_graphs_of_aot_autograd_agree_with_eager() -> None:
    def step(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
        return flashdsa.sparse_mla(q, kv, indices, d_v=8, attn_sink=sink).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_queries in (4, 6):
        x = inputs.attention(torch.bfloat16, num_queries)
        args = (x.q.requires_grad_(), x.kv.requires_grad_(), x.attn_sink.requires_grad_())
        q, kv, sink = args
        grads = torch.autograd.grad(compiled(q, kv, x.indices, sink), args)
        eager = torch.autograd.grad(step(q, kv, x.indices, sink), args)
        for got, expected in zip(grads, eager, strict=True):
            assert torch.equal(got, expected)


def test_indexer_compiles_whole_and_writes_its_output() -> None:
    def choose(x: inputs.Indexer, out: Tensor) -> Tensor:
        flashdsa.dsa_topk_indexer(*x, out)
        return out + 1

    out = torch.empty(2, 16, dtype=torch.int32)
    compiled = torch.compile(choose, fullgraph=True, backend="aot_eager")(inputs.indexer(), out)
    expected = torch.empty(2, 16, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(*inputs.indexer(), expected)
    assert torch.equal(out, expected)
    assert torch.equal(compiled, expected + 1)


@pytest.mark.parametrize("name", FURTHER)
def test_the_first_call_of_a_process_may_be_compiled(name: str, new_calls: None) -> None:
    """Others are in test_compiled_sizes.py."""
    call = public_calls("cpu")[name]
    forget_tables()
    assert_alike(call, torch.compile(call.function, fullgraph=True, backend="aot_eager"))


def test_compiled_calls_of_a_kv_cache_check_slots() -> None:
    kv, slots = torch.ones(3, 576), torch.tensor([0, 5, 0])
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8)
    write = torch.compile(flashdsa.write_kv_cache, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"slots: expected distinct slots; got 0 2 times"):
        write(kv, slots, cache)
    assert not cache.any()
    read = torch.compile(flashdsa.read_kv_cache, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"slots: expected slots in \[0, 128\); got 200"):
        read(cache, slots + 200)
