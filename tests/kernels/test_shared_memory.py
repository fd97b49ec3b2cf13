"""A kernel's shared memory has its plan's regions and barriers as attributes, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from flashdsa.kernels.catalog import INDEXER, KERNELS, SPARSE_MLA_FWD
from flashdsa.plan.kernel_spec import KernelSpec

pytest.importorskip("cutlass", reason="needs CuTe DSL, which has the barriers' types")

from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.static import Static

PLANS = [plan for spec in KERNELS for plan in spec.plans]


def names_of(plan: Any) -> set[str]:
    """Names of a plan's regions and barriers."""
    return {one.name for one in (*plan.smem.regions, *plan.barriers)}


def test_no_attribute_of_memory_hides_a_name() -> None:
    names = set().union(*map(names_of, PLANS))
    assert len(names) > 100
    assert not [name for name in names if hasattr(Memory, name)]


def test_a_region_is_at_its_offset() -> None:
    plan = SPARSE_MLA_FWD.plans[0]
    region = Memory(None, Static(plan)).masks
    assert isinstance(region, Region)
    assert region.static.value == plan.smem.offset("masks") > 0


@pytest.mark.parametrize(
    ("spec", "name"),
    [(SPARSE_MLA_FWD, "packed"), (INDEXER, "tickets_full")],
    ids=["region", "barrier"],
)
def test_a_name_that_a_variant_lacks_is_refused(spec: KernelSpec, name: str) -> None:
    lacking = [plan for plan in spec.plans if name not in names_of(plan)]
    for plan in lacking:
        with pytest.raises(AttributeError, match=f"no region or barrier '{name}' in this plan"):
            getattr(Memory(None, Static(plan)), name)
    assert 0 < len(lacking) < len(spec.plans)
