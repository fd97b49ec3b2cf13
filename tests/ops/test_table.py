"""What follows from an operation's table: the schema, and the `Problem` with the GPU it is for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.dispatch import spec as spec_module
from flashdsa.dispatch.dtypes import same_dtype, sum_dtype
from flashdsa.dispatch.registration import custom_op
from flashdsa.dispatch.rows import Operand, Output
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import UnsupportedError
from flashdsa.kernels.catalog import KERNELS
from flashdsa.ops import OPERATIONS
from flashdsa.ops.attention import SPARSE_MLA_FWD
from flashdsa.ops.attention_backward import MLA_BWD
from flashdsa.problem import Problem
from tests.support.subtests import CaseLoop

SIZES = {
    "S": 2, "H": 128, "d_qk": 576, "d_v": 512, "S_kv": 9, "width": 576, "topk": 2048,
    "B": 2, "requests": 2, "T": 3, "num_pages": 5, "max_pages": 4, "max_len": 256,
    "offsets": 3, "ratio": 4, "columns": 64, "d": 64, "P": 9, "half": 8, "R": 8,
    "num_entries": 2, "token_bytes": 132, "num_candidates": 3,
}  # fmt: skip
VALUES = {"int": 512, "float": 0.1, "bool": False, "ScalarType?": None, "str": "auto", "str?": None}
PUBLIC = {"sparse_mla_fwd_out": "sparse_mla_fwd"}
"""Operations of which the function of their name is not the public one."""
ABSENT = {"ends", "extra_kv", "extra_indices", "extra_topk_length", "extra_ends", "candidates"}
"""Operands that make other calls of an operation, which fewer kernels serve."""
SERVED = {"index_block": 1, "d_v": 512, "topk": 2048, "max_len": 256, "ratio": 4,
          "table_page_size": 64, "block": 1}  # fmt: skip


def on_gpu(spec: OpSpec) -> tuple[Any, dict[str, Any]]:
    """Operands on a pretended GPU and parameters of a call that some kernel serves."""
    first = spec.operands[0].dtypes
    assert isinstance(first, tuple)

    def tensor(operand: Any) -> torch.Tensor:
        dtypes = operand.dtypes(first[0]) if callable(operand.dtypes) else operand.dtypes
        heads = SIZES["H"] if spec in (MLA_BWD, SPARSE_MLA_FWD) else 64
        shape = [int(d) if d.isdecimal() else {**SIZES, "H": heads}[d] for d in operand.dims]
        return torch.empty(shape, dtype=dtypes[0], device="cuda")

    absent = [x.optional and x.name in ABSENT for x in spec.operands]
    rows = zip(spec.operands, absent, strict=True)
    operands = spec.kind(*[None if is_absent else tensor(x) for x, is_absent in rows])
    values = {p.name: SERVED.get(p.name, VALUES[p.kind]) for p in spec.parameters}
    return operands, values


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    yield


def problem(spec: OpSpec, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Problem:
    """Of a call on a GPU of that capability; needs none."""
    monkeypatch.setattr(
        spec_module, "capability", lambda device: capability if device.type == "cuda" else None
    )
    with FakeTensorMode():
        operands, parameters = on_gpu(spec)
        return spec.problem(operands, parameters, spec.check(operands, parameters))


def test_kernels_serve_the_gpus_that_they_are_built_for_and_no_other(
    subtests: CaseLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation says the capability; the choice follows it. Others get Triton's kernels, or
    plain torch."""
    for spec, capability in product(
        OPERATIONS.values(), [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)]
    ):
        with subtests.test(f"{spec.operation}, {capability}"):
            wanted = problem(spec, capability, monkeypatch)
            assert wanted.capability == capability
            built_for = {
                one: i.backend
                for i in registry.implementations(spec.operation)
                if i.automatic and "cuda" in i.features.devices
                for one in i.features.capabilities
            }
            there = {i.backend for i in registry.implementations(spec.operation)}
            portable = "triton" if "triton" in there else "torch"
            assert registry.select(wanted).backend == built_for.get(capability, portable)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_the_blackwell_backward_is_not_chosen_on_other_gpus(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = problem(MLA_BWD, capability, monkeypatch)
    needs = f"compute capability: takes 10.0 or 10.3; got {capability[0]}.{capability[1]}"
    with pytest.raises(UnsupportedError, match=needs):
        registry.select(wanted, "sm100")
    for served in ((10, 0), (10, 3)):
        assert registry.select(problem(MLA_BWD, served, monkeypatch)).backend == "sm100"


@pytest.mark.parametrize(
    ("operation", "kernels", "capability"),
    [
        ("mla_bwd", "sm100", (10, 0)),
        ("sparse_mla_fwd", "sm100", (10, 0)),
        ("sparse_mla_fwd_out", "sm100", (10, 0)),
    ],
)
def test_kernels_refuse_a_second_source_ranges_and_blocks_by_name(
    operation: str, kernels: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = problem(OPERATIONS[operation], capability, monkeypatch)
    assert registry.select(served).backend == kernels
    for wanted, reason in (
        ({"extra_kv": True}, "extra_kv: not supported"),
        ({"ends": True}, "ranges: not supported"),
        ({"extra_ends": True}, "ranges: not supported"),
        ({"index_block": 4}, "index_block: takes 1; got 4"),
    ):
        with pytest.raises(UnsupportedError, match=f"{operation}: .*{reason}"):
            registry.select(replace(served, **wanted), kernels)
        assert registry.select(replace(served, **wanted)).backend == "triton"


def test_there_is_one_table_an_operation_and_it_fits_the_operands_and_the_public_function() -> None:
    assert set(OPERATIONS) == set(registry.operations)
    assert {name for kernel in KERNELS for name in kernel.operations} <= set(OPERATIONS)
    for spec in OPERATIONS.values():
        names = [operand.name for operand in spec.operands]
        public = inspect.signature(
            getattr(flashdsa, PUBLIC.get(spec.operation, spec.operation))
        ).parameters
        # Of the backward that autograd runs, of unchecked launches, `ids`, `return_max_logits`.
        hidden = {"deterministic", "backward_backend", "check", "positions", "max_logits"}
        hidden |= {"power_of_two"}  # of a scale
        hidden |= {"ends", "extra_ends", "cos", "sin"}  # parts of a pair
        parameters = {parameter.name for parameter in spec.parameters}
        assert (set(names) | parameters) - hidden <= set(public)


def test_the_schema_is_written_from_the_table() -> None:
    written = "flashdsa::{}".format
    assert str(custom_op(SPARSE_MLA_FWD)._schema) == written(
        "sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, "
        "Tensor? attn_sink, Tensor? ends, Tensor? extra_kv, Tensor? extra_indices, "
        "Tensor? extra_topk_length, Tensor? extra_ends, SymInt d_v, float sm_scale, "
        "bool deterministic, str backward_backend, bool max_logits, SymInt index_block, "
        "bool batch_invariant, str? kv_format, str backend) "
        "-> (Tensor, Tensor, Tensor)"
    )
    assert str(custom_op(OPERATIONS["sparse_mla_fwd_out"])._schema) == written(
        "sparse_mla_fwd_out(Tensor q, Tensor kv, Tensor indices, Tensor(d!) out, "
        "Tensor(e!) lse, Tensor(f!)? max_logits, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor? ends, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, "
        "Tensor? extra_ends, float sm_scale, SymInt index_block, bool batch_invariant, "
        "str? kv_format, str backend) -> ()"
    )
    for spec in OPERATIONS.values():
        arguments = custom_op(spec)._schema.arguments
        assert [a.name for a in arguments if a.alias_info and a.alias_info.is_write] == [
            operand.name for operand in spec.operands if operand.written
        ]


class Pair(NamedTuple):
    a: Annotated[torch.Tensor, Operand("S 2", (torch.float32, torch.int32))]
    b: Annotated[torch.Tensor | None, Operand("S n", same_dtype)] = None


def test_the_rows_of_a_tuple_have_its_fields_names_and_defaults() -> None:
    rows = OpSpec("pair", Pair).operands
    assert [(x.name, x.shape, x.optional) for x in rows] == [
        ("a", "S 2", False),
        ("b", "S n", True),
    ]
    with pytest.raises(TypeError, match="pair: Pair has other fields"):
        OpSpec("pair", Pair, operands=rows[::-1])


def test_results_without_data_are_those_that_outputs_declare() -> None:
    outputs = (
        Output("sums", "S k 3", (sum_dtype,)),
        Output("like_b", "n", ("b", torch.int64), when="b"),
        Output("flags", "S", ("wanted", "a"), when="asked"),
    )
    spec = OpSpec("pair", Pair, outputs=outputs)
    parameters = {"k": 5, "asked": True, "wanted": torch.float16}

    def results(b: torch.Tensor | None, **changed: Any) -> list[tuple[Any, torch.dtype]]:
        x, p = Pair(torch.zeros(4, 2), b), parameters | changed
        return [(tuple(one.shape), one.dtype) for one in spec.results(x, p, spec.check(x, p))]

    with_b = results(torch.zeros(4, 7))
    assert with_b == [((4, 5, 3), torch.float32), ((7,), torch.float32), ((4,), torch.float16)]
    without = results(None, asked=False, wanted=None)
    assert without == [((4, 5, 3), torch.float32), ((0,), torch.int64), ((0,), torch.float32)]


def test_operations_without_a_derivative_say_so() -> None:
    k = torch.randn(2, 128, requires_grad=True)
    _, scale = flashdsa.quantize_index_k(k)
    with pytest.raises(NotImplementedError, match="quantize_index_k: no gradient is available"):
        scale.sum().backward()


def test_the_package_lists_its_public_names_each_once() -> None:
    assert flashdsa.causal_ranges  # a name that was used stands in the module, too
    shown = [name for name in dir(flashdsa) if not name.startswith("__")]
    assert shown == sorted(flashdsa.__all__)
