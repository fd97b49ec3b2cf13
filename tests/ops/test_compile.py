"""torch.compile takes the operations whole, with a number of queries that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import flashdsa
from flashdsa.ops import OPERATIONS
from tests.ops import inputs
from workbench.public_calls import Call, Sizes, public_calls

SIZES = Sizes(s=12, s_kv=150, h=8, h_index=6, topk=11, indexer_topk=32, pages=9)
INDEX = {"q_index": "S H_I 128", "k_index": "S_kv 128", "weights": "S H_I", "lse": "S H"}
SHAPES: Mapping[str, Mapping[str, str]] = {
    "causal_ranges": {"cu_seqlens_q": "offsets", "cu_seqlens_k": "offsets"},
    "expand_blocks": {"indices": "S topk", "positions": "S"},
    "fake_quantize_index": {"x": "S 128"},
    "indexer_kl_loss": {**INDEX, "indices": "S topk", "q": "S H d_qk", "kv": "S_kv d_qk"},
    "indexer_kl_loss_dense": {**INDEX, "q": "S H d", "k": "S_kv d", "key_end": "S"},
    **{f"lse_{name}": {"lse": "S H"} for name in ("to_base2", "from_base2", "for_merge")},
    "merge_attention": {"outs": "parts S H d_v", "lses": "parts S H"},
    "quantize_kv": {"kv": "T d"},
    "read_kv_cache": {"cache": "num_pages page_size width", "slots": "T"},
    "rotate_tail": {"x": "S H d", "positions": "S", "cos": "P half", "sin": "P half"},
    "sparse_mla": {x.name: x.shape for x in OPERATIONS["sparse_mla_fwd"].operands},
    "write_kv_cache": {"kv": "T d", "slots": "T", "cache": "num_pages page_size width"},
}
"""Shapes of functions that are no operations."""
CHANGE = {"S", "S_kv", "S_extra", "B", "T", "P", "H", "H_I", "offsets", "num_entries"}
CHANGE |= {"topk", "extra_topk", "num_pages", "extra_pages", "page_size", "max_pages", "requests"}
CHANGE |= {"max_len", "num_candidates"}
NUMBERS = {"topk", "num_queries", "max_len"}
"""Arguments that are a size."""
ALIKE = ("rows", "16 heads", "decode", "int64", "deterministic", "sorted", "entries")
GRADIENTS = (
    *("compress_kv", "fake_quantize_index", "indexer_kl_loss", "indexer_kl_loss_dense"),
    *("rotate_tail", "sparse_mla", "sparse_mla, two sources"),
)


EXPORTED = (
    *("sparse_mla", "sparse_mla, two sources", "mla_bwd", "indexer_kl_loss_dense"),
    *("dsa_topk_prefill", "dsa_topk_indexer", "compress_kv", "compress_kv, state"),
    *("write_kv_cache, packed", "read_kv_cache"),
)


def _calls() -> dict[str, Call]:
    """Calls of every public function but `bind`; the forward with pages, too."""
    calls = public_calls("cpu", SIZES)
    rows = calls["sparse_mla_fwd, rows"]
    for name, d_qk, pages in (
        ("sparse_mla_fwd, pages", 576, torch.zeros(9, 64, 1, 576, dtype=torch.bfloat16)),
        ("sparse_mla_fwd, packed pages", 512, torch.zeros(9, 64, 1, 584, dtype=torch.uint8)),
    ):
        changed = {"q": rows.arguments["q"][..., :d_qk], "kv": pages}
        calls[name] = rows._replace(arguments={**rows.arguments, **changed})
    return {
        name: call
        for name, call in calls.items()
        if not name.startswith("bind") and name.partition(", ")[2] not in ALIKE
    }


def shapes_of(name: str) -> Mapping[str, str]:
    """The shape of each argument of a call."""
    public = name.partition(",")[0]
    if public in SHAPES:
        return SHAPES[public]
    spec = OPERATIONS[public + "_out" * ("buffers" in name)]
    rows = {x.name: x.shape for x in spec.operands}
    rows |= {"kv": "num_pages page_size 1 width"} if "pages" in name else {}
    rows |= {"dkv": "S_kv d_qk", "extra_dkv": "S_extra d_qk", "accumulate_into": "S topk"}
    return rows if "slots" in rows or "cache" not in name else rows | {"slots": "T"}


def larger(name: str, call: Call, steps: int) -> dict[str, Any]:
    """The call's arguments, with `steps` more of every size that may change."""
    shapes, ratio = shapes_of(name), call.arguments.get("ratio", 1)

    def grown(argument: str, value: Any) -> Any:
        if argument == "rotation":
            return tuple(grown(n, x) for n, x in zip(("cos", "sin"), value, strict=True))
        dims = shapes.get(argument, "").split()
        if argument in NUMBERS:
            return value + steps
        if not isinstance(value, Tensor):
            return value
        for axis, dim in enumerate(dims):
            if dim not in CHANGE:
                continue
            more = value.narrow(axis, 0, 1)
            if dim == "offsets":
                more = value[-1:]
            elif argument == "slots" and "read" not in name:
                more = torch.full_like(value[:1], -1)
            more = more.repeat_interleave(steps * (ratio if dim == "T" else 1), axis)
            value = torch.cat((value, more), axis)
        if dims == ["offsets"]:
            value[-1] += steps * ratio
        return value

    return {argument: grown(argument, value) for argument, value in call.arguments.items()}


def _kind(name: str, call: Call) -> tuple[bool, ...]:
    """What decides on how torch.compile traces a call, as its declaration has it."""
    shapes = " ".join(shapes_of(name).get(argument, "") for argument in call.arguments)
    is_operation = name.partition(",")[0] in OPERATIONS
    paged, packed = "num_pages" in shapes, "offsets" in shapes
    return is_operation, bool(call.written), name in GRADIENTS, paged, packed


def _names() -> Iterator[Any]:
    """Names of calls: the first of each kind; others are slow tests."""
    kinds = set()
    for name, call in _calls().items():
        is_first = _kind(name, call) not in kinds
        kinds.add(_kind(name, call))
        yield pytest.param(name, marks=() if is_first else pytest.mark.slow)


def forget_tables() -> None:
    """Nothing of an operation's table was looked up before, as in a process that begins."""
    for spec in OPERATIONS.values():
        for table in (spec, *spec.operands):
            for attribute, value in vars(type(table)).items():
                if isinstance(value, cached_property):
                    vars(table).pop(attribute, None)


def assert_alike(call: Call, compiled: Callable[..., Any]) -> None:
    """A compiled call gives what the function gives, and leaves the same in every tensor."""
    every = []
    for function in (compiled, call.function):
        copies = {n: x.clone() if n in call.tensors else x for n, x in call.arguments.items()}
        given = function(**copies)
        given = [given] if isinstance(given, Tensor) else list(given or ())
        every.append([*given, *(copies[name] for name in call.tensors)])
    for one, other in zip(*every, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", list(_names()))
def test_the_second_graph_serves_all_sizes(name: str, new_calls: None) -> None:
    """The first is of one size, and of a process's first call; a call of a third size is no
    recompilation."""
    torch.compiler.reset()
    call = _calls()[name]
    forget_tables()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    for steps in range(3):
        arguments = larger(name, call, steps)
        for value in arguments.values() if name in GRADIENTS else ():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=steps == 2):
            assert_alike(call._replace(arguments=arguments), compiled)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_program_takes_other_sizes(name: str) -> None:
    """With every size that may change at once."""
    call, shapes = _calls()[name], shapes_of(name)

    class Module(torch.nn.Module):
        """The call."""

        def forward(self, tensors: dict[str, Tensor]) -> Any:
            results = call.function(**{**call.arguments, **tensors})
            return tuple(tensors[n] for n in call.written) if results is None else results

    def given(steps: int) -> dict[str, Tensor]:
        return {n: x for n, x in larger(name, call, steps).items() if isinstance(x, Tensor)}

    dims = {
        n: {a: Dim.DYNAMIC for a, dim in enumerate(shapes[n].split()) if dim in CHANGE}
        for n in given(0)
    }
    exported = torch.export.export(Module(), (given(0),), dynamic_shapes=(dims,)).module()
    got, expected = exported(given(5)), Module()(given(5))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


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


def test_a_training_step_has_one_graph_for_all_s_and_gradients_as_eager() -> None:
    def step(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
        return flashdsa.sparse_mla(q, kv, indices, d_v=8, attn_sink=sink).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_queries in (3, 5, 8):
        x = inputs.attention(torch.bfloat16, num_queries)
        args = (x.q.requires_grad_(), x.kv.requires_grad_(), x.attn_sink.requires_grad_())
        q, kv, sink = args
        with torch._dynamo.config.patch(error_on_recompile=num_queries > 3):
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
    """Others are above."""
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
