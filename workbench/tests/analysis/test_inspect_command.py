"""`python -m workbench inspect`: output, our kernels against their plans, errors in one line."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import find_kernel
from flashdsa.toolchain import Assembler, Disassembler
from workbench.__main__ import cli
from workbench.tests.analysis.ptx_texts import roles_of, sums_of

PAGES = Path(__file__).parents[3] / "docs/kernels"
PAGE = PAGES / "mla-bwd-sm100.md"
OTHERS = (
    ("indexer", "sm_90a"),
    ("indexer", "sm_100a"),
    # All warps run code of a role before they part.
    ("indexer_h64_clusters", "sm_90a"),
    ("indexer_logits", "sm_90a"),
    ("topk_indices", "sm_90a"),
    ("mla_fwd", "sm_90a"),
    ("mla_fwd_group4", "sm_90a"),
    ("sm100_indexer_h64_clusters", "sm_100a"),
    ("indexer_logits", "sm_100a"),
)
"""Variants that take a process of minutes together."""
needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="needs CuTe DSL, which compiles the kernel"
)


def run(*arguments: object) -> Result:
    """`python -m workbench inspect` in this process."""
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)])


@pytest.fixture
def ptx(tmp_path: Path) -> Path:
    """A file with two roles."""
    path = tmp_path / "k.ptx"
    path.write_text(roles_of(60, 200) + "\0")
    return path


def test_forms_of_output(assembler: Assembler, disassembler: Disassembler, ptx: Path) -> None:
    text = run(ptx)
    assert text.exit_code == 0, text.output
    assert max(map(len, text.stdout.splitlines())) <= 100
    for word in ("registers at launch", "setmaxnreg 200", "PTX:", "synchronisation", "- before"):
        assert word in text.stdout
    document = json.loads(run(ptx, "--json", "--arch", "sm_90a").stdout)
    (kernel,) = document["kernels"]
    assert [role["budget"] for role in kernel["roles"]] == [128, 200, 24]
    markdown = run(ptx, "--markdown").stdout
    assert "| registers at launch | 128 |" in markdown
    assert all(line.startswith("| ") for line in markdown.splitlines() if "---" in line)


def test_exit_code_1_when_a_role_spills(
    assembler: Assembler, disassembler: Disassembler, tmp_path: Path
) -> None:
    path = tmp_path / "k.cubin"
    spilling = sums_of(100, directive=".reqntid 128 .maxnreg 64")
    path.write_bytes(assembler.assemble(spilling, "sm_90a").image)
    result = run(path)
    assert result.exit_code == 1
    assert "lie in local memory" in result.stdout


@needs_dsl
@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), [("mla_bwd", "sm_100a"), *OTHERS])
def test_our_kernels_have_the_roles_of_their_plans(
    disassembler: Disassembler, name: str, arch: str
) -> None:
    result = run(name, "--json", "--arch", arch)
    kernel = json.loads(result.stdout)["kernels"][0]
    planned = find_kernel(KERNELS, name, arch)
    assert [role["name"] for role in kernel["roles"]] == [r.name for r in planned.plan.roles]
    assert [role["budget"] for role in kernel["roles"]] == [r.registers for r in planned.plan.roles]
    assert kernel["threads"] == planned.plan.threads
    assert kernel["dynamic_shared_bytes"] == planned.plan.smem_bytes
    assert (kernel["lines"], kernel["local_stores"], kernel["stack_bytes"]) == ("source", 0, 0)
    for role in kernel["roles"]:
        assert role["live"] <= role["named"] <= role["budget"]
    assert result.exit_code == 0
    if name == "mla_bwd":
        table = PAGE.read_text().split("## Registers")[1].split("## ")[0]
        rows = re.findall(r"\| (\w+) \| (\d+) \| (\d+) \| ", table)
        shown = [(role, int(live), int(budget)) for role, live, budget in rows]
        assert shown == [(r["name"], r["live"], r["budget"]) for r in kernel["roles"]], PAGE
    if (name, arch) == ("indexer", "sm_100a"):
        page = " ".join((PAGES / "indexer-sm100.md").read_text().split())
        registers = [f"{r['name']} {r['live']} of {r['budget']}" for r in kernel["roles"]]
        assert ": " + ", ".join(registers) in page


@needs_dsl
@pytest.mark.slow
def test_kernels_without_roles_are_reported_whole(disassembler: Disassembler) -> None:
    name, arch = "write_index_k_cache", "sm_90a"
    (kernel,) = json.loads(run(name, "--arch", arch, "--json").stdout)["kernels"]
    planned = find_kernel(KERNELS, name, arch)
    assert planned.spec.entry in kernel["name"] and kernel["arch"] == arch
    assert [role["name"] for role in kernel["roles"]] == ["whole kernel"]
    assert kernel["dynamic_shared_bytes"] == planned.plan.smem_bytes
    assert (kernel["lines"], kernel["local_stores"], kernel["stack_bytes"]) == ("source", 0, 0)


@needs_dsl
@pytest.mark.slow
def test_all_kernels_of_a_name_are_reported(disassembler: Disassembler) -> None:
    kernels = json.loads(run("mla_bwd_deterministic", "--json").stdout)["kernels"]
    entries = ("backward_kernel", "ordered_sum_kernel", "delta_kernel")  # the largest first
    assert all(entry in kernel["name"] for entry, kernel in zip(entries, kernels, strict=True))
    assert {kernel["grade"] for kernel in kernels} == {"ok"}


def test_help_names_every_kernel() -> None:
    text = run("--help").stdout
    assert all(spec.name in text for spec in KERNELS)


def test_errors_are_one_line(
    assembler: Assembler, disassembler: Disassembler, ptx: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.cubin"
    text.write_text("no ELF")
    cubin = tmp_path / "k.cubin"
    cubin.write_bytes(assembler.assemble(sums_of(8), "sm_90a").image)
    for arguments, message in {
        (text,): "no ELF file",
        (cubin, "--arch", "sm_100a"): "made for sm_90a; got --arch sm_100a",
        (cubin, "--kernel", "nothing"): "--kernel nothing: not in sums",
        (ptx, "--arch", "sm_100a"): "refuses it for sm_100a",
        ("nothing",): "kernels: indexer",
        ("mla_bwd", "--arch", "sm_90a"): "written for sm_100a; got --arch sm_90a",
        (tmp_path / "absent.ptx",): "No such file",
        (ptx, "--json", "--markdown"): "not together",
    }.items():
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["nothing", "nothing.cubin", "nothing.ptx"])
def test_a_target_that_is_not_there_is_said_before_a_tool_that_lacks(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(Disassembler, "find", lambda: None)
    result = run(target)
    assert result.exit_code == 2 and re.search("no kernel of that|No such file", result.stderr)


def test_without_nvdisasm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, ptx: Path) -> None:
    monkeypatch.setattr(Disassembler, "find", lambda: None)
    result = run(ptx)
    assert result.exit_code == 2
    assert "pip install 'nvidia-cuda-nvdisasm" in result.stderr
