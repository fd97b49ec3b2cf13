"""Families of GPUs: each compute capability has the kernels of one, each backend is one's."""

from __future__ import annotations

from flashdsa.hw import ARCHITECTURES
from flashdsa.kernels.catalog import KERNELS
from flashdsa.settings import BACKENDS


def test_no_gpu_is_of_two_families_and_every_family_is_a_backend() -> None:
    families = ARCHITECTURES.values()
    capabilities = [one for family in families for one in family.capabilities]
    assert len(capabilities) == len(set(capabilities))
    assert [family.backend for family in families] == [n for n in BACKENDS if n.startswith("sm")]
    assert {spec.arch for spec in KERNELS} == set(ARCHITECTURES)


def test_a_family_s_target_runs_on_all_its_gpus() -> None:
    """A target in "a" is of one GPU, one in "f" of those of its major capability."""
    for family in ARCHITECTURES.values():
        first = family.capabilities[0]
        assert family.target.startswith(f"sm_{first[0]}{first[1]}")
        assert {major for major, _ in family.capabilities} == {first[0]}
        assert min(family.capabilities) == first
        assert family.target.endswith("f") == (len(family.capabilities) > 1)
