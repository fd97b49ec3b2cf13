"""The Blackwell attention kernels' model: counts, ranges, and what moves them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from flashdsa.kernels.sparse_mla.sm100.fwd.plan import FwdPlan
from workbench.model import forward_sm100
from workbench.model.machine import B200, GpuModel
from workbench.model.predict import predict
from workbench.model.unknowns import (
    KERNELS,
    UNKNOWNS,
    attention_ranges,
    estimate,
    predict_range,
)

SHAPE = {"queries": 4096, "topk": 2048, "s_kv": 8192}


def test_forward_counts_what_the_design_counted() -> None:
    traffic = forward_sm100.traffic(FwdPlan())
    demands = traffic.demands(B200)
    assert (demands["tensor core"], demands["shared memory port"]) == (1088, 1280)
    assert traffic.tensor_cycles(B200) == 1088
    assert traffic.useful_flop == 2 * 64 * 64 * (576 + 512)


def test_plan_and_emulated_run_agree() -> None:
    planned, counted = forward_sm100.traffic(FwdPlan()), forward_sm100.COUNTED
    assert counted["MMA shared read"] == planned.operand_bytes
    assert counted["global -> shared (TMA load)"] == planned.read_bytes
    assert counted["tmem ld"] == planned.tmem_bytes
    moved = counted["shared ld"] + counted["shared st"] + planned.read_bytes
    assert moved == pytest.approx(planned.shared_bytes, rel=0.03)  # maxima and masks besides


def test_the_forward_is_bound_by_shared_memory() -> None:
    found = predict(forward_sm100.work(B200), B200)
    assert found.bound == "shared memory port"
    assert 1280 <= found.cycles < 1350


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.name)
def test_a_shorter_query_has_fewer_flop_a_second(kernel: object) -> None:
    (short,) = (one for one in attention_ranges(4096, 512, 8192) if one.kernel is kernel)
    (long,) = (one for one in attention_ranges(4096, 2048, 8192) if one.kernel is kernel)
    for at in ("best", "middle", "worst"):
        assert getattr(short, at).tflops < 0.98 * getattr(long, at).tflops


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.name)
def test_every_good_end_is_no_slower_than_the_bad_one(kernel: object) -> None:
    (one,) = (one for one in KERNELS if one is kernel)
    found = predict_range(one, **SHAPE)
    assert found.best.tflops > found.middle.tflops > found.worst.tflops
    middle = {name: unknown.middle for name, unknown in UNKNOWNS.items()}
    for name, unknown in UNKNOWNS.items():
        good = estimate(one, middle | {name: unknown.good}, **SHAPE).seconds
        bad = estimate(one, middle | {name: unknown.bad}, **SHAPE).seconds
        assert good <= bad * 1.001, name
    assert len(found.worth) >= 3
    assert all(good > bad for _, good, bad in found.worth)


def test_issue_binds_where_an_operation_takes_very_long() -> None:
    slow = {name: one.good for name, one in UNKNOWNS.items()}
    slow["a bulk add, of the issuing warp"] = 500
    assert estimate(KERNELS[1], slow, **SHAPE).binds == "issue of bulk operations"


def test_unknowns_name_constants_that_there_are_and_say_where_they_are_from() -> None:
    names = {field.name for field in fields(GpuModel)}
    for unknown in UNKNOWNS.values():
        assert set(unknown.machine) <= names
        assert unknown.source
