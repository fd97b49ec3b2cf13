"""A call like one that was served is not checked again; one that differs in anything is."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashdsa
from flashdsa import reference
from flashdsa.backends.catalog import registry
from flashdsa.dispatch import call_cache, heap, registration
from flashdsa.dispatch.call_cache import CallCache
from flashdsa.dispatch.registration import custom_op
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import FlashDsaError
from flashdsa.ops import OPERATIONS
from tests.ops import inputs


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch, new_calls: None) -> Iterator[list[str]]:
    """The operations that were checked."""
    checked: list[str] = []
    check = OpSpec.check

    def noted(spec: OpSpec, *arguments: object) -> object:
        checked.append(spec.operation)
        return check(spec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OpSpec, "check", noted)
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    yield checked


def test_only_the_first_of_calls_alike_is_checked(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    first = flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    again = flashdsa.sparse_mla_fwd(x.q + 1, x.kv.clone(), x.indices, d_v=x.d_v)
    assert checks == ["sparse_mla_fwd"]
    assert torch.equal(flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)[0], first[0])
    assert not torch.equal(again[0], first[0])


def test_whatever_the_checks_read_makes_a_call_a_new_one(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs.attention(torch.float32)
    calls = [
        {},
        {"q": x.q.bfloat16(), "kv": x.kv.bfloat16()},
        {"q": x.q[:-1], "indices": x.indices[:-1]},
        {"q": x.q.transpose(0, 1).contiguous().transpose(0, 1)},
        {"q": x.q.half(), "kv": x.kv.half()},
        {"sm_scale": 0.5},
        {"d_v": x.d_v - 1},
        {"topk_length": torch.full((len(x.q),), 2, dtype=torch.int32)},
        {"backend": "cpu"},
    ]
    for number, changed in enumerate(calls, 1):
        call = {"q": x.q, "kv": x.kv, "indices": x.indices, "d_v": x.d_v, **changed}
        for _ in range(2):
            flashdsa.sparse_mla_fwd(**call)  # type: ignore[arg-type]
        assert len(checks) == number, changed
    for name, value in (("FLASHDSA_BACKEND", "cpu"), ("FLASHDSA_CHECK", "1")):
        monkeypatch.setenv(name, value)
        for _ in range(2):
            flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    assert len(checks) == len(calls) + 2


def test_a_tensor_may_begin_anywhere_in_its_storage(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    shifted = torch.cat([x.kv.flatten()[:1], x.kv.flatten()])[1:].view_as(x.kv)
    results = [flashdsa.sparse_mla_fwd(x.q, kv, x.indices, d_v=x.d_v) for kv in (x.kv, shifted)]
    assert torch.equal(*(out for out, _ in results))
    assert checks == ["sparse_mla_fwd"]


def test_where_a_cache_begins_is_looked_at_each_time(checks: list[str]) -> None:
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    slots = torch.zeros(1, dtype=torch.int32)

    def beginning_at(first: int) -> torch.Tensor:
        return torch.zeros(cache.numel() + 4, dtype=torch.uint8)[first:][: cache.numel()]

    for whole in (cache, beginning_at(4).view_as(cache), cache):
        flashdsa.read_index_k_cache(whole, slots)
    assert checks == ["read_index_k_cache"]
    for first in (1, 2, 1):
        with pytest.raises(FlashDsaError, match="expected pages aligned to 4 bytes"):
            flashdsa.read_index_k_cache(beginning_at(first).view_as(cache), slots)


def test_calls_that_write_are_remembered_and_autograd_is_told_each_time(checks: list[str]) -> None:
    k_index, weights = torch.randn(10, 128), torch.ones(3, 4)
    ends = torch.tensor([3, 9, 10], dtype=torch.int32)
    for _ in range(3):
        q_index = torch.randn(3, 4, 128)
        ids = torch.full((3, 5), -99, dtype=torch.int32)
        scores = flashdsa.prefill_logits(q_index, k_index, weights, None, ends)
        before = ids._version
        flashdsa.dsa_topk_prefill(q_index, k_index, weights, None, ends, ids)
        told = ids._version - before
        best = reference.dsa_topk_prefill(scores, None, ends, 5)
        assert torch.equal(ids, best)
        writes = ids._version
        custom_op(OPERATIONS["dsa_topk_prefill"])(
            q_index, k_index, weights, ends, ids, None, None, None, False, 1, "auto"
        )
        assert ids._version - writes == told and torch.equal(ids, best)
    assert checks == ["prefill_logits", "dsa_topk_prefill"]


def test_an_output_with_another_layout_is_checked(checks: list[str]) -> None:
    x = [torch.randn(3, 4, 128), torch.randn(10, 128), torch.ones(3, 4), None]
    ends, ids = torch.full((3,), 10, dtype=torch.int32), torch.empty(3, 5, dtype=torch.int32)
    flashdsa.dsa_topk_prefill(*x, ends, ids)
    for wrong in (ids.long(), ids[:2], ids.t().contiguous().t()):
        with pytest.raises(FlashDsaError, match=r"^topk_indices: "):
            flashdsa.dsa_topk_prefill(*x, ends, wrong)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of calls that no memory knew."""
    noted: list[str] = []
    call = registration._call

    def note(spec: OpSpec, *arguments: Any) -> Any:
        noted.append(spec.operation)
        return call(spec, *arguments)

    monkeypatch.setattr(registration, "_call", note)
    return noted


def test_every_form_of_an_operand_is_remembered(new: list[str]) -> None:
    """Pages and kv heads, slots of int64, next to the table's own form."""
    x = inputs.attention(torch.float32)
    kv = torch.randn(128, x.kv.shape[1])
    expected = flashdsa.sparse_mla_fwd(x.q, kv, x.indices, d_v=x.d_v)[0]
    forms = [
        {"kv": kv[:, None]},
        {"kv": kv.view(2, 64, -1)},
        {"kv": kv.view(2, 64, 1, -1)},
        {"indices": x.indices.long()},
        {"indices": x.indices[:, None]},
    ]
    for number, form in enumerate(forms, 2):
        call = {"kv": kv, "indices": x.indices, **form}
        for scale in (1.0, 2.0, 4.0):
            scaled = call["kv"] * scale
            out = flashdsa.sparse_mla_fwd(x.q / scale, **{**call, "kv": scaled}, d_v=x.d_v)[0]
            assert torch.equal(out, scale * expected), form
        assert len(new) == number, form
    with pytest.raises(FlashDsaError, match="expected pages that follow each other"):
        flashdsa.sparse_mla_fwd(x.q, kv.view(2, 64, 1, -1)[:, :32], x.indices, d_v=x.d_v)


def test_requests_with_several_queries_are_remembered(new: list[str]) -> None:
    x = inputs.indexer()
    pairs = {name: x._asdict()[name][None] for name in ("q_index_fp8", "weights", "seq_lens")}
    pairs |= {"k_index_cache_fp8": x.k_index_cache_fp8, "block_table": x.block_table[:1]}
    wanted = torch.empty(2, 16, dtype=torch.int32)
    rows = x._replace(block_table=x.block_table[:1].expand(2, -1))
    flashdsa.dsa_topk_indexer(*rows, wanted)
    for number in range(3):
        ids = torch.full((1, 2, 16), -99, dtype=torch.int32)
        before = ids._version
        flashdsa.dsa_topk_indexer(**pairs, topk_indices=ids)
        assert torch.equal(ids[0], wanted) and ids._version > before
        assert new == ["dsa_topk_indexer"] * 2, number
    with pytest.raises(FlashDsaError, match=r"seq_lens: expected shape \[B, next_n\]"):
        flashdsa.dsa_topk_indexer(**{**pairs, "seq_lens": x.seq_lens}, topk_indices=ids)


def test_calls_of_many_sizes_are_remembered(checks: list[str]) -> None:
    """As batches of a server are, whose number of requests changes."""
    for _ in range(2):
        for rows in range(1, 41):
            flashdsa.indexer_kl(torch.rand(rows, 3), torch.rand(rows, 3))
    assert len(checks) == 40


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv": "bfloat16"}, "kv: expected dtype float32"),
        ({"kv": [[1.0]]}, "kv: expected a torch.Tensor; got list"),
        ({"d_v": 8.0}, "d_v: expected an integer; got float"),
        ({"backend": ["cpu"]}, "backend: expected one of"),
        ({"topk_length": 3}, "topk_length: expected a torch.Tensor; got int"),
    ],
    ids=["dtype", "no tensor", "no integer", "no name", "no optional tensor"],
)
def test_a_wrong_call_is_wrong_each_time(changed: dict[str, Any], message: str) -> None:
    x = inputs.attention(torch.float32)
    call: dict[str, Any] = {"q": x.q, "kv": x.kv, "indices": x.indices, "d_v": 8}
    flashdsa.sparse_mla_fwd(**call)
    if changed.get("kv") == "bfloat16":
        changed = {"kv": x.kv.bfloat16()}
    for _ in range(2):
        with pytest.raises(FlashDsaError, match=message):
            flashdsa.sparse_mla_fwd(**{**call, **changed})


def test_missing_operands_are_told_from_given_ones(checks: list[str]) -> None:
    x = inputs.attention(torch.float32)
    plain, limited = {"d_v": x.d_v}, {"d_v": x.d_v, "topk_length": x.topk_length}
    expected = [flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, **o)[0] for o in (plain, limited)]
    for options, out in ((plain, expected[0]), (limited, expected[1])) * 2:
        assert torch.equal(flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, **options)[0], out)
    assert len(checks) == 2


def test_gradients_are_recorded_where_they_are_asked_for(checks: list[str]) -> None:
    scores, target = torch.rand(2, 3), torch.rand(2, 3)
    leaf = scores.clone().requires_grad_()
    for _ in range(2):
        assert not flashdsa.indexer_kl(scores, target).requires_grad
        with torch.no_grad():
            assert not flashdsa.indexer_kl(leaf, target).requires_grad
        kl = flashdsa.indexer_kl(leaf, target)
        assert kl.grad_fn is not None and kl.grad_fn.name().startswith("indexer_kl")
        kl.sum().backward()
        with torch.inference_mode():
            assert not flashdsa.indexer_kl(leaf, target).requires_grad
    assert leaf.grad is not None


@pytest.mark.parametrize("form", ["rows", "one kv head", "int64"])
def test_a_recorded_call_that_comes_back_has_the_dispatchers_gradients(
    form: str, checks: list[str]
) -> None:
    x = inputs.attention(torch.float64)
    kv = x.kv if form != "one kv head" else x.kv[:, None]
    indices = x.indices.long() if form == "int64" else x.indices
    sink = torch.nn.Parameter(x.attn_sink)

    def gradients(scale: float, *, mode: object) -> tuple[torch.Tensor, ...]:
        leaves = (x.q * scale).requires_grad_(), kv.clone().requires_grad_(), sink
        with mode:  # type: ignore[attr-defined]
            out = flashdsa.sparse_mla(*leaves[:2], indices, d_v=x.d_v, attn_sink=sink)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

    for scale in (1.0, 2.0, 3.0):
        got = gradients(scale, mode=nullcontext())
        expected = gradients(scale, mode=_Watch())  # by torch's dispatcher
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert [one.shape for one in got] == [x.q.shape, kv.shape, sink.shape]
    once = ["sparse_mla_fwd", "mla_bwd"]
    assert sorted(set(checks)) == sorted(once)
    before = len(checks)
    gradients(4.0, mode=nullcontext())
    assert len(checks) == before


def test_a_recorded_call_that_comes_back_has_no_gradient_of_a_gradient() -> None:
    x = inputs.attention(torch.float64)
    for _ in range(2):
        q = x.q.clone().requires_grad_()
        out = flashdsa.sparse_mla(q, x.kv, x.indices, d_v=x.d_v)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(FlashDsaError, match="no gradient of a gradient"):
            dq.sum().backward()


def test_a_recorded_call_that_comes_back_may_be_checkpointed() -> None:
    x = inputs.attention(torch.float64)
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    for _ in range(2):
        q = x.q.clone().requires_grad_()

        def run(q: torch.Tensor) -> torch.Tensor:
            return flashdsa.sparse_mla(q, x.kv, x.indices, d_v=x.d_v)

        (plain,) = torch.autograd.grad(run(q).sum(), q)
        out = torch.utils.checkpoint.checkpoint(run, q, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], plain)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(q)
        assert out.shape in packed and q.shape in packed
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], plain)


def test_a_call_that_names_a_tensor_twice_is_remembered_as_one(checks: list[str]) -> None:
    """GLM's own pool is in the rows that the other list selects from."""
    x = inputs.attention(torch.float32)
    options: dict[str, Any] = {"d_v": x.d_v, "extra_indices": x.indices}
    copy = x.kv.clone()
    for kv in (x.kv, x.kv, copy, x.kv, copy):
        flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, extra_kv=kv, **options)
    assert len(checks) == 2
    other = inputs.attention(torch.float32, seed=1).kv
    got = flashdsa.sparse_mla_fwd(x.q, other, x.indices, extra_kv=x.kv, **options)
    expected = flashdsa.sparse_mla_fwd(x.q, other, x.indices, extra_kv=copy, **options)
    assert torch.equal(got[0], expected[0]) and len(checks) == 2


def test_an_implementation_that_is_registered_later_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = inputs.attention(torch.float32)
    flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    known = registry.implementations()
    (cpu,) = (i for i in known if (i.operation, i.backend) == ("sparse_mla_fwd", "cpu"))
    better = dataclasses.replace(cpu, bind="tests.ops.test_served_again:refuse", priority=9)
    monkeypatch.setattr(registry, "_implementations", [*known])
    registry.register(better)
    with pytest.raises(RuntimeError, match="the better one"):
        flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, d_v=x.d_v)
    registry._selected.clear()


def _vmapped(x: inputs.Attention) -> None:
    torch.vmap(lambda q: flashdsa.sparse_mla_fwd(q, x.kv, x.indices, d_v=x.d_v))(x.q[None])


def _plain(x: inputs.Attention, **changed: torch.Tensor) -> None:
    tensors = {"q": x.q, "kv": x.kv, "indices": x.indices, **changed}
    flashdsa.sparse_mla_fwd(**tensors, d_v=x.d_v)


def _on_meta(x: inputs.Attention) -> None:
    _plain(x, q=x.q.to("meta"), kv=x.kv.to("meta"), indices=x.indices.to("meta"))


class _Watch(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _WatchFunctions(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(context: object) -> Callable[[inputs.Attention], None]:
    def call(x: inputs.Attention) -> None:
        with context:  # type: ignore[attr-defined]
            _plain(x)

    return call


@pytest.mark.parametrize(
    ("call", "dispatched"),
    [
        (_plain, False),
        (_under(torch.inference_mode()), False),
        (lambda x: _plain(x, q=x.q.clone().requires_grad_()), False),
        (lambda x: _plain(x, q=torch.nn.Parameter(x.q)), False),
        (_vmapped, True),
        (_under(torch.autocast("cpu", torch.bfloat16)), True),
        (_under(_Watch()), True),
        (_under(_WatchFunctions()), True),
        (_under(FakeTensorMode(allow_non_fake_inputs=True)), True),
        (_under(torch.profiler.profile()), True),
        (_on_meta, True),
    ],
    ids=[
        "plain", "inference", "gradient", "parameter", "vmap", "autocast", "mode", "function mode",
        "fakes", "profiler", "meta",
    ],
)  # fmt: skip
def test_the_dispatcher_is_asked_where_it_has_something_to_do(
    call: Callable[[inputs.Attention], None], dispatched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OpSpec] = []
    custom_op = registration.custom_op

    def noted(spec: OpSpec) -> object:
        asked.append(spec)
        return custom_op(spec)

    monkeypatch.setattr(registration, "custom_op", noted)
    _plain(inputs.attention(torch.float32))  # remembered
    call(inputs.attention(torch.float32))
    assert bool(asked) == dispatched


def refuse(*_: object, **__: object) -> None:
    """An implementation that can be told from others."""
    raise RuntimeError("the better one")


@pytest.mark.parametrize("most", ["MOST_CALLS", "MOST_ALIKE"])
def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    monkeypatch.setattr(call_cache, most, 3)
    kept: list[Any] = []

    class Noted(CallCache):
        """Notes how many calls it keeps."""

        def keep(self, *arguments: Any) -> None:
            super().keep(*arguments)
            kept.append(sum(len(alike) for alike in self._calls.values()))

    cache = Noted(OPERATIONS["indexer_kl"])
    for rows in range(1, 6):
        scores = torch.rand(rows, 60 // rows if most == "MOST_ALIKE" else 60)
        cache.keep((scores, scores + 1), ("cpu",), "cpu", print)
    assert kept == [1, 2, 3, 1, 2]


def test_calls_with_equal_keys_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 keys of 16 calls each were 170 MB per operation."""
    monkeypatch.setattr(call_cache, "MOST_CALLS", 5)
    cache = CallCache(OPERATIONS["indexer_kl"])
    for elements in (60, 120, 60):
        for rows in (1, 2, 3, 4):
            scores = torch.rand(rows, elements // rows)
            cache.keep((scores, scores + 1), ("cpu",), "cpu", print)
            assert 0 < sum(len(alike) for alike in cache._calls.values()) <= 5


def test_free_memory_is_given_back_as_the_process_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every new call: pages that are used again cost time."""
    given: list[int] = []
    resident = iter((100, 150, 90, 191, 100, 180))
    monkeypatch.setattr(heap, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(heap, "give_back", lambda: given.append(number))
    monkeypatch.setattr(heap, "LOOK_BYTES", 1000)
    monkeypatch.setattr(heap, "GROWTH_BYTES", 100)
    monkeypatch.setattr(call_cache, "heap", heap.Heap())
    cache = CallCache(OPERATIONS["indexer_kl"])
    for number in range(10):  # 400 bytes of two operands: each third call looks
        scores = torch.rand(1, 50 + number, 1)[:, :50, 0]
        cache.keep((scores, scores + 1), ("cpu",), "cpu", print)
    assert given == []
    scores = torch.rand(1, 50)
    for number in range(10, 15):
        cache.keep((scores, scores + number), ("cpu",), "cpu", print)
    assert given == [11]


NEW_SIZES = """
import random, torch, flashdsa
torch.set_num_threads(1)
sizes = [(8 * s, h, n) for s in range(1, 65) for h in range(1, 9) for n in range(1, 41)]
random.Random(0).shuffle(sizes)
kv = torch.randn(64, 576)
for s, h, n in sizes[:20_000]:
    q, ids = torch.randn(s, h, 576), torch.randint(64, (s, n), dtype=torch.int32)
    flashdsa.sparse_mla_fwd(q, kv, ids)
print(open("/proc/self/status").read())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it takes four minutes
def test_memory_of_many_new_sizes_is_bounded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEW_SIZES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", done.stdout)
    assert int(kilobytes) < 600_000


BOUND: list[tuple[int, ...]] = []
"""Sizes of the scores that `bind_kl` was asked to serve."""


def no_runner(_: torch.device) -> None:
    """`bind_kl` needs none."""


def bind_kl(_: None, operands: Any) -> Callable[[Any], torch.Tensor]:
    """The sum of the scores, in the divergence's place."""
    BOUND.append(tuple(operands.scores.shape))
    return lambda operands: operands[0].sum(1)


def test_what_binds_is_bound_once_for_calls_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        dataclasses.replace(row, bind=f"{__name__}:bind_kl", runner=f"{__name__}:no_runner")
        if (row.operation, row.backend) == ("indexer_kl", "cpu")
        else row
        for row in registry.implementations()
    ]
    monkeypatch.setattr(registry, "_implementations", rows)
    monkeypatch.setattr(registry, "_selected", {})
    BOUND.clear()
    for size in (3, 3, 4):
        scores = torch.rand(2, size)
        assert torch.equal(flashdsa.indexer_kl(scores, torch.rand(2, size)), scores.sum(1))
    assert BOUND == [(2, 3), (2, 4)]
