"""Indexer calls that come back go straight to the kernel; wrong or watched ones the whole way.

The kernel and its GPU are pretended: a backend of CPU tensors that notes its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashdsa
from flashdsa.backends import registry as registry_module
from flashdsa.backends.catalog import registry
from flashdsa.backends.features import OneOf
from flashdsa.backends.gpu.context import THREAD
from flashdsa.operands import TopkIndexerOperands
from flashdsa.ops.indexer import DSA_TOPK_INDEXER
from flashdsa.ops.indexer_launch import LAUNCHES, LaunchCache
from flashdsa.ops.plain import is_plain_eager
from flashdsa.ops.registration import custom_op
from flashdsa.problem import Operation
from tests.ops import inputs

TOPK = 16
WAYS = ("serve", "runner", "launch_config")
HEADS = (4, 8)
HELD = inputs.indexer()
CACHE = HELD.k_index_cache_fp8
OP = custom_op(DSA_TOPK_INDEXER)


@dataclass
class Kernel:
    """A backend with launch configs: says which way a call came, and writes as a kernel would."""

    calls: list[str] = field(default_factory=list)
    error: Exception | None = None
    refusal: Exception | None = None
    """What the function raises before it writes."""
    tables: list[tuple[int, int, bool]] = field(default_factory=list)
    """Rows and pages of the table of every call, and the order if it is known."""

    def runner(self, device: torch.device) -> Any:
        """The kernel stands for its GPU too."""
        assert device.type == "cpu"
        return self

    def serve(
        self,
        runner: Any,
        operands: TopkIndexerOperands,
        *,
        sorted: bool,
        positions: bool,
        check: bool,
    ) -> None:
        """The whole way."""
        assert runner is self
        self.tables.append((*operands.block_table.shape, sorted))
        self._write("checked" if check else "unchecked", operands.topk_indices)

    def launch_config(
        self, runner: Any, num_heads: int, topk: int, sorted: bool, positions: bool, rows: int
    ) -> tuple[Callable[..., None], int, int]:
        """The short way."""
        assert runner is self
        return partial(self.function, (num_heads, topk)), 3 * rows, 4

    def function(self, compiled_for: tuple[int, int], *arguments: Any) -> None:
        """The kernel's function."""
        for tensor in arguments[:6]:
            assert tensor.stride() is not None and tensor.data_ptr()  # what DLPack hands over
        if self.refusal is not None:
            raise self.refusal
        if (arguments[0].shape[1], arguments[5].shape[1]) != compiled_for:
            raise ValueError("Mismatched sizes")
        assert arguments[6:] == (3 * len(arguments[0]), 4)
        self.tables.append((*arguments[4].shape, False))
        self._write("direct", arguments[5])

    def _write(self, way: str, out: Tensor) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(way)
        out.detach().fill_(7)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Iterator[Kernel]:
    pretended = Kernel()
    (real,) = (
        i
        for i in registry.implementations(Operation.DSA_TOPK_INDEXER)
        if i.backend == "sm90" and not i.features.positions
    )
    features = replace(
        real.features,
        devices=("cpu",),
        num_heads=replace(real.features.num_heads, values=HEADS),
        topk=OneOf((TOPK, 2 * TOPK)),
        capability=None,
    )
    implementation = replace(
        real,
        entry="pretended:serve",
        runner="pretended:runner",
        launch_config="pretended:launch_config",
        bind="",
        features=features,
    )
    loads = {f"pretended:{way}": getattr(pretended, way) for way in WAYS}
    monkeypatch.setattr(registry, "_implementations", [implementation])
    monkeypatch.setattr(registry, "_selected", {})
    monkeypatch.setattr(registry_module, "_load", loads.__getitem__)
    monkeypatch.setattr(THREAD, "has_context", True)
    LAUNCHES.clear()
    yield pretended
    LAUNCHES.clear()


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


def test_a_thread_without_a_context_is_not_launched_for_at_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner of the backend gives it one; the driver would refuse the launch."""
    call()
    flashdsa.dsa_topk_indexer_launch(*HELD, output())
    monkeypatch.setattr(THREAD, "has_context", False)
    kernel.calls.clear()
    call()
    flashdsa.dsa_topk_indexer_launch(*HELD, output())
    assert "direct" not in kernel.calls


def test_a_call_that_was_served_is_launched_at_once(kernel: Kernel) -> None:
    out = output()
    for turn, way in enumerate(("checked", "direct", "direct"), 1):
        out.detach().fill_(-99)
        before = out._version
        call(out)
        assert kernel.calls[-1] == way and len(kernel.calls) == turn
        assert out._version == before + 2  # the pretended kernel's fill_, and the operation
        assert (out == 7).all()
    OP(*HELD, out, False, False, True, "auto")
    assert kernel.calls[-1] == "direct"
    call(sorted=True)
    call(backend="sm90")
    assert kernel.calls[-2:] == ["checked", "checked"]
    with pytest.raises(NotImplementedError, match="positions"):
        call(ids="position")
    call(block_table=torch.zeros(2, 9, dtype=torch.int32)[:, :3])
    assert kernel.calls[-1] == "direct"  # of what else there is, the kernel's function takes care


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_lens", HELD.seq_lens.view(torch.uint32)),
        ("block_table", HELD.block_table.view(torch.uint32)),
        ("out", output().view(torch.uint32)),
        ("out", output().float()),
        ("seq_lens", 3),
    ],
    ids=["seq_lens", "block_table", "uint32 ids", "float ids", "no tensor"],
)
def test_what_the_kernel_would_take_wrongly_is_an_error_as_ever(
    kernel: Kernel, name: str, value: Any
) -> None:
    message = rf"{name.replace('out', 'topk_indices')}: expected (dtype int32|a torch.Tensor); got"
    call()
    with pytest.raises(TypeError, match=message):
        call(**{name: value})
    assert kernel.calls == ["checked"]


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


def test_a_refused_call_is_checked_and_served_or_raises(kernel: Kernel) -> None:
    call()
    kernel.refusal = ValueError("Mismatched Tensor on argument #2")
    out = output()
    with pytest.raises(ValueError, match="weights: expected a contiguous last dimension"):
        call(out, weights=torch.zeros(4, 2).t())
    assert kernel.calls == ["checked"] and (out == -99).all()
    call(out)
    assert kernel.calls == ["checked", "checked"] and (out == 7).all()
    kernel.error = RuntimeError("CUDA error 700")
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        call()


def test_the_environment_is_read_at_every_call(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    call()
    for value in ("1", "0"):
        monkeypatch.setenv("FLASHDSA_CHECK", value)
        call()
    with pytest.raises(ValueError, match="FLASHDSA_CHECK"):
        monkeypatch.setenv("FLASHDSA_CHECK", "perhaps")
        call()
    monkeypatch.delenv("FLASHDSA_CHECK")
    call()
    assert kernel.calls == ["checked", "checked", "checked", "direct"]
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    with pytest.raises(NotImplementedError, match="backend 'cpu'"):
        call()
    monkeypatch.setenv("FLASHDSA_BACKEND", "sm90")
    call()
    call()
    monkeypatch.delenv("FLASHDSA_BACKEND")
    call()
    assert kernel.calls[4:] == ["checked", "direct", "direct"]


class Seen(TorchDispatchMode):
    """Notes the operations that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    """Notes the functions that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Seen, SeenFunctions])
def test_modes_see_the_operation(kernel: Kernel, make: type[Seen | SeenFunctions]) -> None:
    call()
    with make() as seen:
        call()
    assert OP in seen.operations
    call()
    assert kernel.calls[-1] == "direct"


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


def test_a_profile_shows_the_operation(kernel: Kernel) -> None:
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert "flashdsa::dsa_topk_indexer" in {event.name for event in profile.events()}


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


def test_tensors_that_stand_for_others_go_the_whole_way(kernel: Kernel) -> None:
    call()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(output())
        call(fake, **{n: mode.from_tensor(x) for n, x in HELD._asdict().items()})
    assert kernel.calls == ["checked"]
    weights = HELD.weights
    with pytest.raises(NotImplementedError, match=r"topk_indices: .* must have the batch's dim"):
        torch.func.vmap(lambda w: call(weights=w) or w)(weights[None])
    assert kernel.calls == ["checked"]
    call(weights=torch.nn.Parameter(weights))
    assert kernel.calls[-1] == "direct"  # by the dispatcher


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_without_gradients_calls_are_direct(kernel: Kernel, inference: bool) -> None:
    outside = output()
    for way in ("checked", "direct"):
        with torch.inference_mode() if inference else torch.no_grad():
            assert is_plain_eager()
            made_here = output()
            call(made_here)
            call(outside)
        assert kernel.calls.pop() == "direct" and kernel.calls.pop() == way
    with nullcontext() if inference else torch.inference_mode():
        call(made_here)
    assert made_here.is_inference() is inference and (made_here == 7).all()


def test_unchecked_launches_are_direct_too(kernel: Kernel) -> None:
    def launch(**changed: Any) -> str:
        out = output()
        operands = {**HELD._asdict(), **changed}
        flashdsa.dsa_topk_indexer_launch(*operands.values(), out)
        assert (out == 7).all()
        return kernel.calls[-1]

    assert [launch(), launch()] == ["unchecked", "direct"]
    assert launch(k_index_cache_fp8=CACHE[:0]) == "unchecked"
    for refusal in (ValueError("Mismatched Tensor"), TypeError("Mismatched type")):
        kernel.refusal = refusal
        assert launch() == "unchecked"
        kernel.refusal = None
        assert launch() == "direct"
    kernel.error = ValueError("expected dtype=float32")
    with pytest.raises(ValueError, match="expected dtype=float32"):
        launch()


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_the_drivers_errors_are_not_taken_for_refusals(kernel: Kernel, checked: bool) -> None:
    launch = call if checked else partial(flashdsa.dsa_topk_indexer_launch, *HELD, output())
    launch()
    kernel.refusal = RuntimeError("CUDA error 700")
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launch()
    assert len(kernel.calls) == 1


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_calls_of_as_many_elements_but_other_sizes_are_direct_in_turn(
    kernel: Kernel, checked: bool
) -> None:
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
    launch = flashdsa.dsa_topk_indexer if checked else flashdsa.dsa_topk_indexer_launch
    for _ in range(3):
        launch(*two_rows)
        launch(*one_row)
    assert kernel.calls[2:] == ["direct"] * 4


def test_launches_are_forgotten_before_there_are_too_many() -> None:
    launches = LaunchCache(most=2)
    for key in range(3):
        launches.keep((key,), 1, (print, key, 0))
    assert [launches.find((key,)) for key in range(3)] == [None, None, (print, 2, 0)]


def test_warming_up_meets_every_kernel(kernel: Kernel) -> None:
    """Either order, more rows than SMs, two queries of many requests, a table of rows long enough
    to be shared by clusters."""
    flashdsa.compile_kernel(num_heads=4, topk=TOPK, backend="sm90")
    one, wide, many, pairs = (1, 1), (1, 16384), (256, 1), (128, 1)
    by_position = [(*table, False) for table in (one, wide, many, pairs)]
    assert kernel.tables == [*by_position, (*one, True), (*many, True)]
