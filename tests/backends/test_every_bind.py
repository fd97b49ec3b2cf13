"""Every implementation, bound to one call and given another, launches what that one would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import Implementation
from flashdsa.dispatch.spec import OpSpec
from flashdsa.ops import OPERATIONS
from tests.backends.test_bound_calls import Pretended

SIZES = {
    "S": 6, "H": 64, "d_qk": 576, "d_v": 512, "S_kv": 90, "width": 576, "topk": 512,
    "B": 4, "requests": 4, "T": 3, "num_pages": 5, "max_pages": 4, "max_len": 256,
    "offsets": 3, "ratio": 4, "columns": 64, "d": 64, "P": 9, "half": 8, "R": 8,
    "num_entries": 2, "token_bytes": 132,
}  # fmt: skip
VALUES = {"d_v": 512, "topk": 512, "max_len": 256, "sm_scale": 0.1, "dkv_dtype": torch.float32}
VALUES |= {
    "dk_dtype": torch.bfloat16,
    "check": False,
    "backward_backend": "auto",
    "index_block": 1,
    "block": 1,
    "kv_format": None,
    "ratio": 4,
    "eps": 1e-6,
    "overlap": False,
}
CHOICES = {"table_page_size": (64, 4, 1)}
"""Of what is no number, both."""
FREE = {"num_pages": (1, 5, 40), "max_pages": (1, 4, 70, 20_000)}
BY_TORCH = {"read_index_k_cache", "compress_kv", "compress_kv_bwd"}
"""Operations that launch no kernel of ours."""
KL_BY_TORCH = {f"flashdsa.backends.triton.indexer_kl:{bind}" for bind in ("bind", "bind_backward")}
ON_GPUS = [i for i in registry.implementations() if i.features.devices == ("cuda",)]


def operands_of(spec: OpSpec, implementation: Implementation, sizes: Mapping[str, int]) -> Any:
    """Operands of these sizes; bf16 where the operation takes it."""
    first = spec.operands[0].dtypes
    assert isinstance(first, tuple)
    main = next(x for x in first if str(x).endswith(implementation.features.dtypes))
    heads = implementation.features.num_heads
    if 64 not in heads and "H" in spec.operands[0].dims:
        sizes = {**sizes, "H": 128}

    def tensor(operand: Any) -> Tensor | None:
        if operand.optional and operand.name != "k_scale":
            return None
        dtypes = operand.dtypes(main) if callable(operand.dtypes) else operand.dtypes
        dtype = main if main in dtypes else dtypes[0]
        shape = [int(d) if d.isdecimal() else sizes[d] for d in operand.dims]
        return torch.ones(shape, dtype=torch.float32).to(dtype)

    return spec.kind(*[tensor(operand) for operand in spec.operands])


def parameters_of(spec: OpSpec, implementation: Implementation) -> list[dict[str, Any]]:
    """Choices of the parameters that are no numbers, those that the implementation takes."""
    names, found = [x.name for x in spec.parameters], []
    operands = operands_of(spec, implementation, SIZES)
    fixed = {name: (value,) for name, value in VALUES.items()} | CHOICES
    choices = [fixed.get(name, (False, True)) for name in names]
    for values in product(*choices):
        parameters = dict(zip(names, values, strict=True))
        problem = spec.problem(operands, parameters, spec.check(operands, parameters))
        features = implementation.features
        oldest = (*features.capabilities, features.least_capability)[0]
        here = replace(problem, device="cuda", capability=oldest)
        passed = spec.passed(operands, parameters)
        if not implementation.reasons_against(here) and passed not in found:
            found.append(passed)
    assert found
    return found


def launches(runner: Pretended) -> list[tuple[Any, ...]]:
    """Plans, and arguments: tensors by their sizes and dtypes."""
    return [
        (plan, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in arguments))
        for plan, arguments in runner.launched
    ]


def sizes_of(spec: OpSpec) -> Iterator[dict[str, int]]:
    """Free sizes, each of few and many; of other operations the same sizes again."""
    free = {name: FREE[name] for operand in spec.operands for name in operand.free}
    for values in product(*free.values()):
        yield {**SIZES, **dict(zip(free, values, strict=True))}


@pytest.mark.parametrize(
    "implementation", ON_GPUS, ids=lambda i: f"{i.backend}-{i.operation}-{ON_GPUS.index(i)}"
)
def test_a_bound_call_launches_what_an_unbound_one_does(implementation: Implementation) -> None:
    if implementation.package:
        pytest.importorskip(implementation.package)
    spec = OPERATIONS[implementation.operation]
    bind = implementation.binder()
    by_torch = spec.operation in BY_TORCH or implementation.bind in KL_BY_TORCH
    for parameters in parameters_of(spec, implementation):
        every = [operands_of(spec, implementation, sizes) for sizes in sizes_of(spec)]
        once = every[0]
        for bound_to in every[:: len(every) - 1 or 1]:
            runner = Pretended()
            serve = bind(runner, bound_to, **parameters)
            for given in [*every, once]:
                fresh = Pretended()
                expected = bind(fresh, given, **parameters)(tuple(given))
                runner.launched.clear()
                got = serve(tuple(given))
                assert launches(runner) == launches(fresh), parameters
                # Other scales of index keys than fp32 ones are torch's.
                scaled = parameters.get("mxfp4") or parameters.get("power_of_two")
                assert fresh.launched or by_torch or scaled
                assert results(got) == results(expected)


def results(found: Any) -> list[Any]:
    """Sizes and dtypes of what an operation returns."""
    tensors = [found] if isinstance(found, Tensor) else list(found or ())
    return [(x.shape, x.dtype) for x in tensors]
