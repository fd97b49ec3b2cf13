"""`python -m workbench plan`: what plans hold, choices, pictures, and the pages' tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan.kernel_spec import KernelSpec
from tests.support.full_disk import full_disk
from workbench.__main__ import cli
from workbench.cli.plan import choices_of, find_variant, planned_kernels

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """`run("plan", "indexer")` is `python -m workbench plan indexer`."""
    return lambda *arguments: CliRunner().invoke(cli, list(arguments))


def test_json_holds_every_region_barrier_and_role(run: Run) -> None:
    document = json.loads(run("plan", "indexer", "--json", "--num-heads", "16").stdout)
    plan = IndexerPlan(num_heads=16)
    assert document["choices"]["num_heads"] == 16
    assert document["smem"]["total"] == plan.smem.total
    assert [r["offset"] for r in document["smem"]["regions"]] == list(plan.smem.offsets)
    assert [b["arrivals"] for b in document["barriers"]] == [b.arrivals for b in plan.barriers]
    assert [r["threads"] for r in document["roles"]] == [r.threads for r in plan.roles]


@pytest.mark.parametrize("option", [(), ("--markdown",), ("--rows", "clusters")], ids=str)
def test_text_and_markdown_show_all_tables_in_100_columns(run: Run, option: tuple[str]) -> None:
    output = run("plan", "indexer", "--arch", "sm_90a", *option).output
    threads = f"{IndexerPlan().threads} threads"
    for word in ("histogram", "232,448", "page_empty", "tile_full", "load", "select", threads):
        assert word in output
    if option != ("--markdown",):
        assert max(len(line) for line in output.splitlines()) <= 100


def test_brackets_are_text(run: Run) -> None:
    assert "Q of the item, 9 x [heads, 64] SW128" in run("plan", "mla_decode_heads").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-heads", "48"), "--num-heads: expected 16, 32 or 64; got 48"),
        (("--arch", "sm_80"), "'sm_80' is not one of 'sm_90a', 'sm_100a'"),
        (("--rows", "pages"), "--rows: expected cluster or clusters; got pages"),
        (
            ("--arch", "sm_100a", "--num-heads", "16", "--gathers"),
            "no variant is compiled with --num-heads 16 and --gathers",
        ),
        (("--json", "--markdown"), "--markdown: not together with --json"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("plan", "indexer", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_plan_has_the_name_of_its_compiled_function_too(run: Run) -> None:
    """Names as `choose` prints them; not all kernels have roles to show."""
    document = json.loads(run("plan", "mla_fwd_drawn", "--json").stdout)
    assert document["kernel"] == "mla_fwd" and document["choices"]["drawn"]
    assert json.loads(run("plan", "mla_fwd", "--drawn", "--json").stdout) == document
    done = run("plan", "mla_used_slots")
    assert done.exit_code == 2 and "python -m workbench inspect mla_used_slots" in done.stderr
    done = run("plan", "mla_fwd_drawn", "--json", "--markdown")
    assert done.exit_code == 2 and "--markdown: not together with --json" in done.stderr


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_mla_bwds_picture_is_drawn_beside_the_tables(
    run: Run, tmp_path: Path, name: str, start: bytes
) -> None:
    result = run("plan", "mla_bwd", "--json", "--picture", str(tmp_path / name))
    assert json.loads(result.stdout)["kernel"] == "mla_bwd"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    """Refused before it is drawn; a full disk leaves what was there."""
    path = tmp_path / "x.svg"
    path.write_text("as it was")
    for place, message in (
        (path / "y.svg", "--picture: cannot write "),
        ("/proc/nope/x.svg", "--picture: cannot write "),
        (tmp_path / "x.bmpx", "--picture: expected a name ending in .png, .svg"),
        (tmp_path, "--picture: expected a name ending in"),
    ):
        result = run("plan", "mla_bwd", "--picture", str(place))
        assert result.exit_code == 2 and message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    with full_disk():
        result = run("plan", "mla_bwd", "--picture", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith(f"File too large: '{path}'")
    assert path.read_text() == "as it was" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("spec", planned_kernels(), ids=lambda spec: f"{spec.name}-{spec.arch}")
def test_a_choice_that_is_not_compiled_is_answered_by_those_that_are(spec: KernelSpec) -> None:
    for name in choices_of([spec]):
        values = {variant.choices[name] for variant in spec.variants}
        if not isinstance(next(iter(values)), bool):
            with pytest.raises(ValueError) as error:
                find_variant(spec, {name: 513})
            said = str(error.value)
            assert said.startswith(f"--{name.replace('_', '-')}: expected ")
            listed = said.removesuffix("; got 513").partition("expected ")[2]
            assert {*re.split(", | or ", listed)} == {str(value) or "''" for value in values}


def test_the_kernels_pages_show_the_plans_of_today() -> None:
    """tools/plan_tables.py writes them."""
    tool = Path(__file__).parents[2] / "tools" / "plan_tables.py"
    run = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
