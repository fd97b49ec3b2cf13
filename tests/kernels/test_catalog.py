"""The rows of kernels: names, what they are compiled from, and what stands beside them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import flashdsa.kernels
from flashdsa.backends.catalog import registry
from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.catalog import BACKENDS, INDEXER, KERNELS, MLA_BWD, variants_of
from flashdsa.plan.kernel_spec import find_kernel
from tests.support.subtests import CaseLoop
from workbench.analysis.role_functions import role_functions

ids = [f"{spec.name}-{spec.arch}" for spec in KERNELS]


def test_every_plan_has_one_exported_name() -> None:
    plans = [plan for spec in KERNELS for plan in spec.plans]
    names = [name for backend in BACKENDS for name in variants_of(backend)]
    assert len(names) == len(set(names)) == len(plans)


def test_rows_name_what_is_there(subtests: CaseLoop) -> None:
    for spec in KERNELS:
        with subtests.test(f"{spec.name}, {spec.arch}"):
            module, _, function = spec.build.partition(":")
            found = find_spec(module)
            assert found is not None and found.origin is not None
            assert f"def {function}(" in Path(found.origin).read_text()
            names = {role.name for plan in spec.plans for role in plan.roles}
            assert names == set(spec.roles)
            functions = role_functions(spec)
            assert all(functions[name] for name in names)


def test_a_kernels_operations_have_an_implementation_on_its_backend(subtests: CaseLoop) -> None:
    for spec in KERNELS:
        with subtests.test(f"{spec.name}, {spec.arch}"):
            served = {
                one.operation for one in registry.implementations() if one.backend == spec.backend
            }
            assert spec.operations and set(spec.operations) <= served


def test_every_folder_with_a_kernel_is_of_a_row() -> None:
    (kernels,) = map(Path, flashdsa.kernels.__path__)
    of_rows = {spec.build.partition(":")[0].rpartition(".")[0] for spec in KERNELS}
    found = {
        f"flashdsa.kernels.{'.'.join(path.parent.relative_to(kernels).parts)}"
        for path in kernels.rglob("kernel.py")
    }
    assert found <= of_rows


def test_kernels_are_found_by_their_name_and_by_exported_names() -> None:
    assert find_kernel(KERNELS, "indexer", "sm_90a") == INDEXER.variants[0]
    assert find_kernel(KERNELS, "mla_bwd").plan is MLA_BWD.plans[0]
    assert find_kernel(KERNELS, "mla_bwd_deterministic").plan.deterministic
    for arguments, message in (
        (("nothing",), "nothing: no kernel of that name .* kernels: indexer, "),
        (("mla_bwd", "sm_90a"), "mla_bwd: written for sm_100a; got --arch sm_90a"),
        (("indexer",), "--arch is needed, one of sm_90a, sm_100a"),
    ):
        with pytest.raises(ArgumentValueError, match=message):
            find_kernel(KERNELS, *arguments)
