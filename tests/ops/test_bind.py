"""Bound operations give what calls give, whatever the values and the free sizes; and warm-ups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.dispatch.registration import custom_op
from flashdsa.dispatch.spec import OpSpec
from flashdsa.ops import OPERATIONS, bound
from flashdsa.row_formats import V32
from tests.ops import inputs

X = inputs.attention(torch.float32)
OUT = torch.zeros(*X.q.shape[:2], X.d_v)
LSE = torch.zeros(X.q.shape[:2])
INDEX = inputs.indexer()
IDS = torch.zeros(2, 16, dtype=torch.int32)


def changed(spec: OpSpec, operands: tuple[Tensor | None, ...], seed: int) -> list[Tensor | None]:
    """Other values of the float operands; the same ids and lengths, outputs of -9."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor | None] = []
    for row, x in zip(spec.operands, operands, strict=True):
        if x is not None and row.written and x.dtype is not torch.uint8:
            x = torch.full_like(x, -9)
        elif x is not None and x.is_floating_point() and x.itemsize > 1:
            x = torch.rand(x.shape, generator=generator).to(x.dtype)
        made.append(None if x is None else x.clone())
    return made


def called(spec: OpSpec, operands: list[Tensor | None], given: dict[str, Any]) -> list[Tensor]:
    """Results of a call through torch's dispatcher, and what it wrote."""
    usual = {"bool": False, "int": 1, "ScalarType?": None, "str": "auto", "str?": None}
    values = [given[x.name] if x.name in given else usual[x.kind] for x in spec.parameters]
    return tensors(spec, custom_op(spec)(*operands, *values, "cpu"), operands)


def tensors(spec: OpSpec, results: Any, operands: list[Tensor | None]) -> list[Tensor]:
    """Results, and the operands that were written."""
    found = [results] if isinstance(results, Tensor) else list(results or ())
    return [*found, *(x for n in spec.written if (x := operands[n]) is not None)]


@pytest.mark.parametrize("spec", OPERATIONS.values(), ids=lambda spec: spec.operation)
def test_bound_calls_give_what_unbound_ones_do(spec: OpSpec, new_calls: Callable[[], None]) -> None:
    name = spec.operation.replace("_out", ", buffers")
    chosen = dict(inputs.small_calls()[name].arguments)
    bound_to = tuple(chosen.get(row.name) for row in spec.operands)
    chosen |= {"d_v": 512, "sm_scale": 0.3, "table_page_size": 64}
    names = [x.name for x in spec.parameters if x.passed]
    given = {name: chosen[name] for name in names if name in chosen}
    serve = flashdsa.bind(spec.operation, bound_to, backend="cpu", **given)
    for seed in range(2):
        operands, copies = changed(spec, bound_to, seed), changed(spec, bound_to, seed)
        got, expected = serve(operands), called(spec, copies, given)
        got = tensors(spec, got, operands)
        assert len(got) == len(expected) > 0
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        new_calls()


def test_the_numbers_of_pages_and_of_the_tables_columns_are_free() -> None:
    """Bound at one size, called at another."""
    q, cache, weights, _, _ = INDEX
    lengths = torch.tensor([60, 64], dtype=torch.int32)

    def operands(pages: int, width: int) -> tuple[Tensor, ...]:
        table = (torch.arange(2 * width, dtype=torch.int32) % pages).view(2, width)
        kept = torch.cat([cache] * 9)[:pages].contiguous()
        return q, kept, weights, lengths, table, torch.full_like(IDS, -9)

    for bound_to in ((1, 1), (11, 7)):
        serve = flashdsa.bind("dsa_topk_indexer", operands(*bound_to))
        for sizes in ((1, 1), (2, 3), (11, 1), (1, 40)):
            given, expected = operands(*sizes), operands(*sizes)
            serve(given)
            flashdsa.dsa_topk_indexer(*expected)
            assert torch.equal(given[-1], expected[-1]) and (given[-1] >= 0).any()


def test_what_is_missing_at_the_end_may_be_left_out() -> None:
    operands = X.q, X.kv, X.indices
    serve = flashdsa.bind("sparse_mla_fwd", operands, d_v=X.d_v)
    expected = flashdsa.sparse_mla_fwd(*operands, d_v=X.d_v)
    assert all(torch.equal(x, y) for x, y in zip(serve(operands), expected, strict=False))


def test_autograd_is_told_what_a_bound_function_writes() -> None:
    operands = (*INDEX, IDS.clone())
    serve = flashdsa.bind("dsa_topk_indexer", operands)
    before = operands[-1]._version
    serve(operands)
    assert operands[-1]._version > before


class Mine(Tensor):
    """A subclass."""


WRONG: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "operation": ("sparse_mla", (), {}, ValueError, "operation: expected one of sparse_mla_fwd, "),
    "no name": (3, (), {}, TypeError, "operation: expected one of .*; got 3"),
    "operands": ("indexer_kl", (LSE,) * 3, {}, TypeError, "operands: expected scores, target; got"),
    "none": ("indexer_kl", (LSE,), {}, TypeError, "target: expected a torch.Tensor; got None"),
    "no tensor": ("indexer_kl", (LSE, 3), {}, TypeError, "target: expected a torch.Tensor; got"),
    "meta": ("indexer_kl", (LSE.to("meta"), LSE), {}, TypeError, "scores: .* on the device meta"),
    "subclass": ("indexer_kl", (LSE.as_subclass(Mine), LSE), {}, TypeError, "scores: .* a Mine"),
    "dtype": ("indexer_kl", (LSE, LSE.double()), {}, TypeError, "target: expected dtype float32"),
    "shape": ("indexer_kl", (LSE, LSE[:1]), {}, ValueError, r"target: expected shape \[S, topk\]"),
    "unknown": ("indexer_kl", (LSE, LSE), {"topk": 3}, TypeError, "indexer_kl: .*; got topk"),
    "unused": (
        "sparse_mla_fwd",
        (X.q, X.kv, X.indices),
        {"d_v": X.d_v, "deterministic": True},
        TypeError,
        "sparse_mla_fwd: expected d_v, .*, index_block, .*; got deterministic",
    ),
    "missing": (
        "sparse_mla_fwd",
        (X.q, X.kv, X.indices),
        {},
        TypeError,
        "d_v: expected an integer; got NoneType",
    ),
    "backend": ("indexer_kl", (LSE, LSE), {"backend": "tpu"}, ValueError, "backend: expected one"),
    "gpu": ("indexer_kl", (LSE, LSE), {"backend": "sm90"}, NotImplementedError, "device: takes"),
    "gradient": (
        "indexer_kl",
        (LSE.clone().requires_grad_(), LSE),
        {},
        NotImplementedError,
        "indexer_kl: a bound function records no gradient",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_binding_is_an_error(wrong: str) -> None:
    operation, operands, options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        flashdsa.bind(operation, operands, **options)


@pytest.mark.parametrize(
    ("operation", "backend"),
    sorted(
        {
            (one.operation, one.backend)
            for one in registry.implementations()
            if "cpu" in one.features.devices
        }
    ),
)
def test_every_operation_is_warmed_up_by_its_name_alone(
    operation: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend serves each call that is made, and none is launched here."""
    monkeypatch.setattr(bound, "bind_call", lambda *given: lambda operands: None)
    flashdsa.warm_up(operation, backend=backend)
    if operation == "dsa_topk_prefill":
        flashdsa.warm_up(operation, q_index_dtype=(torch.bfloat16, torch.float8_e4m3fn), S=1)


def test_a_warm_up_tries_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    select = registry.select

    def noted(problem: Any, backend: str) -> Any:
        problems.append(problem)
        return select(problem, backend)

    monkeypatch.setattr(registry, "select", noted)
    of_all: dict[str, Any] = {"d_v": 8, "topk": 4, "backend": "cpu"}
    flashdsa.warm_up("sparse_mla_fwd", S=2, H=(3, 5), max_logits=(False, True), **of_all)
    assert {(x.num_heads, x.max_logits) for x in problems} == {
        (heads, asked) for heads in (3, 5) for asked in (False, True)
    }
    assert bound.backends_for("sparse_mla_fwd", S=2, **of_all) == ("cpu",)
    packed = {"kv_dtype": torch.int8, "topk_length": True}
    flashdsa.warm_up("sparse_mla_fwd", S=1, **of_all, **packed)
    assert problems[-1].row_formats == (V32,) and problems[-1].topk_length


WRONG_WARM_UPS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "operation": ("indexer", {}, ValueError, "operation: expected one of .*; got 'indexer'"),
    "name": ("dsa_topk_indexer", {"heads": 3}, TypeError, "has B, H, num_pages, .*; got heads"),
    "size": ("dsa_topk_indexer", {"H": 0}, ValueError, "H: expected at least 1; got 0"),
    "number": ("dsa_topk_indexer", {"topk": 1.5}, TypeError, "topk: expected an integer; got"),
    "bool": ("dsa_topk_indexer", {"sorted": 1}, TypeError, "sorted: expected a bool; got int"),
    "dtype": ("indexer_kl", {"scores_dtype": 3}, TypeError, "scores_dtype: expected a torch.dtype"),
    "other dtype": (
        "indexer_kl",
        {"scores_dtype": torch.int32},
        TypeError,
        "scores: expected dtype float32 or float64; got int32",
    ),
    "backend": ("indexer_kl", {"backend": "sm100"}, NotImplementedError, "backend 'sm100'"),
}


@pytest.mark.parametrize("wrong", WRONG_WARM_UPS)
def test_a_wrong_warm_up_is_an_error(wrong: str) -> None:
    operation, choices, error, message = WRONG_WARM_UPS[wrong]
    with pytest.raises(error, match=message):
        flashdsa.warm_up(operation, **choices)


def test_results_of_bound_functions_have_no_gradient() -> None:
    """Whatever the operands ask for."""
    with torch.no_grad():
        serve = flashdsa.bind("sparse_mla_fwd", (X.q, X.kv, X.indices), d_v=X.d_v)
    asking = X.q.clone().requires_grad_(), X.kv.clone().requires_grad_(), X.indices
    assert torch.is_grad_enabled()
    assert not any(result.requires_grad for result in serve(asking))
    assert torch.is_grad_enabled()
