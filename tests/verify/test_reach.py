"""Every kernel that a backend may choose, and every public operation, is reached by `check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.recorder import Recorder
from flashdsa.backends.sm90 import mla_bwd
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import MORE
from flashdsa.kernels.catalog import BACKENDS, KERNELS
from flashdsa.reference import quant
from flashdsa.verify import check_list, launch_list
from flashdsa.verify.check_list import COMPOSED, NEEDS, OPERATIONS
from flashdsa.verify.launch_list import Reached, list_launches

NEVER_CHOSEN = {("sm100", "mla_fwd", "kv_apart"): {True}}
"""Values of a plan's choice that no operation takes: compiled for the exported solutions."""
HELPERS = {"bind", "explain", "warm_up"}
"""Public functions that are judged with an operation: bound form, explanation, warm-up."""


@pytest.fixture(scope="module", autouse=True)
def zeros_for_draws() -> Iterator[None]:
    """Kernels are chosen by shapes and lists: to draw and round the other numbers takes most of
    the time, and backends share what is drawn."""
    with pytest.MonkeyPatch.context() as patch:
        for make in (name for name in vars(check_list) if name.startswith("make_")):
            patch.setattr(check_list, make, cache(getattr(check_list, make)))
        patch.setattr(
            torch, "randn", lambda *shape, generator=None, **kind: torch.zeros(*shape, **kind)
        )
        patch.setattr(quant, "encode_e4m3", lambda x: torch.zeros(x.shape, dtype=torch.uint8))
        yield


def keep_cases(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Other cases are not listed."""
    every = launch_list.checks_of
    monkeypatch.setattr(
        launch_list, "checks_of", lambda *given: [one for one in every(*given) if one.case in names]
    )


@pytest.fixture(scope="module")
def reached() -> dict[str, list[Reached]]:
    """By backend; what a GPU's backend chooses is chosen for its emulated one too."""
    return {backend: list_launches(backend) for backend in (*BACKENDS, "cpu")}


# Not named `backend`: what is left out without its device.
@pytest.mark.parametrize("owner", BACKENDS)
def test_every_kernel_and_every_value_of_each_choice_is_reached(owner, reached):
    launched = {one.name for case in reached[owner] for one in case.kernels}
    unreached = {}
    for kernel in (spec for spec in KERNELS if spec.backend == owner):
        plans = [plan for plan in kernel.plans if plan.name in launched]
        if not plans:
            unreached[kernel.name] = "no plan"
            continue
        for choice in fields(plans[0]):
            values, taken = ({getattr(p, choice.name) for p in x} for x in (kernel.plans, plans))
            key = owner, kernel.name, choice.name
            never = NEVER_CHOSEN.get(key, set())
            assert not never & taken, "it is chosen: take it off the list"
            if values - taken - never:
                unreached[kernel.name, choice.name] = values - taken - never
    assert unreached == {}


def test_larger_groups_of_a_backward_that_one_variant_serves_are_reached(monkeypatch):
    """Of attention, by size. No case reaches the index backward's, nor slots of attention's that
    the device chooses: tests of their kernels do."""
    found, bind_choice = set(), mla_bwd.bind_choice

    def spied(runner, part, large, *rest):
        found.add(large.queries)
        return bind_choice(runner, part, large, *rest)

    monkeypatch.setattr(mla_bwd, "bind_choice", spied)
    list_launches("sm90", ["mla_bwd"])
    assert found == set(MORE)


@pytest.mark.parametrize("owner", [*BACKENDS, "cpu"])
def test_every_operation_of_a_backend_has_a_case_that_it_takes(owner, reached):
    taken = {case.operation for case in reached[owner] if not case.refused}
    has = {i.operation for i in registry.implementations() if i.backend == owner}
    composed = {name for name, needs in NEEDS.items() if needs <= has}
    assert taken == has | composed


def test_a_public_function_is_an_operation_or_judged_with_one():
    public = set(flashdsa.__all__)
    assert public - set(OPERATIONS) == HELPERS
    assert set(OPERATIONS) - public == {"sparse_mla_fwd_out"}


def test_the_hopper_prefill_forward_is_reached_by_calls_of_more_items_than_sms(reached):
    by_case = {
        case.case: [one.spec.name for one in case.kernels]
        for case in reached["sm90"]
        if case.operation == "sparse_mla_fwd"
    }
    assert by_case["530 queries, lengths"] == ["mla_fwd"]
    groups = {name for name in by_case if "in groups" in name}
    assert len(groups) == 6 and all(by_case[name] == ["mla_fwd"] for name in groups)
    assert by_case["one query, 64 of 200 keys"] == ["mla_decode"]


def test_an_emulated_backend_chooses_as_its_gpu_s(reached):
    cases = list_launches("emulate-sm90", ["topk_indices", "merge_attention"])
    on_gpu = {(case.operation, case.case): case for case in reached["sm90"]}
    for case in cases:
        if case.operation in COMPOSED:
            assert case.refused
        else:
            assert case.kernels == on_gpu[case.operation, case.case].kernels


def test_the_choice_is_the_backend_s_own_and_depends_on_the_device(monkeypatch):
    """With 4 SMs a call of 18 items goes to the forward, which one of 132 SMs gives the decode."""
    monkeypatch.setitem(launch_list.DEVICES, "emulate-sm90", SMALL)
    keep_cases(monkeypatch, "pools of 4 and a tail", "one query, 64 of 200 keys")
    cases = list_launches("sm90", ["sparse_mla_fwd"])
    names = {case.case: [one.name for one in case.kernels] for case in cases}
    assert names["pools of 4 and a tail"] == ["mla_fwd_512_drawn_joined"]
    assert names["one query, 64 of 200 keys"] == ["mla_decode_single_cta"]


def test_a_plan_that_is_not_compiled_is_an_error():
    kernel = next(spec for spec in KERNELS if spec.name == "mla_fwd")
    other = next(spec for spec in KERNELS if spec.name == "mla_decode")
    with pytest.raises(ValueError, match="compiled for its catalog's plans only"):
        Recorder(SMALL).function(kernel, other.plans[0])


def test_why_a_case_is_not_taken_is_told(reached):
    refused = [case for case in reached["sm90"] if case.case == "fp64" and case.refused]
    assert refused and all("dtype: takes bfloat16; got float64" in one.refused for one in refused)
    assert all("emulate" not in one.refused for one in refused)


def test_the_cpu_names_its_functions_and_torch_needs_none(reached):
    of_cpu = {case.operation: case for case in reached["cpu"]}
    assert of_cpu["mla_bwd"].functions == ("flashdsa.backends.cpu.sparse_mla:backward",)
    assert of_cpu["merge_attention"].functions == () == of_cpu["merge_attention"].kernels
