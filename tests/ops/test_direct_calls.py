"""Indexer calls that come back go straight to the kernel; wrong or watched ones the whole way.

The kernel and its GPU are pretended: a backend of CPU tensors that notes its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flashdsa
from flashdsa.backends import registry as registry_module
from flashdsa.backends.catalog import registry
from flashdsa.backends.features import OneOf
from flashdsa.dispatch.registration import custom_op
from flashdsa.dispatch.transforms import is_plain_eager
from flashdsa.ops.indexer import DSA_TOPK_INDEXER, TopkIndexerOperands
from tests.ops import inputs

TOPK = 16
WAYS = ("runner", "bind")
HEADS = (4, 8)
HELD = inputs.indexer()
CACHE = HELD.k_index_cache_fp8
OP = custom_op(DSA_TOPK_INDEXER)


@dataclass
class Kernel:
    """A backend that binds: says whether a call was checked, and writes as a kernel would."""

    calls: list[str] = field(default_factory=list)
    error: Exception | None = None
    refusal: Exception | None = None
    """What the function raises before it writes."""
    tables: list[tuple[int, int, bool]] = field(default_factory=list)
    """Rows and pages of the table of every call, and the order."""

    def runner(self, device: torch.device) -> Any:
        """The kernel stands for its GPU too."""
        assert device.type == "cpu"
        return self

    def bind(
        self,
        runner: Any,
        operands: TopkIndexerOperands,
        *,
        sorted: bool,
        positions: bool,
        table_page_size: int,
        check: bool,
    ) -> Callable[[Sequence[Tensor]], None]:
        """A call that was checked."""
        assert runner is self
        ways = iter(["checked"])

        def serve(given: Sequence[Tensor]) -> None:
            assert len(given[3]) == len(operands.seq_lens)
            for tensor in given[:6]:
                assert tensor.stride() is not None and tensor.data_ptr() is not None
            if self.refusal is not None:
                raise self.refusal
            if self.error is not None:
                raise self.error
            self.tables.append((*given[4].shape, sorted))
            self.calls.append(next(ways, "direct"))
            given[5].detach().fill_(7)

        return serve


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Iterator[Kernel]:
    pretended = Kernel()
    (real,) = (
        i
        for i in registry.implementations("dsa_topk_indexer")
        if i.backend == "sm90" and not i.features.candidates
    )
    features = replace(
        real.features,
        devices=("cpu",),
        num_heads=replace(real.features.num_heads, values=HEADS),
        topk=OneOf((TOPK, 2 * TOPK)),
        positions=False,
        capabilities=(),
    )
    implementation = replace(
        real, runner="pretended:runner", bind="pretended:bind", features=features
    )
    loads = {f"pretended:{way}": getattr(pretended, way) for way in WAYS}
    monkeypatch.setattr(registry, "_implementations", [implementation])
    monkeypatch.setattr(registry, "_selected", {})
    monkeypatch.setattr(registry_module, "_load", loads.__getitem__)
    yield pretended


def output() -> Tensor:
    return torch.full((2, TOPK), -99, dtype=torch.int32)


def call(
    out: Tensor | None = None,
    sorted: bool = False,
    backend: str = "auto",
    ids: str = "slot",
    **changed: Any,
) -> None:
    out = output() if out is None else out
    operands = {**HELD._asdict(), **changed}
    flashdsa.dsa_topk_indexer(*operands.values(), out, sorted=sorted, ids=ids, backend=backend)


def test_a_call_that_was_served_is_launched_at_once(kernel: Kernel) -> None:
    out = output()
    for turn, way in enumerate(("checked", "direct", "direct"), 1):
        out.detach().fill_(-99)
        before = out._version
        call(out)
        assert kernel.calls[-1] == way and len(kernel.calls) == turn
        assert out._version == before + 2  # the pretended kernel's fill_, and the operation
        assert (out == 7).all()
    OP(*HELD, out, None, *DSA_TOPK_INDEXER.filled(HELD, {"check": True}).values(), "auto")
    assert kernel.calls[-1] == "direct"
    call(sorted=True)
    call(backend="sm90")
    assert kernel.calls[-2:] == ["checked", "checked"]
    with pytest.raises(NotImplementedError, match="positions"):
        call(ids="position")


@pytest.mark.parametrize("name", ["seq_lens", "block_table"])
@pytest.mark.parametrize("last", [False, True], ids=["first element", "last element"])
def test_ids_that_share_memory_with_integers_are_an_error_as_ever(
    kernel: Kernel, name: str, last: bool
) -> None:
    for _ in range(2):
        call()
    given: Tensor = getattr(HELD, name)
    room = torch.zeros(2 * TOPK + given.numel() - 1, dtype=torch.int32)
    ids, other = room[-2 * TOPK :], room[: given.numel()]
    if last:
        ids, other = room[: 2 * TOPK], room[-given.numel() :]
    other.copy_(given.flatten())
    with pytest.raises(ValueError, match=f"topk_indices: .* shares memory with {name}"):
        call(ids.view(2, TOPK), **{name: other.view(given.shape)})
    assert kernel.calls == ["checked", "direct"] and torch.equal(other, given.flatten())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", [*HELD._fields, "out"])
def test_nested_and_sparse_tensors_are_an_error_as_ever(kernel: Kernel, name: str) -> None:
    """Of as many elements as those that were served."""
    for _ in range(2):
        call()
    given: Tensor = output() if name == "out" else getattr(HELD, name)
    if given.dtype == torch.float8_e4m3fn:
        given = given.float()
    named = "topk_indices" if name == "out" else name
    halves = list(given.flatten().chunk(2))
    for wrong in (torch.nested.nested_tensor(halves), given.to_sparse()):
        with pytest.raises(TypeError, match=f"{named}: expected a dense tensor"):
            call(**{name: wrong})
    assert kernel.calls == ["checked", "direct"]


def test_too_many_pages_are_an_error_and_none_are_served_the_whole_way(kernel: Kernel) -> None:
    call()
    call(k_index_cache_fp8=CACHE[:0])
    assert kernel.calls == ["checked", "checked"]
    many = CACHE[:1].expand(2**25 + 1, 64, 1, 132)
    with pytest.raises(ValueError, match="expected at most 33554432 pages"):
        call(k_index_cache_fp8=many)
    assert kernel.calls == ["checked", "checked"]


def test_a_wrong_layout_is_an_error_and_errors_of_launches_reach_the_caller(kernel: Kernel) -> None:
    call()
    out = output()
    with pytest.raises(ValueError, match="weights: expected a contiguous last dimension"):
        call(out, weights=torch.zeros(4, 2).t())
    for error in (ValueError("Mismatched Tensor"), RuntimeError("CUDA error 700")):
        kernel.refusal = error
        with pytest.raises(type(error), match=str(error)):
            call(out)
    kernel.refusal = None
    assert kernel.calls == ["checked"] and (out == -99).all()
    call(out)
    assert kernel.calls == ["checked", "direct"] and (out == 7).all()


def test_numbers_of_pages_and_tables_of_any_width_are_one_call(kernel: Kernel) -> None:
    call()
    buffer = torch.zeros(2, 9, dtype=torch.int32)
    for pages in (1, 2, 5):
        for width in (1, 3, 9):
            table = torch.zeros(2, width, dtype=torch.int32)
            call(k_index_cache_fp8=CACHE[:1].expand(pages, -1, -1, -1).clone(), block_table=table)
            assert kernel.calls.pop() == "direct" and kernel.tables[-1][1] == width
    ways = []
    for width in (2, 3, 8):  # a server's buffer is wider than what it needs
        call(block_table=buffer[:, :width])
        ways.append(kernel.calls.pop())
    assert ways == ["checked", "direct", "direct"]
    for ids in (buffer[:, :8].flatten()[: 2 * TOPK], buffer[0]):
        with pytest.raises(ValueError):
            call(ids, block_table=buffer[:, :8])


@pytest.mark.parametrize("wide", [False, True], ids=["dense", "of a wider table"])
def test_ids_in_the_end_of_a_wide_table_or_of_many_pages_are_found(
    kernel: Kernel, wide: bool
) -> None:
    """The bytes of what has a free size are those of this call, not of the call that was bound."""
    buffer = torch.zeros(4 * TOPK, 8, dtype=torch.int32)
    narrow = buffer[:2, :1] if wide else torch.zeros(2, 1, dtype=torch.int32)
    for _ in range(2):
        call(block_table=narrow)
    far = torch.zeros(2 * 9 * TOPK, dtype=torch.int32)
    table = far.view(2, -1)[:, : 8 * TOPK] if wide else far.view(2, -1)
    with pytest.raises(ValueError, match="shares memory with block_table"):
        call(table[1, -2 * TOPK :].view(2, TOPK), block_table=table)
    pages = torch.zeros(5, 64, 1, 132, dtype=torch.uint8)
    ids = pages[4].flatten()[: 8 * TOPK].view(torch.int32).view(2, TOPK)
    with pytest.raises(ValueError, match="shares memory with k_index_cache_fp8"):
        call(ids, k_index_cache_fp8=pages)
    assert kernel.calls == ["checked", "direct"]


class Mine(Tensor):
    """Notes the functions that it passes through."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*HELD._fields, "out"])
def test_subclasses_see_the_operation(kernel: Kernel, name: str) -> None:
    call()
    mine = {**HELD._asdict(), "out": output()}[name].as_subclass(Mine)
    Mine.seen.clear()
    call(**{name: mine})
    assert OP in Mine.seen


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_tracers_record_the_operation(kernel: Kernel) -> None:
    call()

    def choose(weights: Tensor, out: Tensor) -> Tensor:
        call(out, weights=weights)
        return out + 1

    weights = HELD.weights
    for pre_dispatch in (False, True):
        graph = make_fx(choose, pre_dispatch=pre_dispatch)(weights, output())
        assert OP in [node.target for node in graph.graph.nodes]
    traced = torch.jit.trace(choose, (weights, output()), check_trace=False)
    assert "flashdsa::dsa_topk_indexer" in str(traced.inlined_graph)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()

    def compiled(out: Tensor) -> Tensor:
        flashdsa.dsa_topk_indexer(*HELD, out)
        return out + 1

    out = output()
    assert (torch.compile(compiled, fullgraph=True, backend=keep)(out) == 8).all()
    assert OP in [node.target for node in graphs[0].graph.nodes]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_without_gradients_calls_are_direct(kernel: Kernel, inference: bool) -> None:
    outside = output()
    for way in ("checked", "direct"):
        with torch.inference_mode() if inference else torch.no_grad():
            assert is_plain_eager()
            made_here = output()
            call(made_here)
            call(outside)  # to inference mode another kind of tensor
        assert kernel.calls[-2:] == [way, way if inference else "direct"]
    with nullcontext() if inference else torch.inference_mode():
        call(made_here)
    assert made_here.is_inference() is inference and (made_here == 7).all()


def test_calls_of_as_many_elements_but_other_sizes_are_direct_in_turn(kernel: Kernel) -> None:
    """Two rows of H heads and topk ids, one row of twice as many of each."""
    two_rows = (*HELD, output())
    one_row = (
        torch.zeros(1, 8, 128).to(torch.float8_e4m3fn),
        CACHE,
        torch.zeros(1, 8),
        HELD.seq_lens[:1],
        HELD.block_table[:1],
        torch.zeros(1, 2 * TOPK, dtype=torch.int32),
    )
    for _ in range(3):
        flashdsa.dsa_topk_indexer(*two_rows)
        flashdsa.dsa_topk_indexer(*one_row)
    assert kernel.calls == ["checked"] * 2 + ["direct"] * 4


def test_warming_up_meets_every_kernel(kernel: Kernel) -> None:
    """Either order, more rows than SMs, two queries of many requests, tables with room for at most
    topk tokens, for more, and for rows long enough to be shared by clusters."""
    orders = (False, True)
    flashdsa.warm_up("dsa_topk_indexer", H=4, topk=TOPK, sorted=orders, backend="sm90")
    sizes = product((1, 256, 128), (1, 33, 16384), orders)
    assert sorted(kernel.tables) == sorted(sizes)
