"""Hazards: findings name both instructions; schedules give wrong numbers; silence if ordered."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

from ptxemu import Policy
from workbench.cli.lab_hazards import NAMES, hazards
from workbench.lab.hazards import HAZARDS, HazardRow, run_hazards, schedules_of

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
