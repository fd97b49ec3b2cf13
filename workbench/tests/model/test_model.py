"""The performance model: its counts, how they add up, and its ranges."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashdsa import reference
from flashdsa.backends.emulated.devices import B200 as DEVICE
from flashdsa.backends.emulated.runner import Emulator, compiled
from flashdsa.backends.indexer.choice import Call, Kind, choose, gpu_of
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.problem import PAGE_BYTES
from ptxemu.cutedsl import emulate
from ptxemu.trace.counters import Counters
from workbench.__main__ import cli
from workbench.model import backward_sm100, forward_sm100
from workbench.model.indexer_sm100 import SHAPES, predict_all, product_clocks
from workbench.model.machine import B200, H200, GpuModel
from workbench.model.roofline import CHIP, Footprint, Matmul, Prediction, chip_seconds, predict
from workbench.model.timeline import Part, Step, ends, period, transfer
from workbench.model.unknowns import KERNELS, UNKNOWNS, attention_ranges, estimate

BACKWARD_MOVED = {
    "MMA shared read": 303_104,
    "shared -> DSMEM (remote store)": 32_768,
    "global -> shared (TMA load)": 18_432,
    "tmem ld": 73_728,
    "tmem st": 8_192,
    "shared -> global (bulk reduce)": 36_864,
    "shared ld": 33_600,
    "shared st": 53_376,
}
"""Bytes of a block and CTA: a run of 128 keys less one of 64, by two blocks."""
FORWARD_MOVED = {
    "MMA shared read": 86_016,
    "global -> shared (TMA load)": 36_864,
    "shared ld": 17_408,
    "shared st": 25_096,
    "tmem ld": 32_768,
}
"""Bytes of a tile and CTA: a run of 512 keys less one of 128, by twelve tiles."""


ROOT = Path(__file__).parents[3]
SHAPE = {"queries": 4096, "topk": 2048, "s_kv": 8192}
BEGIN, END = "<!-- table: python -m workbench model --markdown -->", "<!-- end of the table -->"


# -- units ---------------------------------------------------------------------------------------
def test_peaks_are_those_of_the_data_sheets() -> None:
    for machine, peak in ((B200, 2.25e15), (H200, 0.99e15 * 1980 / 1830)):  # 989 at 1.83 GHz
        found = machine["sms"] * machine["clock"] * machine["bf16_rate"]
        assert found == pytest.approx(peak, rel=0.01)


def test_every_constant_has_a_unit_and_a_source_and_every_unknown_names_one() -> None:
    for machine in (H200, B200):
        for name, constant in machine.constants.items():
            assert len(constant.source) > 8 and constant.what, (machine.name, name)
            assert constant.unit or name in {"sms", "dsmem_starved", "bulk_starved"}
    for unknown in UNKNOWNS.values():
        assert unknown.machine in {"", *B200.constants} and unknown.source


def test_wgmma_takes_the_measured_clocks() -> None:
    measured = {(32, True): 24, (32, False): 16, (64, True): 32, (128, True): 64, (256, False): 128}
    for (n, shared), clocks in measured.items():
        assert Matmul(1, 64, n, a_in_shared=shared).cycles(H200) == clocks
    bf16, fp8 = Matmul(1, 64, 256, k=16), Matmul(1, 64, 256, k=32, element_bytes=1)
    assert fp8.flop == 2 * bf16.flop
    assert fp8.tensor_cycles(H200) == bf16.tensor_cycles(H200)
    assert fp8.operand_bytes == bf16.operand_bytes


def test_scatter_add_has_the_measured_rates() -> None:
    """Two constants give three measured rates."""
    for rows, measured in ((8192, 3.75e12), (32768, 2.205e12), (131072, 1.518e12)):
        rate = 1e9 / chip_seconds(H200, 0, 1e9, Footprint(reduced=rows * 2304))
        assert rate == pytest.approx(measured, rel=0.06)


# -- counts --------------------------------------------------------------------------------------
def test_the_kernels_count_the_numbers_of_their_designs() -> None:
    backward, forward = backward_sm100.traffic(), forward_sm100.traffic()
    assert sum(one.tensor_cycles(B200) for one in backward.matmuls) == 1408
    assert sum(one.operand_bytes for one in backward.matmuls) == 303_104
    assert (backward.dsmem_bytes, backward.shared_bytes) == (32_768, 137_216)
    assert backward.reduce_bytes == 36_864
    assert backward.useful_flop == 11_272_192
    assert backward.demands(B200)["shared memory port"] == pytest.approx(4592)
    demands = forward.demands(B200)
    assert (demands["tensor core"], demands["shared memory port"]) == (1088, 1280)
    assert forward.useful_flop == 2 * 64 * 64 * (576 + 512)


def test_both_ways_to_add_to_dkv_move_what_the_kernel_moves() -> None:
    bulk, registers = backward_sm100.ways_to_add()
    added = BACKWARD_MOVED["shared -> global (bulk reduce)"]
    assert bulk.sectors * 32 == registers.sectors * 32 == added
    # 64 rows of 128 dims; of 64 RoPE dims 32 in every other block.
    assert bulk.requests == 64 + 16 and added / bulk.requests == (64 * 512 + 16 * 256) / 80
    assert registers.requests == 4 * bulk.requests
    assert bulk.issue_slots == 400 and registers.issue_slots == 960


def test_plan_and_emulated_run_agree() -> None:
    back, counted = backward_sm100.traffic(), BACKWARD_MOVED
    gathered = counted["global -> shared (TMA load)"]
    dsmem = counted["shared -> DSMEM (remote store)"]
    shared = gathered + dsmem + counted["shared ld"] + counted["shared st"]
    assert shared == pytest.approx(back.shared_bytes, rel=0.01)
    assert counted["MMA shared read"] == sum(one.operand_bytes for one in back.matmuls)
    assert counted["tmem ld"] + counted["tmem st"] == back.tmem_bytes
    assert (gathered, dsmem) == (back.read_bytes, back.dsmem_bytes)
    assert counted["shared -> global (bulk reduce)"] == back.reduce_bytes
    planned, counted = forward_sm100.traffic(), FORWARD_MOVED
    assert counted["MMA shared read"] == sum(one.operand_bytes for one in planned.matmuls)
    assert counted["global -> shared (TMA load)"] == planned.read_bytes
    assert counted["tmem ld"] == planned.tmem_bytes
    moved = counted["shared ld"] + counted["shared st"] + planned.read_bytes
    assert moved == pytest.approx(planned.shared_bytes, rel=0.03)  # maxima and masks besides


def test_the_indexers_rows_have_the_ctas_that_a_launch_gives_them() -> None:
    gpu = gpu_of(Emulator(DEVICE), IndexerPlan())
    for shape in SHAPES:
        way = choose(Call(shape.rows, shape.rows), shape.tokens // 64, gpu)
        if way.kind is Kind.ROW:
            assert (shape.ctas, shape.num_splits) == (way.size, 1)
        elif shape.rows == 1:
            assert (shape.ctas, shape.num_splits) == (way.clusters * way.size, way.clusters)
        else:  # equal rows: halved until a row has a group of CTAs
            assert way.size % shape.ctas == 0 and shape.num_splits == 1
    assert product_clocks(B200) == 192


# -- time ----------------------------------------------------------------------------------------
def test_a_pipeline_is_as_slow_as_its_slowest_stage_and_a_single_buffer_adds_up() -> None:
    load = Step("load", "load", 300, latency=500, wait=False, after=(("compute", 4),))
    compute = Step("compute", "compute", 400, "tensor", after=(("load", 0),))
    assert period((load, compute)) == pytest.approx(400)
    load = replace(load, latency=50, after=(("compute", 1),))
    assert period((load, replace(compute, latency=20))) == pytest.approx(300 + 50 + 400 + 20)


def test_a_unit_serves_one_at_a_time_and_others_slow_saturated_mmas_only() -> None:
    assert period((Step("a", "a", 100, "tensor"), Step("b", "b", 150, "tensor"))) == 250
    bound, free = (Step("a", "a", 100, "tensor", port=port) for port in (100, 50))
    assert period((bound,), 50) == pytest.approx(150, rel=0.02)
    assert period((free,), 50) == pytest.approx(100)


def test_ends_of_an_item_are_the_clocks_that_nothing_overlaps() -> None:
    """Results of one block beside scores of the next leave no gap, until an item waits for a step
    after the results of the one before."""
    scores = Step("mma", "scores", 100, "tensor", part=Part.SCORES)
    results = Step("mma", "results", 50, "tensor", part=Part.RESULTS)
    assert ends((scores, results)) == pytest.approx(0)
    came = Step("load", "came", 300, "", 0, (("results", 0),), 20, False, (), Part.LAST)
    waits = replace(scores, after=(("came", 1),))
    assert ends((waits, results, came)) == pytest.approx(320)
    assert period((waits, results, came)) == pytest.approx(150)
    assert ends((replace(scores, part=Part.EVERY),)) == 0


def test_saturated_mmas_starve_transfers() -> None:
    """60 clocks of a transfer, at 30% of its rate, need more than the MMA's 100."""
    mma = Step("mma", "mma", 100, "tensor", after=(("send", 2),))
    sending = transfer("send", "send", 60, "dsmem", ("mma", 0), part=Part.EVERY)
    assert period((mma, *sending)) == pytest.approx(100)
    hungry = period((replace(mma, starves=(("dsmem", 0.7),)), *sending))
    assert 120 < hungry < 140


def test_waiting_in_a_circle_is_an_error() -> None:
    steps = (Step("a", "a", 1, after=(("b", 0),)), Step("b", "b", 1, after=(("a", 0),)))
    with pytest.raises(ValueError, match="cycle"):
        period(steps)


def predicted(kernel: ModuleType, machine: GpuModel = B200, **sizes: int) -> Prediction:
    """The kernel on a shape, which is SHAPE where it is not said."""
    return predict(kernel.work(machine, **{**SHAPE, **sizes}), machine)


def test_the_backward_is_bound_by_shared_memory_or_by_adds_that_miss() -> None:
    found = predicted(backward_sm100)
    assert found.bound == "shared memory port"
    assert 600 < found.tflops < 672  # the port's bound
    assert found.ends > found.demands["shared memory port"]
    missing = predicted(backward_sm100, s_kv=1_048_576)
    assert missing.bound == CHIP and missing.tflops < found.tflops
    forward = predicted(forward_sm100)
    assert forward.bound == "shared memory port" and 1280 <= forward.cycles < 1350


def test_more_work_takes_longer_and_no_faster_machine_does() -> None:
    seconds = [predicted(backward_sm100, topk=topk).seconds for topk in (32, 512, 2048)]
    assert 3.7 < seconds[2] / seconds[1] < 3.9  # four times the blocks, the same ends
    waves = [math.ceil(number / 74) for number in (4096, 8192)]
    more = predicted(backward_sm100, queries=8192).seconds
    assert more / seconds[2] == pytest.approx(waves[1] / waves[0])
    for name in ("bf16_rate", "operand_rate", "l2_reduce", "l2_read", "clock"):
        fast = B200.with_values({name: 1.5 * B200[name]})
        assert predicted(backward_sm100, fast).seconds <= seconds[2] * 1.02, name


# -- ranges --------------------------------------------------------------------------------------
def test_every_good_end_is_no_slower_than_the_bad_one() -> None:
    middle = {name: unknown.middle for name, unknown in UNKNOWNS.items()}
    for kernel, found in zip(KERNELS, attention_ranges(**SHAPE), strict=True):
        assert found.best.tflops > found.middle.tflops > found.worst.tflops
        for name, unknown in UNKNOWNS.items():
            good = estimate(kernel, middle | {name: unknown.good}, **SHAPE).seconds
            bad = estimate(kernel, middle | {name: unknown.bad}, **SHAPE).seconds
            assert good <= bad * 1.001, name
        assert len(found.worth) >= 3 and all(good > bad for _, good, bad in found.worth)


def test_a_shorter_query_has_fewer_flop_a_second() -> None:
    for short, long in zip(
        attention_ranges(4096, 512, 8192), attention_ranges(4096, 2048, 8192), strict=True
    ):
        for at in ("best", "middle", "worst"):
            assert getattr(short, at).tflops < 0.98 * getattr(long, at).tflops


def test_issue_binds_where_an_operation_takes_very_long() -> None:
    slow = {name: one.good for name, one in UNKNOWNS.items()}
    slow["a bulk add, of the issuing warp"] = 500
    assert estimate(KERNELS[1], slow, **SHAPE).binds == "issue of bulk operations"


def test_no_shape_is_faster_than_memory_and_launch() -> None:
    for one in predict_all(B200).values():
        floor = one.shape.rows * one.shape.tokens * PAGE_BYTES / 64 / B200["hbm"]
        assert floor + B200["launch"] < one.low < one.high


# -- the command ---------------------------------------------------------------------------------
def test_the_pages_table_is_the_commands() -> None:
    page = (ROOT / "docs/concepts/performance-model.md").read_text()
    shown = CliRunner().invoke(cli, ["model", "--markdown"])
    assert shown.exit_code == 0
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == shown.output.strip()


def test_json_has_everything_and_subjects_print_tables() -> None:
    run = CliRunner().invoke(cli, ["model", "--json", "--topk", "64"])
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert document["attention"][0]["topk"] == 64
    assert document["attention"][0]["middle"]["tflops"] > 0 and len(document["indexer"]) == 9
    assert set(document["machines"]) == {"H200", "B200"} and len(document["bounds"]) == 2
    for what in ("summary", "attention", "machines"):
        run = CliRunner().invoke(cli, ["model", what, "--markdown"])
        assert run.exit_code == 0 and run.stdout.count("|") > 40
    for wrong in (["--topk", "0"], ["--json", "--markdown"], ["nothing"]):
        assert CliRunner().invoke(cli, ["model", *wrong]).exit_code != 0


for package in ("cutlass", "llvmlite", "tvm_ffi"):
    pytest.importorskip(package)


@pytest.mark.slow
def test_backward_counts() -> None:
    """Two blocks more."""
    (less, few), (more, many) = (_counted(topk) for topk in (64, 128))
    moved = {name: (more[name] - less[name]) / 4 for name in BACKWARD_MOVED}
    assert moved == pytest.approx(BACKWARD_MOVED, rel=0.01)
    for role, count in backward_sm100.INSTRUCTIONS.items():
        assert (many[role] - few[role]) / 4 == pytest.approx(count, rel=0.05), role


def _counted(topk: int) -> tuple[Counter[str], Counter[str]]:
    """Count bytes by path and instructions by role of one query: two CTAs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    q, kv, gradient = random(1, PAIR_ROWS, 576), random(256, 576), random(1, PAIR_ROWS, 512)
    indices = torch.randperm(256, generator=generator)[:topk].view(1, -1).int()
    out, lse = reference.sparse_mla_fwd(q, kv, indices)
    heard: list[Counters] = []

    def listen(_: Any) -> Counters:
        heard.append(Counters())
        return heard[-1]

    function = compiled(MLA_BWD, MLA_BWD.plans[0])
    with emulate(arch="sm_100a", on_launch=listen, check=False):
        run(
            function,
            MlaBwdOperands(q, kv, gradient, lse.float(), out.bfloat16(), indices),
            sm_scale=576**-0.5,
            deterministic=False,
            dkv_dtype=torch.float32,
            pairs=1,
        )
    roles = [role.name for role in MLA_BWD.plans[0].roles]
    moved: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for warp in heard[-1].by_role({}):
        moved.update(warp.bytes)
        instructions[roles[warp.warps[0] // 4]] += sum(warp.instructions.values())
    return moved, instructions
