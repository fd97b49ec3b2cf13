"""Studies of the lab: hazards, precision, split heads."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from workbench.cli.lab import print_rows
from workbench.lab import precision

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import compiled
from flashdsa.plan import BudgetError
from flashdsa.verify.compare import failures
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from ptxemu import Policy
from workbench.__main__ import cli
from workbench.cli.lab_hazards import NAMES, hazards
from workbench.lab import split_heads
from workbench.lab.hazards import HAZARDS, HazardRow, run_hazards, schedules_of
from workbench.lab.kernels.split_heads.mma import products_of
from workbench.lab.kernels.split_heads.plan import PARTS, SPLIT_HEADS, HeadsPlan
from workbench.lab.split_heads import judge

SITE = r"at PTX line \d+ \(\S+\.py:\d+\)"


def row_of(name: str, policies: list[Policy] | None = None) -> HazardRow:
    policies = policies or schedules_of(range(4))
    return run_hazards([name], policies=policies, all_shapes=False)[0]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("threads", "all"),
        *(
            pytest.param(name, columns, marks=pytest.mark.slow)
            for name, columns in (("shapes", None), ("early-read", "all"), ("overwrite", "all"))
        ),
    ],
)
def test_what_the_isa_leaves_unordered_is_found_and_gives_wrong_numbers(
    name: str, columns: str | None
) -> None:
    row = row_of(name)
    assert row.passed, row
    assert len(re.findall(SITE, row.findings[0])) == 2 and "\n" not in row.findings[0]
    assert columns is None or columns in row.wrong_columns


@pytest.mark.slow
def test_halves_of_another_shape_go_wrong_on_one_side() -> None:
    row = row_of("shapes", schedules_of(range(4)))
    assert {"0-127", "128-255"} & set(row.wrong_columns)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late-operand", "fence-only"])
def test_the_readings_of_the_evidence(name: str) -> None:
    row = row_of(name)
    assert row.passed, row
    assert row.findings[0].startswith("error: ")


@pytest.mark.parametrize(
    "name", ["wgmma-early-read", pytest.param("wgmma-overwrite", marks=pytest.mark.slow)]
)
def test_wgmma_must_be_waited_for(name: str) -> None:
    row = row_of(name)
    assert row.passed and row.wrong_schedules > 0, row
    assert "needs wgmma.wait_group" in row.findings[0]


@pytest.mark.parametrize(
    "name", ["pair", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pair-ws", "wgmma-pair"))]
)
def test_the_reference_kernels_pair_is_ordered(name: str) -> None:
    row = row_of(name)
    assert row.passed and row.findings == [] and row.wrong_schedules == 0


@pytest.mark.slow
def test_a_schedule_can_be_run_again() -> None:
    found = row_of("threads")
    assert found.wrong_schedule is not None
    kind, seed = re.fullmatch(r"(\w+), seed (\d+)", found.wrong_schedule).groups()  # type: ignore[union-attr]
    arguments = ["--only", "threads", "--schedule", kind, "--schedule-seed", seed]
    shown = CliRunner().invoke(hazards, arguments)
    assert shown.exit_code == 0 and f"{kind}, seed {seed}" in shown.output


def test_silence_where_a_finding_is_due_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = next(hazard for hazard in HAZARDS if hazard.name == "pair")
    expected = replace(pair, code=("unordered-mma",), wrong="D")
    monkeypatch.setattr("workbench.lab.hazards.HAZARDS", (expected,))
    assert not row_of("pair", schedules_of(range(1))).passed


def test_the_command_knows_every_hazard() -> None:
    assert tuple(hazard.name for hazard in HAZARDS) == NAMES


WARPS, LANES = 4, 32
CORES = {
    "f16": precision.HOPPER["fp16"],
    "bf16": precision.HOPPER["bf16"],
    "tf32": precision.TensorCore(8, 25, 23),
    "e4m3": precision.HOPPER["e4m3"],
    "e5m2": precision.TensorCore(32, 13, 13),
}
RANDOM = [
    *(
        f"f32.{a}.{b}.n8.random{how}"
        for a, b in (
            ("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), ("e4m3", "e4m3"), ("e4m3", "e5m2")
        )
        for how in ("", ".chain", ".registers")
    ),
    "f32.e5m2.e4m3.n8.random",
    "f32.e5m2.e5m2.n8.random",
]  # fmt: skip
SPECIALS = {"f16": 144, "bf16": 37, "tf32": 208, "e4m3": 385, "e5m2": 60}
"""Programs with any bits as operands, and how many of their 512 sums are finite."""


def _matrix(cells):
    """Registers (n / 2, 32) of a warp's D as (16, n)."""
    n = 2 * len(cells)
    return cells.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, n)


def _replayed(program, core, monkeypatch):
    """D (64, n) of a recorded program by the rule; the operands are those that ptxemu reads."""
    from tests.silicon import emulate

    from ptxemu.numerics import dot

    totals: dict[int, np.ndarray] = {}
    now: list[tuple[int, np.ndarray, np.ndarray]] = []
    product, accumulated = dot.product, dot.accumulated

    def watch_product(a, b):
        warp = sys._getframe(1).f_locals["warp"].index
        now.append((warp, a, b))
        return product(a, b)

    def watch_accumulated(before, sums, type_, **options):
        warp, a, b = now.pop()
        if warp not in totals:
            assert before is not None
            totals[warp] = _matrix(before.view(np.float32)).astype(np.float64)
        totals[warp] = precision.tensor_core_step(core, totals[warp], a, b)
        return accumulated(before, sums, type_, **options)

    with monkeypatch.context() as patched:
        patched.setenv("PTXEMU_CORE", "numpy")  # what is watched makes every product
        patched.setattr(dot, "product", watch_product)
        patched.setattr(dot, "accumulated", watch_accumulated)
        emulate.run(program)
    return np.concatenate([totals[warp] for warp in range(WARPS)])


def _both(name, core, monkeypatch):
    """D (64, n) by the rule, and as recorded."""
    from tests.silicon.programs import wgmma
    from tests.silicon.silicon_archive import Archive

    program = next(p for p in wgmma.programs() if p.name == f"wgmma/{name}")
    recording = Archive.load().programs[program.name]
    assert recording.digest == program.digest()
    words = np.frombuffer(recording.results[0], np.float32).reshape(WARPS, LANES, -1)
    with np.errstate(all="ignore"):
        replayed = _replayed(program, core, monkeypatch)
    return replayed, np.concatenate([_matrix(warp.T) for warp in words])


def test_the_rule_gives_the_sums_of_an_h200_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANDOM:
        replayed, recorded = _both(name, CORES[name.split(".")[1]], monkeypatch)
        assert recorded.size == 512, name
        assert np.array_equal(replayed, recorded), name


@pytest.mark.slow
def test_the_rule_gives_the_finite_sums_of_any_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, finite in SPECIALS.items():
        replayed, recorded = _both(f"specials.{dtype}", CORES[dtype], monkeypatch)
        is_finite = np.isfinite(recorded) & np.isfinite(replayed)
        assert is_finite.sum() >= finite, dtype
        assert np.array_equal(replayed[is_finite], recorded[is_finite]), dtype


def test_one_bit_more_or_less_gives_other_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (24, 26):
        replayed, recorded = _both(RANDOM[0], precision.TensorCore(16, bits, 23), monkeypatch)
        assert not np.array_equal(replayed, recorded), bits


def test_a_product_counts_with_the_sum_of_its_operands_exponents() -> None:
    core = precision.TensorCore(2, 3, 23)
    zero = np.zeros((1, 1))
    b = np.array([[1.5, 1.0]])
    # 1.5 * 1.5 = 2.25 has exponent 0 here, so 1/8 is kept; were it 1, 1/8 would be cut off
    assert precision.tensor_core_step(core, zero, np.array([[1.5, 0.125]]), b) == 2.25 + 0.125
    assert precision.tensor_core_step(core, zero, np.array([[2.0, 0.125]]), b) == 3.0
    assert precision.tensor_core_step(core, np.array([[8.0]]), np.array([[0.5, -0.25]]), b) == 8.0


def test_every_order_is_exact_on_small_integers() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-2, 3, (5, 256)).astype(float) for _ in range(2))
    for dtype in precision.HOPPER:
        for name, order in precision.orders(dtype, 256).items():
            assert np.array_equal(order(a, b), a @ b.T), (dtype, name)


def test_rounding_is_to_nearest_even() -> None:
    assert precision.rounded(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8]), "bf16").tolist() == [
        1,
        1 + 2.0**-6,
    ]
    assert precision.rounded(np.array([1 + 2.0**-4, 1 + 3 * 2.0**-4]), "e4m3").tolist() == [1, 1.25]
    assert precision.rounded(np.array([1 + 2.0**-11]), "fp16").tolist() == [1]


def test_errors_grow_as_the_orders_say() -> None:
    short, long = precision.measure(("bf16",), (256, 2048))
    assert 1e-3 < short.rounding < 4e-3 and 1e-3 < long.rounding < 4e-3
    grown = {name: long.sums[name] / short.sums[name] for name in short.sums}
    by_name = {name.partition(" (")[0]: growth for name, growth in grown.items()}
    assert by_name["pairwise fp32"] < 2
    assert by_name["per MMA, to nearest"] < 5  # 8 ** 0.5 is 2.8
    assert by_name["wgmma on H200"] > 5.5  # cut off: with K itself
    promoted = long.sums[f"wgmma, fp32 every {precision.PROMOTED_EVERY}"]
    assert promoted < long.sums["wgmma on H200"] / 5


def test_fp8_sums_lose_what_promotion_keeps() -> None:
    (row,) = precision.measure(("e4m3",), (4096,))
    assert row.rounding > 10 * row.sums["wgmma on H200"] > 50 * row.sums["wgmma, fp32 every 128"]


def test_the_table_shows_every_number_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("pairwise", "sequential", "per MMA", "wgmma", "wgmma/8", "wgmma+fp32")
    sums = {name: 1.2e-07 * (place + 1) for place, name in enumerate(names)}
    print_rows((precision.PrecisionRow("bf16", 8192, 2.3e-03, sums),))
    shown = capsys.readouterr().out.split()
    sums_shown = ["1.2e-7", "2.4e-7", "3.6e-7", "4.8e-7", "6.0e-7", "7.2e-7"]
    assert shown[-8:] == ["8192", "2.3e-3", *sums_shown]


PLAN = HeadsPlan()
CASES = [
    # name, S, S_kv, H, topk
    SparseMlaCase("fewer keys than slots", 1, 20, 128, 64, invalid=True, poison=True),
    SparseMlaCase("2048 slots", 1, 1500, 128, 2048, duplicates=True, invalid=True),
]


@pytest.mark.slow
def test_the_command_judges_three_blocks_in_which_every_ring_goes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_heads, "judge", cache(judge))  # one run for both forms
    shown, run = (
        CliRunner().invoke(cli, ["lab", "split-heads", *form]) for form in ([], ["--json"])
    )
    assert (shown.exit_code, run.exit_code) == (0, 0) and "dKV" in shown.output, run.output
    document = json.loads(run.stdout)
    assert [verdict["output"] for verdict in document["verdicts"]] == ["dQ", "dKV"]
    assert (document["passed"], document["findings"], document["grid"][0]) == (True, [], 4)
    assert (document["plan"]["smem"]["total"], PLAN.tmem.allocated) == (222_148, 512)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["eager", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_right_whenever_asynchronous_work_happens(
    case: SparseMlaCase, when: str
) -> None:
    judged = judge(case, Policy(asynchronous=when, seed=3))
    assert (failures(judged.verdicts), judged.findings) == ([], [])


@pytest.mark.slow
def test_the_instructions_that_make_it_the_reference_design() -> None:
    """S^T, dS^T and dS are A in tensor memory; keys and dKV are read in the peer; dQ leaves by bulk
    copies, dKV by bulk reduce-adds, and by nothing else."""
    text = str(compiled(SPLIT_HEADS, PLAN).__ptx__)
    assert set(re.findall(r"cta_group::\d", text)) == {"cta_group::1"}
    products = re.findall(r"tcgen05\.mma(\.ws)?\.cta\S*\s+\[[^]]+\], (\[?)%", text)
    # P and dP; a step of 16 heads of five products of dKV, one of 16 keys of three of dQ
    assert products.count(("", "")) == 36 + 32
    assert products.count((".ws", "[")) == len(products) - 68 == 5 * 4 + 3 * 2
    assert [(product.column, product.columns) for product in products_of(PLAN).dq] == [
        (0, 128), (128, 128), (256, 32),
    ]  # fmt: skip
    assert len(re.findall(r"ld\.shared::cluster\.v4", text)) == 9 + (2 * 64 + 16) // 4
    reduce_add = r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32"
    assert len(re.findall(reduce_add, text)) == PARTS
    assert "cp.async.bulk.global.shared::cta.bulk_group" in text
    assert not re.search(r"\b(red|atom)\.\S*global", text)


def test_a_plan_beyond_the_architecture_is_refused() -> None:
    with pytest.raises(BudgetError, match="rows is the first region beyond"):
        replace(PLAN, index_stages=100)
    with pytest.raises(BudgetError, match="registers: 66560 planned"):
        replace(PLAN, softmax_registers=144)
