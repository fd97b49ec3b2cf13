"""A kernel's class of shared memory has the names of its plans, all of them and no others."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from typing import Any, get_type_hints

import pytest

from flashdsa.jit.sources import PACKAGE, source_files
from flashdsa.kernels.catalog import INDEXER, KERNELS, SPARSE_MLA_FWD
from flashdsa.plan.kernel_spec import KernelSpec
from tests.support.subtests import CaseLoop

pytest.importorskip("cutlass", reason="needs CuTe DSL, which has the barriers' types")

from flashdsa.dsl.memory import BARRIERS_REGION, Memory, Region
from flashdsa.dsl.pipeline import Barriers
from flashdsa.dsl.static import Static


def memory_of(spec: KernelSpec) -> type[Memory] | None:
    """The class that the kernel's file allocates, or else one of its other sources."""
    build = spec.build.partition(":")[0]
    found: dict[str, set[type[Memory]]] = {}
    for path in source_files(build):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for name in re.findall(
            r"\b(?!cls\.)([\w.]+)\.(?:allocate|begin)\(plan\)", path.read_text()
        ):
            found.setdefault(module, set()).add(attrgetter(name)(import_module(module)))
    classes = found.get(build) or {one for every in found.values() for one in every}
    assert len(classes) <= 1
    return classes.pop() if classes else None


def names_of(plan: Any) -> dict[str, type]:
    """Names that a plan gives, each with the type of its attribute."""
    regions = {
        region.name: Region for region in plan.smem.regions if region.name != BARRIERS_REGION
    }
    return regions | {barrier.name: Barriers for barrier in getattr(plan, "barriers", ())}


MEMORIES = [(spec, memory_of(spec)) for spec in KERNELS]


def test_every_region_and_barrier_is_annotated(subtests: CaseLoop) -> None:
    for spec, memory in MEMORIES:
        for plan in spec.plans:
            with subtests.test(plan.name):
                if memory is None:
                    assert not hasattr(plan, "smem")
                    continue
                hints = get_type_hints(memory)
                names = names_of(plan) if hasattr(plan, "smem") else {}
                assert {name: hints.get(name) for name in names} == names
                assert not any(hasattr(Memory, name) for name in names)


def test_every_annotation_is_of_a_plan(subtests: CaseLoop) -> None:
    """Names of a class that kernels share are of one of theirs, at least."""
    used = {one for _, memory in MEMORIES if memory for one in memory.__mro__}
    shared = [one for one in used if issubclass(one, Memory) and one is not Memory]
    assert len(shared) > 10
    for one in shared:
        with subtests.test(one.__name__):
            plans = [
                plan
                for spec, memory in MEMORIES
                if memory and issubclass(memory, one)
                for plan in spec.plans
                if hasattr(plan, "smem")
            ]
            assert set(one.__annotations__) <= {name for plan in plans for name in names_of(plan)}


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        (SPARSE_MLA_FWD, "packed", "no region 'packed' in this plan"),
        (INDEXER, "tickets_full", "no barrier 'tickets_full' in this plan"),
    ],
    ids=["region", "barrier"],
)
def test_a_name_that_a_variant_lacks_is_refused(spec: KernelSpec, name: str, message: str) -> None:
    memory = memory_of(spec)
    assert memory is not None
    lacking = [plan for plan in spec.plans if name not in names_of(plan)]
    for plan in lacking:
        with pytest.raises(KeyError, match=message):
            getattr(memory(None, Static(plan)), name)
    assert 0 < len(lacking) < len(spec.plans)
